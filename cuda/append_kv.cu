// Writes new keys and values into their slots (reshape_and_cache), quantising where the cache is 8-bit.
//
// Idea: one warp takes one head vector of one token, 8 elements a lane and round. A slot of -1 skips the
// token.
// Grid: x warps over tokens x KV heads, y 0 for keys and 1 for values. No shared memory.
// 8-bit floats: divided by the scale (a scalar or one a head) and saturated. int8: the warp takes the vector's
// largest magnitude, stores it / 127 as the scale of this token and head, and rounds to nearest.
// Bound: bandwidth (each element is read once and written once).
#include "kvpager/paging.cuh"
#include "kvpager/thread.cuh"
#include "kvpager/warp.cuh"

namespace kvpager {

constexpr int kAppendThreads = 128;

constexpr float kLargestFloat = 3.402823466e38f, kSmallestNormal = 1.175494351e-38f;

// The scale of an int8 row whose largest magnitude is known; infinity, also for a NaN in the row, makes all of it NaN.
__device__ __forceinline__ float row_scale(float largest) {
  if (largest > kLargestFloat) return minus_infinity() - minus_infinity();
  return largest == 0.f ? 1.f : fmaxf(largest / 127.f, kSmallestNormal);
}

// One side (keys or values) of the parameters.
struct AppendSide {
  const void* from;
  void* cache;
  float* scale;
  long long token_stride, head_stride, block_stride, slot_stride, cache_head_stride;
  long long scale_block_stride, scale_slot_stride, scale_head_stride;
  float scale_value;
};

__device__ __forceinline__ AppendSide append_side(const AppendParams& p, bool values) {
  if (values)
    return {p.value,         p.v_cache,       p.v_scale,
            p.value_token_stride, p.value_head_stride, p.v_block_stride, p.v_slot_stride, p.v_head_stride,
            p.v_scale_block_stride, p.v_scale_slot_stride, p.v_scale_head_stride, p.v_scale_value};
  return {p.key,           p.k_cache,       p.k_scale,
          p.key_token_stride, p.key_head_stride, p.k_block_stride, p.k_slot_stride, p.k_head_stride,
          p.k_scale_block_stride, p.k_scale_slot_stride, p.k_scale_head_stride, p.k_scale_value};
}

template <class KV>
__device__ __forceinline__ void store8(KV* to, const float (&values)[8], float scale) {
  KV converted[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if constexpr (sizeof(KV) == 1) converted[i] = from_float<KV>(values[i] / scale);
    else converted[i] = from_float<KV>(values[i]);
  }
  Raw8<KV> raw;
  memcpy(&raw, converted, 8 * sizeof(KV));
  *reinterpret_cast<Raw8<KV>*>(to) = raw;
}

template <class KV>
__global__ void __launch_bounds__(kAppendThreads) append_kv(const KV_GRID_CONSTANT AppendParams p) {
  const int lane = threadIdx.x % 32;
  const long long vector = static_cast<long long>(blockIdx.x) * (kAppendThreads / 32) + threadIdx.x / 32;
  if (vector >= static_cast<long long>(p.num_tokens) * p.num_kv_heads) return;
  const long long token = vector / p.num_kv_heads;
  const int head = static_cast<int>(vector - token * p.num_kv_heads);
  const long long slot = p.slot_mapping[token];
  if (slot < 0) return;
  KV_ASSERT(slot < p.num_slots);
  const AppendSide side = append_side(p, blockIdx.y == 1);
  const long long block = slot >> p.block_shift;
  const int in_block = static_cast<int>(slot & ((1 << p.block_shift) - 1));

  const long long from = token * side.token_stride + head * side.head_stride;
  float scale = side.scale_value;
  if constexpr (IsInt8<KV>::value) {
    float largest = 0.f;
#pragma unroll 1
    for (int dim = lane * 8; dim < p.head_dim; dim += 256) {
      float values[8];
      load_as(side.from, from + dim, p.dtype, values);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float magnitude = fabsf(values[i]);
        largest = magnitude <= kLargestFloat ? fmaxf(largest, magnitude) : -minus_infinity();
      }
    }
    largest = max_over_lanes<32>(largest);
    scale = row_scale(largest);
    if (lane == 0)
      side.scale[cache_offset(block, in_block, head, side.scale_block_stride, side.scale_slot_stride,
                              side.scale_head_stride)] = scale;
  } else if constexpr (sizeof(KV) == 1) {
    if (side.scale != nullptr) scale *= side.scale[head * side.scale_head_stride];
  }
  KV* to = static_cast<KV*>(side.cache) +
           cache_offset(block, in_block, head, side.block_stride, side.slot_stride, side.cache_head_stride);
#pragma unroll 1
  for (int dim = lane * 8; dim < p.head_dim; dim += 256) {
    float values[8];
    load_as(side.from, from + dim, p.dtype, values);
    store8(to + dim, values, scale);
  }
}

}  // namespace kvpager
