// Thread scope: element types, run-time dtypes, vectors of eight elements moved by wide loads.
#pragma once
#include "kvpager/port.cuh"

namespace kvpager {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Dtypes of queries, outputs, new keys and values, chosen at run time. The numbers are shared with
// python/kvpager/attention/_launch.py.
enum DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(signed char x) { return static_cast<float>(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}
// The nearest code, saturating: 8-bit values never become infinite.
template <>
__device__ __forceinline__ e4m3 from_float<e4m3>(float x) {
  return to_e4m3(x);
}
template <>
__device__ __forceinline__ e5m2 from_float<e5m2>(float x) {
  return to_e5m2(x);
}
template <>
__device__ __forceinline__ signed char from_float<signed char>(float x) {
  return static_cast<signed char>(rintf(fminf(fmaxf(x, -127.f), 127.f)));
}

template <class T>
struct IsInt8 {
  static constexpr bool value = false;
};
template <>
struct IsInt8<signed char> {
  static constexpr bool value = true;
};
template <class T>
struct IsBFloat16 {
  static constexpr bool value = false;
};
template <>
struct IsBFloat16<__nv_bfloat16> {
  static constexpr bool value = true;
};

// Eight elements as they lie in memory: 32, 16 or 8 bytes. Addresses are aligned to 16 bytes (8 for 8-bit types).
template <class T, int kBytes = sizeof(T)>
struct Raw8;
template <class T>
struct Raw8<T, 4> {
  uint4 words[2];
};
template <class T>
struct Raw8<T, 2> {
  uint4 words;
};
template <class T>
struct Raw8<T, 1> {
  uint2 words;
};

__device__ __forceinline__ void clear(Raw8<float>& raw) {
  raw.words[0] = make_uint4(0, 0, 0, 0);
  raw.words[1] = make_uint4(0, 0, 0, 0);
}
template <class T>
__device__ __forceinline__ void clear(Raw8<T, 2>& raw) {
  raw.words = make_uint4(0, 0, 0, 0);
}
template <class T>
__device__ __forceinline__ void clear(Raw8<T, 1>& raw) {
  raw.words = make_uint2(0, 0);
}
__device__ __forceinline__ void load(Raw8<float>& raw, const float* from) {
  raw.words[0] = __ldg(reinterpret_cast<const uint4*>(from));
  raw.words[1] = __ldg(reinterpret_cast<const uint4*>(from) + 1);
}
template <class T>
__device__ __forceinline__ void load(Raw8<T, 2>& raw, const T* from) {
  raw.words = __ldg(reinterpret_cast<const uint4*>(from));
}
template <class T>
__device__ __forceinline__ void load(Raw8<T, 1>& raw, const T* from) {
  raw.words = __ldg(reinterpret_cast<const uint2*>(from));
}

// Elements 2 * pair and 2 * pair + 1 of the eight.
__device__ __forceinline__ float2 widen_pair(const Raw8<float>& raw, int pair) {
  float two[2];
  memcpy(two, reinterpret_cast<const float*>(&raw) + 2 * pair, 8);
  return {two[0], two[1]};
}
template <class T>
__device__ __forceinline__ float2 widen_pair(const Raw8<T, 2>& raw, int pair) {
  T two[2];
  memcpy(two, reinterpret_cast<const unsigned*>(&raw) + pair, 4);
  return {to_float(two[0]), to_float(two[1])};
}
template <class T>
__device__ __forceinline__ float2 widen_pair(const Raw8<T, 1>& raw, int pair) {
  if constexpr (IsInt8<T>::value) {
    signed char two[2];
    memcpy(two, reinterpret_cast<const unsigned short*>(&raw) + pair, 2);
    return {to_float(two[0]), to_float(two[1])};
  } else {
    unsigned short bits;
    memcpy(&bits, reinterpret_cast<const unsigned short*>(&raw) + pair, 2);
    return unpack(T{}, bits);
  }
}
template <class T>
__device__ __forceinline__ void widen(const Raw8<T>& raw, float (&out)[8]) {
#pragma unroll
  for (int pair = 0; pair < 4; pair++) {
    const float2 two = widen_pair(raw, pair);
    out[2 * pair] = two.x;
    out[2 * pair + 1] = two.y;
  }
}

// Eight elements of a run-time dtype, `index` elements past `base`.
__device__ __forceinline__ void load_as(const void* base, long long index, int dtype, float (&out)[8]) {
  if (dtype == kFloat32) {
    Raw8<float> raw;
    load(raw, static_cast<const float*>(base) + index);
    widen(raw, out);
  } else if (dtype == kFloat16) {
    Raw8<__half> raw;
    load(raw, static_cast<const __half*>(base) + index);
    widen(raw, out);
  } else {
    Raw8<__nv_bfloat16> raw;
    load(raw, static_cast<const __nv_bfloat16*>(base) + index);
    widen(raw, out);
  }
}
__device__ __forceinline__ float load_one_as(const void* base, long long index, int dtype) {
  if (dtype == kFloat32) return static_cast<const float*>(base)[index];
  if (dtype == kFloat16) return to_float(static_cast<const __half*>(base)[index]);
  return to_float(static_cast<const __nv_bfloat16*>(base)[index]);
}
__device__ __forceinline__ void store_as(void* base, long long index, int dtype, float value) {
  if (dtype == kFloat32) static_cast<float*>(base)[index] = value;
  else if (dtype == kFloat16) static_cast<__half*>(base)[index] = from_float<__half>(value);
  else static_cast<__nv_bfloat16*>(base)[index] = from_float<__nv_bfloat16>(value);
}

}  // namespace kvpager
