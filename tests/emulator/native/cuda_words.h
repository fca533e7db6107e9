// The words of CUDA C++ that the kernels use, for a plain C++17 compiler. Included before every kernel source.
#pragma once
#define KV_EMULATOR 1
#include <cmath>
#include <type_traits>

#include "machine.h"

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T>
inline T __ldg(const T* from) {
  return *from;
}
using std::max;
using std::memcpy;
using std::min;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define blockDim emulator::block_shape
#define gridDim emulator::grid_shape
#define __syncthreads() emulator::barrier(__LINE__)
#define __syncwarp() emulator::warp_sync(0xffffffffu, __LINE__)
#define __shfl_xor_sync(mask, value, lane_xor) emulator::shuffle_xor_value(mask, value, lane_xor, __LINE__)
#define __any_sync(mask, vote) emulator::any(mask, vote, __LINE__)
