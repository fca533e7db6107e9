// Number formats of the GPU on the CPU: fp16, bf16, and 8-bit floats, with round to nearest even.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half(float x) { return {static_cast<_Float16>(x)}; }

struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline __nv_bfloat16 __float2bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {static_cast<std::uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

namespace emulator {

// An 8-bit float with kExponent exponent bits: 4 is e4m3 (no infinities, 0x7f is not a number), 5 is e5m2.
template <int kExponent>
struct Fp8 {
  static constexpr int kMantissa = 7 - kExponent;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr unsigned kLargest = kExponent == 4 ? 0x7e : 0x7b;
  static constexpr unsigned kNotANumber = 0x7f;
};

template <int kExponent>
inline float decode_fp8(unsigned code) {
  using F = Fp8<kExponent>;
  const float sign = code & 0x80u ? -1.f : 1.f;
  const unsigned magnitude = code & 0x7fu;
  if (magnitude > F::kLargest) {
    if (kExponent == 5 && magnitude == 0x7c) return sign * HUGE_VALF;
    return NAN;
  }
  const int exponent = static_cast<int>(magnitude >> F::kMantissa);
  const unsigned mantissa = magnitude & ((1u << F::kMantissa) - 1);
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), 1 - F::kBias - F::kMantissa);
  return sign * std::ldexp(static_cast<float>(mantissa + (1u << F::kMantissa)), exponent - F::kBias - F::kMantissa);
}

// The nearest code, ties to even; magnitudes past the largest finite value saturate, as the GPU's SATFINITE does.
template <int kExponent>
inline unsigned char encode_fp8(float x) {
  using F = Fp8<kExponent>;
  const unsigned sign = std::signbit(x) ? 0x80u : 0u;
  if (x != x) return static_cast<unsigned char>(F::kNotANumber);
  const float magnitude = std::fabs(x);
  if (magnitude >= decode_fp8<kExponent>(F::kLargest)) return static_cast<unsigned char>(sign | F::kLargest);
  int exponent;
  std::frexp(magnitude, &exponent);
  // Codes are consecutive integers within and across binades, so rounding to a multiple of the step is enough.
  const int step = std::max(exponent - 1, 1 - F::kBias) - F::kMantissa;
  const float rounded = std::nearbyint(std::ldexp(magnitude, -step));
  const float value = std::ldexp(rounded, step);
  if (value == 0.f) return static_cast<unsigned char>(sign);
  std::frexp(value, &exponent);
  const int biased = exponent - 1 + F::kBias;
  if (biased < 1) return static_cast<unsigned char>(sign | static_cast<unsigned>(rounded));
  const unsigned mantissa = static_cast<unsigned>(std::ldexp(value, F::kMantissa - (exponent - 1))) & ((1u << F::kMantissa) - 1);
  return static_cast<unsigned char>(sign | (static_cast<unsigned>(biased) << F::kMantissa) | mantissa);
}

inline float exp2_value(float x) { return std::exp2(x); }
inline float log2_value(float x) { return std::log2(x); }

}  // namespace emulator
