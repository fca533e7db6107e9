// Warp scope: reductions over the lanes of one warp. Every lane of the warp calls them; every lane gets the result.
#pragma once
#include "kvpager/port.cuh"

namespace kvpager {

constexpr unsigned kAllLanes = 0xffffffffu;

// Sum over aligned groups of kLanes neighbouring lanes (a power of two).
template <int kLanes, class T>
__device__ __forceinline__ T sum_over_lanes(T value) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a group is a power of two");
#pragma unroll
  for (int step = kLanes / 2; step > 0; step >>= 1) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float value) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "a group is a power of two");
#pragma unroll
  for (int step = kLanes / 2; step > 0; step >>= 1) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

}  // namespace kvpager
