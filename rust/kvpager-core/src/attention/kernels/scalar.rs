//! No intrinsics: 8 lanes as an array, which the compiler maps to what the target surely has.

use crate::attention::dtype::{decode_bf16, decode_f16};

const NAME: &str = "scalar";
const LANES: usize = 8;
const VALUE_COLUMNS: usize = 2;

#[derive(Clone, Copy)]
struct V([f32; LANES]);

#[inline(always)]
fn map(a: V, f: impl Fn(f32) -> f32) -> V {
    V(std::array::from_fn(|i| f(a.0[i])))
}

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    V(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

#[inline(always)]
fn zero() -> V {
    splat(0.0)
}

#[inline(always)]
fn splat(x: f32) -> V {
    V([x; LANES])
}

#[inline(always)]
fn fma(a: V, b: V, c: V) -> V {
    V(std::array::from_fn(|i| a.0[i] * b.0[i] + c.0[i]))
}

#[inline(always)]
fn neg_fma(a: V, b: V, c: V) -> V {
    V(std::array::from_fn(|i| c.0[i] - a.0[i] * b.0[i]))
}

#[inline(always)]
fn add(a: V, b: V) -> V {
    zip(a, b, |x, y| x + y)
}

#[inline(always)]
fn mul(a: V, b: V) -> V {
    zip(a, b, |x, y| x * y)
}

#[inline(always)]
fn div(a: V, b: V) -> V {
    zip(a, b, |x, y| x / y)
}

#[inline(always)]
fn vmax(a: V, b: V) -> V {
    zip(a, b, |x, y| if x > y { x } else { y })
}

/// Rounds to the nearest whole number, for magnitudes below 2^22.
#[inline(always)]
fn round(a: V) -> V {
    const SHIFT: f32 = 12_582_912.0;
    map(a, |x| (x + SHIFT) - SHIFT)
}

#[inline(always)]
fn pow2(a: V) -> V {
    // A NaN becomes 0 here; the mantissa it is multiplied with is NaN too.
    map(a, |x| f32::from_bits((((x as i32) + 127) << 23) as u32))
}

#[inline(always)]
fn lane_numbers() -> V {
    V(std::array::from_fn(|i| i as f32))
}

#[inline(always)]
fn keep_between(v: V, x: V, low: V, high: V) -> V {
    V(std::array::from_fn(
        |i| {
            if x.0[i] >= low.0[i] && x.0[i] < high.0[i] { v.0[i] } else { f32::NEG_INFINITY }
        },
    ))
}

#[inline(always)]
fn zero_below(v: V, x: V, low: V) -> V {
    V(std::array::from_fn(|i| if x.0[i] < low.0[i] { 0.0 } else { v.0[i] }))
}

#[inline(always)]
fn pick_below(x: V, limit: V, a: V, b: V) -> V {
    V(std::array::from_fn(|i| if x.0[i] < limit.0[i] { a.0[i] } else { b.0[i] }))
}

#[inline(always)]
fn sum(a: V) -> f32 {
    let [a, b, c, d, e, f, g, h] = a.0;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[inline(always)]
fn maximum(a: V) -> f32 {
    a.0.into_iter().fold(f32::NEG_INFINITY, |x, y| if x > y { x } else { y })
}

#[inline(always)]
fn reduce(a: [V; LANES]) -> V {
    V(std::array::from_fn(|i| sum(a[i])))
}

#[inline(always)]
fn prefetch(_at: *const u8) {}

/// # Safety
/// 8 floats at `at` are readable.
#[inline(always)]
unsafe fn load(at: *const f32) -> V {
    // SAFETY: by the caller's promise.
    V(unsafe { at.cast::<[f32; LANES]>().read_unaligned() })
}

/// # Safety
/// 8 floats at `at` are writable.
#[inline(always)]
unsafe fn store(at: *mut f32, v: V) {
    // SAFETY: by the caller's promise.
    unsafe { at.cast::<[f32; LANES]>().write_unaligned(v.0) }
}

/// # Safety
/// 8 elements at `at` are readable.
#[inline(always)]
unsafe fn load_f16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    V(unsafe { at.cast::<[u16; LANES]>().read_unaligned() }.map(decode_f16))
}

/// # Safety
/// 8 elements at `at` are readable.
#[inline(always)]
unsafe fn load_bf16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    V(unsafe { at.cast::<[u16; LANES]>().read_unaligned() }.map(decode_bf16))
}

/// # Safety
/// 16 elements at `at` are readable.
#[inline(always)]
unsafe fn load_pairs(at: *const u16) -> (V, V) {
    // SAFETY: by the caller's promise.
    let bits = unsafe { at.cast::<[u16; 2 * LANES]>().read_unaligned() };
    let pick = |odd: usize| V(std::array::from_fn(|i| decode_bf16(bits[2 * i + odd])));
    (pick(0), pick(1))
}

#[cfg(target_arch = "x86_64")]
tile_kernels!("sse2");
#[cfg(target_arch = "aarch64")]
tile_kernels!("neon");
