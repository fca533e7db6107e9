//! AVX-512: 16 lanes, 32 registers.

use std::arch::x86_64::*;

const NAME: &str = "avx512";
const LANES: usize = 16;
/// Vectors of a value row held for four query rows at once.
const VALUE_COLUMNS: usize = 4;
type V = __m512;

/// Whether the processor and the system support it.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Defines the vector operations, each with the target features of this file.
macro_rules! operations {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn $name($($argument: $kind),*) -> $result $body
        )*
    };
}

operations! {
    fn zero() -> V { _mm512_setzero_ps() }
    fn splat(x: f32) -> V { _mm512_set1_ps(x) }
    fn fma(a: V, b: V, c: V) -> V { _mm512_fmadd_ps(a, b, c) }
    fn neg_fma(a: V, b: V, c: V) -> V { _mm512_fnmadd_ps(a, b, c) }
    fn add(a: V, b: V) -> V { _mm512_add_ps(a, b) }
    fn mul(a: V, b: V) -> V { _mm512_mul_ps(a, b) }
    fn div(a: V, b: V) -> V { _mm512_div_ps(a, b) }
    fn vmax(a: V, b: V) -> V { _mm512_max_ps(a, b) }
    fn round(a: V) -> V { _mm512_roundscale_ps::<0>(a) }
    fn pow2(a: V) -> V {
        let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(a), _mm512_set1_epi32(127));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
    }
    fn lane_numbers() -> V {
        _mm512_setr_ps(0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.)
    }
    fn keep_between(v: V, x: V, low: V, high: V) -> V {
        let inside = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, low) & _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, high);
        _mm512_mask_blend_ps(inside, _mm512_set1_ps(f32::NEG_INFINITY), v)
    }
    fn zero_below(v: V, x: V, low: V) -> V {
        _mm512_maskz_mov_ps(!_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, low), v)
    }
    fn pick_below(x: V, limit: V, a: V, b: V) -> V {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, limit), b, a)
    }
    fn sum(a: V) -> f32 { _mm512_reduce_add_ps(a) }
    fn maximum(a: V) -> f32 { _mm512_reduce_max_ps(a) }
    /// Halves: lanes 0..8 sum halves of `a`, 8..16 those of `b`.
    fn fold_halves(a: V, b: V) -> V {
        add(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b))
    }
    /// Quarters of folded pairs: each 128-bit part holds the partial sums of one vector.
    fn fold_quarters(a: V, b: V) -> V {
        add(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b))
    }
    /// Transposes and adds 4 vectors whose 128-bit parts are partial sums of one vector each.
    fn fold_lanes(a: V, b: V, c: V, d: V) -> V {
        let ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let low = _mm512_shuffle_ps::<0x44>(ab, cd);
        let high = _mm512_shuffle_ps::<0xee>(ab, cd);
        add(low, high)
    }
    fn reduce(a: [V; LANES]) -> V {
        // Part p of `quarter(i)` belongs to vector 4 p + i, so that lane 4 p + i of the result does.
        let q0 = fold_quarters(fold_halves(a[0], a[4]), fold_halves(a[8], a[12]));
        let q1 = fold_quarters(fold_halves(a[1], a[5]), fold_halves(a[9], a[13]));
        let q2 = fold_quarters(fold_halves(a[2], a[6]), fold_halves(a[10], a[14]));
        let q3 = fold_quarters(fold_halves(a[3], a[7]), fold_halves(a[11], a[15]));
        fold_lanes(q0, q1, q2, q3)
    }
    fn prefetch(at: *const u8) -> () {
        // A prefetch of any address is allowed: it reads nothing.
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// # Safety
/// 16 floats at `at` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn load(at: *const f32) -> V {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_loadu_ps(at) }
}

/// # Safety
/// 16 floats at `at` are writable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn store(at: *mut f32, v: V) {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_storeu_ps(at, v) }
}

/// # Safety
/// 16 elements at `at` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn load_f16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// # Safety
/// 16 elements at `at` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn load_bf16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    let bits = unsafe { _mm256_loadu_si256(at.cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}

/// # Safety
/// 32 elements at `at` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn load_pairs(at: *const u16) -> (V, V) {
    // SAFETY: by the caller's promise.
    let bits = unsafe { _mm512_loadu_si512(at.cast()) };
    let even = _mm512_slli_epi32::<16>(bits);
    let odd = _mm512_and_si512(bits, _mm512_set1_epi32(0xffff_0000_u32 as i32));
    (_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd))
}

tile_kernels!("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");
