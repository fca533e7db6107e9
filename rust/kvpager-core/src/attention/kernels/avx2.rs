//! AVX2 with FMA and F16C: 8 lanes, 16 registers.

use std::arch::x86_64::*;

const NAME: &str = "avx2";
const LANES: usize = 8;
/// Vectors of a value row held for four query rows at once.
const VALUE_COLUMNS: usize = 2;
type V = __m256;

/// Whether the processor and the system support it.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Defines the vector operations, each with the target features of this file.
macro_rules! operations {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn $name($($argument: $kind),*) -> $result $body
        )*
    };
}

operations! {
    fn zero() -> V { _mm256_setzero_ps() }
    fn splat(x: f32) -> V { _mm256_set1_ps(x) }
    fn fma(a: V, b: V, c: V) -> V { _mm256_fmadd_ps(a, b, c) }
    fn neg_fma(a: V, b: V, c: V) -> V { _mm256_fnmadd_ps(a, b, c) }
    fn add(a: V, b: V) -> V { _mm256_add_ps(a, b) }
    fn mul(a: V, b: V) -> V { _mm256_mul_ps(a, b) }
    fn div(a: V, b: V) -> V { _mm256_div_ps(a, b) }
    fn vmax(a: V, b: V) -> V { _mm256_max_ps(a, b) }
    fn round(a: V) -> V { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    fn pow2(a: V) -> V {
        let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
    }
    fn lane_numbers() -> V { _mm256_setr_ps(0., 1., 2., 3., 4., 5., 6., 7.) }
    fn keep_between(v: V, x: V, low: V, high: V) -> V {
        let inside = _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x, low), _mm256_cmp_ps::<_CMP_LT_OQ>(x, high));
        _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), v, inside)
    }
    fn zero_below(v: V, x: V, low: V) -> V { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, low), v) }
    fn pick_below(x: V, limit: V, a: V, b: V) -> V {
        _mm256_blendv_ps(b, a, _mm256_cmp_ps::<_CMP_LT_OQ>(x, limit))
    }
    fn sum(a: V) -> f32 {
        let quarter = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
    }
    fn maximum(a: V) -> f32 {
        let quarter = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
        _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
    }
    /// The low half sums the halves of `a`, the high half those of `b`.
    fn fold_halves(a: V, b: V) -> V {
        add(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
    }
    /// Transposes and adds 4 vectors whose halves are partial sums of one vector each.
    fn fold_lanes(a: V, b: V, c: V, d: V) -> V {
        let ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        add(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd))
    }
    fn reduce(a: [V; LANES]) -> V {
        // The halves of `fold_halves(a[i], a[i + 4])` belong to vectors i and i + 4.
        let (h0, h1) = (fold_halves(a[0], a[4]), fold_halves(a[1], a[5]));
        let (h2, h3) = (fold_halves(a[2], a[6]), fold_halves(a[3], a[7]));
        fold_lanes(h0, h1, h2, h3)
    }
    fn prefetch(at: *const u8) -> () {
        // A prefetch of any address is allowed: it reads nothing.
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// # Safety
/// 8 floats at `at` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(at: *const f32) -> V {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_loadu_ps(at) }
}

/// # Safety
/// 8 floats at `at` are writable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(at: *mut f32, v: V) {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_storeu_ps(at, v) }
}

/// # Safety
/// 8 elements at `at` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_f16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// # Safety
/// 8 elements at `at` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_bf16(at: *const u16) -> V {
    // SAFETY: by the caller's promise.
    let bits = unsafe { _mm_loadu_si128(at.cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}

/// # Safety
/// 16 elements at `at` are readable.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_pairs(at: *const u16) -> (V, V) {
    // SAFETY: by the caller's promise.
    let bits = unsafe { _mm256_loadu_si256(at.cast()) };
    let even = _mm256_slli_epi32::<16>(bits);
    let odd = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    (_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd))
}

tile_kernels!("avx2,fma,f16c");
