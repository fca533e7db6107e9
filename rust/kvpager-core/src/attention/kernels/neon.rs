//! NEON: 4 lanes, 32 registers.

use std::arch::aarch64::*;

const NAME: &str = "neon";
const LANES: usize = 4;
/// Vectors of a value row held for four query rows at once.
const VALUE_COLUMNS: usize = 4;
type V = float32x4_t;

/// Whether the processor supports it.
pub(super) fn is_available() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

/// Defines the vector operations, each with the target features of this file.
macro_rules! operations {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline]
            #[target_feature(enable = "neon")]
            fn $name($($argument: $kind),*) -> $result $body
        )*
    };
}

operations! {
    fn zero() -> V { vdupq_n_f32(0.0) }
    fn splat(x: f32) -> V { vdupq_n_f32(x) }
    fn fma(a: V, b: V, c: V) -> V { vfmaq_f32(c, a, b) }
    fn neg_fma(a: V, b: V, c: V) -> V { vfmsq_f32(c, a, b) }
    fn add(a: V, b: V) -> V { vaddq_f32(a, b) }
    fn mul(a: V, b: V) -> V { vmulq_f32(a, b) }
    fn div(a: V, b: V) -> V { vdivq_f32(a, b) }
    fn vmax(a: V, b: V) -> V { vmaxq_f32(a, b) }
    fn round(a: V) -> V { vrndnq_f32(a) }
    fn pow2(a: V) -> V {
        let exponent = vaddq_s32(vcvtq_s32_f32(a), vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
    }
    fn lane_numbers() -> V {
        // SAFETY: the array has 4 floats.
        unsafe { vld1q_f32([0.0f32, 1.0, 2.0, 3.0].as_ptr()) }
    }
    fn keep_between(v: V, x: V, low: V, high: V) -> V {
        vbslq_f32(vandq_u32(vcgeq_f32(x, low), vcltq_f32(x, high)), v, vdupq_n_f32(f32::NEG_INFINITY))
    }
    fn zero_below(v: V, x: V, low: V) -> V { vbslq_f32(vcltq_f32(x, low), vdupq_n_f32(0.0), v) }
    fn pick_below(x: V, limit: V, a: V, b: V) -> V { vbslq_f32(vcltq_f32(x, limit), a, b) }
    fn sum(a: V) -> f32 { vaddvq_f32(a) }
    fn maximum(a: V) -> f32 { vmaxvq_f32(a) }
    fn reduce(a: [V; LANES]) -> V { vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])) }
    fn prefetch(at: *const u8) -> () {
        // SAFETY: a hint; it reads nothing and traps at no address.
        unsafe { std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) at, options(nostack, readonly, preserves_flags)) }
    }
}

/// # Safety
/// 4 floats at `at` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load(at: *const f32) -> V {
    // SAFETY: by the caller's promise.
    unsafe { vld1q_f32(at) }
}

/// # Safety
/// 4 floats at `at` are writable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn store(at: *mut f32, v: V) {
    // SAFETY: by the caller's promise.
    unsafe { vst1q_f32(at, v) }
}

/// # Safety
/// 4 elements at `at` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_f16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    unsafe {
        load([0, 1, 2, 3].map(|i| crate::attention::dtype::decode_f16(at.add(i).read_unaligned())).as_ptr())
    }
}

/// # Safety
/// 4 elements at `at` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_bf16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    vreinterpretq_f32_u32(vshll_n_u16::<16>(unsafe { vld1_u16(at) }))
}

/// # Safety
/// 8 elements at `at` are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load_pairs(at: *const u16) -> (V, V) {
    // SAFETY: by the caller's promise.
    let bits = unsafe { vreinterpretq_u32_u16(vld1q_u16(at)) };
    let odd = vandq_u32(bits, vdupq_n_u32(0xffff_0000));
    (vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits)), vreinterpretq_f32_u32(odd))
}

tile_kernels!("neon");
