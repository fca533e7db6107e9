// Thread scope: from a position in a sequence to an address in the pool. All products are 64-bit: a pool may hold
// more than 2^31 elements.
#pragma once
#include "kvpager/params.cuh"
#include "kvpager/port.cuh"

namespace kvpager {

// Elements from the start of the pool to the head vector of (block, slot, head).
__device__ __forceinline__ long long cache_offset(long long block, int slot, int head, long long block_stride,
                                                  long long slot_stride, long long head_stride) {
  return block * block_stride + slot * slot_stride + head * head_stride;
}

// The table row of a sequence.
__device__ __forceinline__ const int* sequence_table(const AttentionParams& p, int sequence) {
  const long long row = p.table_rows != nullptr ? p.table_rows[sequence] : sequence;
  return p.block_tables + row * p.table_stride;
}

// The block that holds a position.
__device__ __forceinline__ int block_at(const AttentionParams& p, const int* table, int position) {
  const int block = __ldg(table + (position >> p.block_shift));
  KV_ASSERT(block >= 0 && block < p.num_blocks);
  return block;
}

__device__ __forceinline__ int slot_at(const AttentionParams& p, int position) {
  return position & ((1 << p.block_shift) - 1);
}

__device__ __forceinline__ long long key_offset(const AttentionParams& p, int block, int slot, int head) {
  return cache_offset(block, slot, head, p.k_block_stride, p.k_slot_stride, p.k_head_stride);
}
__device__ __forceinline__ long long value_offset(const AttentionParams& p, int block, int slot, int head) {
  return cache_offset(block, slot, head, p.v_block_stride, p.v_slot_stride, p.v_head_stride);
}
__device__ __forceinline__ float key_scale(const AttentionParams& p, int block, int slot, int head) {
  return __ldg(p.k_scale +
               cache_offset(block, slot, head, p.k_scale_block_stride, p.k_scale_slot_stride, p.k_scale_head_stride));
}
__device__ __forceinline__ float value_scale(const AttentionParams& p, int block, int slot, int head) {
  return __ldg(p.v_scale +
               cache_offset(block, slot, head, p.v_scale_block_stride, p.v_scale_slot_stride, p.v_scale_head_stride));
}

}  // namespace kvpager
