// Block scope: tiles of keys and values in shared memory, as 16-bit rows ready for ldmatrix.
//
// A row is padded by 16 bytes, so that the eight rows of an ldmatrix fall into different banks. 16-bit caches are
// copied by cp.async; 8-bit caches are widened on the way (int8 and both 8-bit floats are exact in fp16 and bf16).
// Rows past the end are zero: an unread slot never enters the arithmetic, not even times zero.
#pragma once
#include "kvpager/paging.cuh"
#include "kvpager/thread.cuh"

namespace kvpager {

// Elements from one row of a tile to the next.
__host__ __device__ constexpr int tile_stride(int head_dim) { return head_dim + 8; }

template <class T>
__device__ __forceinline__ void zero_row_part(T* to) {
  *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
}

// Eight elements of an 8-bit row, widened to T and multiplied by `factor`.
template <class T, class KV>
__device__ __forceinline__ void widen_row_part(T* to, const KV* from, float factor) {
  Raw8<KV> raw;
  load(raw, from);
  float values[8];
  widen(raw, values);
  T narrow[8];
#pragma unroll
  for (int i = 0; i < 8; i++) narrow[i] = from_float<T>(values[i] * factor);
  uint4 packed;
  memcpy(&packed, narrow, 16);
  *reinterpret_cast<uint4*>(to) = packed;
}

// One stage: kTokens keys, then kTokens values, then (int8) their scales.
template <class KV, class T, int kDim, int kTokens>
struct Stage {
  static constexpr int kStride = tile_stride(kDim);
  static constexpr int kScaleFloats = IsInt8<KV>::value ? 2 * kTokens : 0;
  // fp16 weights times a small scale would lose bits to underflow, so fp16 takes the scale into the values; bf16
  // has the range and takes it into the weights, which are rounded anyway.
  static constexpr bool kScaledValues = IsInt8<KV>::value && !IsBFloat16<T>::value;
  static constexpr int kBytes = 2 * kTokens * kStride * 2 + kScaleFloats * 4;
  static_assert(sizeof(T) == 2, "tensor cores take 16-bit operands");
  static_assert(kDim % 16 == 0, "a k step of mma is 16 elements");
  static_assert(kBytes % 16 == 0, "stages stay aligned for ldmatrix");

  T* keys;
  T* values;
  float* key_scales;
  float* value_scales;

  __device__ __forceinline__ Stage(unsigned char* shared, int index) {
    keys = reinterpret_cast<T*>(shared + index * kBytes);
    values = keys + kTokens * kStride;
    key_scales = reinterpret_cast<float*>(values + kTokens * kStride);
    value_scales = key_scales + kTokens;
  }

  // Starts to fetch positions [base, base + kTokens) of one KV head, all threads of the block together. A group of
  // asynchronous copies is committed in every case.
  template <int kThreads>
  __device__ __forceinline__ void fetch(const AttentionParams& p, const int* table, int base, int end, int kv_head) {
    constexpr int kParts = kDim / 8;
    for (int e = threadIdx.x; e < kTokens * kParts; e += kThreads) {
      const int token = e / kParts, part = e - token * kParts, position = base + token;
      T* key = keys + token * kStride + part * 8;
      T* value = values + token * kStride + part * 8;
      if (position >= end) {
        zero_row_part(key);
        zero_row_part(value);
        continue;
      }
      const int block = block_at(p, table, position), slot = slot_at(p, position);
      const KV* key_from = static_cast<const KV*>(p.k_cache) + key_offset(p, block, slot, kv_head) + part * 8;
      const KV* value_from = static_cast<const KV*>(p.v_cache) + value_offset(p, block, slot, kv_head) + part * 8;
      if constexpr (sizeof(KV) == 2) {
        copy_async(key, key_from);
        copy_async(value, value_from);
      } else {
        float factor = 1.f;
        if constexpr (kScaledValues) factor = value_scale(p, block, slot, kv_head);
        widen_row_part(key, key_from, 1.f);
        widen_row_part(value, value_from, factor);
      }
    }
    if constexpr (IsInt8<KV>::value) fetch_scales<kThreads>(p, table, base, end, kv_head);
    copy_async_commit();
  }

  template <int kThreads>
  __device__ __forceinline__ void fetch_scales(const AttentionParams& p, const int* table, int base, int end,
                                               int kv_head) {
    for (int token = threadIdx.x; token < kTokens; token += kThreads) {
      const int position = base + token;
      key_scales[token] = value_scales[token] = 0.f;
      if (position >= end) continue;
      const int block = block_at(p, table, position), slot = slot_at(p, position);
      key_scales[token] = key_scale(p, block, slot, kv_head);
      if constexpr (!kScaledValues) value_scales[token] = value_scale(p, block, slot, kv_head);
    }
  }
};

}  // namespace kvpager
