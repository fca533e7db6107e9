//! Element types of queries and caches, and the exact conversions between them and fp32.
//!
//! Decoding is exact. Encoding rounds to nearest, ties to even; fp8 saturates at its largest finite value, as
//! the CUDA conversions in saturating mode do, and keeps NaN.

/// An element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// 4 exponent bits, 3 mantissa bits, no infinity (`float8_e4m3fn`).
    F8E4m3,
    /// 5 exponent bits, 2 mantissa bits.
    F8E5m2,
    /// Signed integer with a scale for each token and head.
    I8,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::F8E4m3 | Self::F8E5m2 | Self::I8 => 1,
        }
    }

    /// The name that NumPy and `ml_dtypes` use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::F8E4m3 => "float8_e4m3fn",
            Self::F8E5m2 => "float8_e5m2",
            Self::I8 => "int8",
        }
    }

    /// The type with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16, Self::F8E4m3, Self::F8E5m2, Self::I8]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }

    /// Whether queries, keys and outputs may have this type.
    #[must_use]
    pub const fn is_wide(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

/// bf16 to fp32, exact.
#[inline(always)]
pub(super) fn decode_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// fp16 to fp32, exact.
#[inline(always)]
pub(super) fn decode_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    // Read with the exponent bias of fp32, then moved by 2^(127-15); subnormals come out right as well.
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let special = f32::from_bits((magnitude << 13) | 0x7f80_0000);
    let value = if magnitude >= 0x7c00 { special } else { finite };
    f32::from_bits(value.to_bits() | sign)
}

/// fp8 e4m3 to fp32, exact.
#[inline(always)]
pub(super) fn decode_e4m3(bits: u8) -> f32 {
    let sign = u32::from(bits & 0x80) << 24;
    let magnitude = u32::from(bits & 0x7f);
    let finite = f32::from_bits(magnitude << 20) * f32::from_bits(0x7b80_0000);
    let value = if magnitude == 0x7f { f32::NAN } else { finite };
    f32::from_bits(value.to_bits() | sign)
}

/// fp8 e5m2 to fp32, exact: it is the upper half of an fp16.
#[inline(always)]
pub(super) fn decode_e5m2(bits: u8) -> f32 {
    decode_f16(u16::from(bits) << 8)
}

/// fp32 to bf16.
#[inline(always)]
pub(super) fn encode_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = (bits.wrapping_add(0x7fff + odd) >> 16) as u16;
    let quiet_nan = ((bits >> 16) | 0x40) as u16;
    if value.is_nan() { quiet_nan } else { rounded }
}

/// Rounds the magnitude of `value` to a float with `mantissa` bits and exponent bias `bias`, and returns its
/// code without the sign. Magnitudes beyond the format give codes beyond its largest: the caller clamps.
#[inline(always)]
fn encode_magnitude(value: f32, mantissa: u32, bias: u32) -> u32 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let shift = 23 - mantissa;
    let smallest_normal = (127 + 1 - bias) << 23;
    // Adding a power of two whose last bit is worth the format's smallest subnormal rounds to it.
    let unit = f32::from_bits((127 + 1 - bias - mantissa + 23) << 23);
    let subnormal = (f32::from_bits(magnitude) + unit).to_bits() - unit.to_bits();
    let odd = (magnitude >> shift) & 1;
    let rebased = magnitude.wrapping_sub((127 - bias) << 23);
    let normal = rebased.wrapping_add((1 << (shift - 1)) - 1 + odd) >> shift;
    if magnitude < smallest_normal { subnormal } else { normal }
}

/// fp32 to fp16; values that round beyond its range become infinite.
#[inline(always)]
pub(super) fn encode_f16(value: f32) -> u16 {
    let sign = ((value.to_bits() >> 16) & 0x8000) as u16;
    let code = encode_magnitude(value, 10, 15).min(0x7c00) as u16;
    if value.is_nan() { sign | 0x7e00 } else { sign | code }
}

/// fp32 to fp8 e4m3, saturating.
#[inline(always)]
pub(super) fn encode_e4m3(value: f32) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let code = encode_magnitude(value, 3, 7).min(0x7e) as u8;
    if value.is_nan() { sign | 0x7f } else { sign | code }
}

/// fp32 to fp8 e5m2, saturating.
#[inline(always)]
pub(super) fn encode_e5m2(value: f32) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let code = encode_magnitude(value, 2, 15).min(0x7b) as u8;
    if value.is_nan() { sign | 0x7e } else { sign | code }
}

/// Reads one element as fp32 (int8 without its scale).
///
/// # Safety
/// `source` points to a readable element of `dtype`.
#[inline]
pub(super) unsafe fn read_element(dtype: Dtype, source: *const u8) -> f32 {
    // SAFETY: readable by the caller's promise; `read_unaligned` asks for no alignment.
    unsafe {
        match dtype {
            Dtype::F32 => source.cast::<f32>().read_unaligned(),
            Dtype::F16 => decode_f16(source.cast::<u16>().read_unaligned()),
            Dtype::Bf16 => decode_bf16(source.cast::<u16>().read_unaligned()),
            Dtype::F8E4m3 => decode_e4m3(source.read()),
            Dtype::F8E5m2 => decode_e5m2(source.read()),
            Dtype::I8 => f32::from(source.cast::<i8>().read()),
        }
    }
}

/// Writes one fp32 as an element of `dtype` (int8 rounded and clamped to -127..=127).
///
/// # Safety
/// `target` points to a writable element of `dtype`.
#[inline]
pub(super) unsafe fn write_element(dtype: Dtype, target: *mut u8, value: f32) {
    // SAFETY: writable by the caller's promise; `write_unaligned` asks for no alignment.
    unsafe {
        match dtype {
            Dtype::F32 => target.cast::<f32>().write_unaligned(value),
            Dtype::F16 => target.cast::<u16>().write_unaligned(encode_f16(value)),
            Dtype::Bf16 => target.cast::<u16>().write_unaligned(encode_bf16(value)),
            Dtype::F8E4m3 => target.write(encode_e4m3(value)),
            Dtype::F8E5m2 => target.write(encode_e5m2(value)),
            Dtype::I8 => target.cast::<i8>().write(value.round_ties_even().clamp(-127.0, 127.0) as i8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_float_survives_a_round_trip() {
        for code in 0..=u16::MAX {
            let (half, brain) = (decode_f16(code), decode_bf16(code));
            assert!(half.is_nan() || encode_f16(half) == code, "fp16 {code:#06x}");
            assert!(brain.is_nan() || encode_bf16(brain) == code, "bf16 {code:#06x}");
        }
        for code in 0..=u8::MAX {
            let (narrow, wide) = (decode_e4m3(code), decode_e5m2(code));
            assert!(narrow.is_nan() || encode_e4m3(narrow) == code, "e4m3 {code:#04x}");
            assert!(!wide.is_finite() || encode_e5m2(wide) == code, "e5m2 {code:#04x}");
        }
    }

    #[test]
    fn encoding_rounds_to_nearest_even_and_saturates_fp8() {
        assert_eq!(encode_f16(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(encode_f16(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(encode_f16(65519.0), 0x7bff);
        assert_eq!(encode_f16(65520.0), 0x7c00);
        assert_eq!(encode_bf16(1.0 + 1.0 / 256.0), 0x3f80);
        assert_eq!(decode_e4m3(encode_e4m3(1e6)), 448.0);
        assert_eq!(decode_e4m3(encode_e4m3(f32::NEG_INFINITY)), -448.0);
        assert_eq!(decode_e5m2(encode_e5m2(1e6)), 57344.0);
        assert_eq!(decode_e4m3(encode_e4m3(0.001)), 0.001953125);
        assert!(decode_e4m3(encode_e4m3(f32::NAN)).is_nan());
        assert!(decode_e5m2(encode_e5m2(f32::NAN)).is_nan());
    }
}
