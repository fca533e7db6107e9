// Thread scope: where the results of a tile of rows go, as output or as a partial result for the merge.
#pragma once
#include "kvpager/softmax.cuh"

namespace kvpager {

// Index of a partial row: [num_partials, num_kv_heads, tile_rows].
__device__ __forceinline__ long long partial_row(const AttentionParams& p, int partial, int kv_head, int row) {
  return (static_cast<long long>(partial) * p.num_kv_heads + kv_head) * p.tile_rows + row;
}

__device__ __forceinline__ void write_output(const AttentionParams& p, int token, int head, int dim, float value) {
  const long long index = token * p.out_token_stride + head * p.out_head_stride + dim;
  store_as(p.out, index, p.out_dtype, value);
}

__device__ __forceinline__ void write_lse(const AttentionParams& p, int token, int head, float value) {
  if (p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = value;
}

// What brings a sum of values by rounded weights to the sum of the weights themselves: tensor cores take weights of
// 16 bits, and rounding all of a row the same way would move its output by up to half a unit of those bits.
__device__ __forceinline__ float unround(float sum, float rounded_sum) {
  return rounded_sum > 0.f ? sum / rounded_sum : 1.f;
}

// Scale of a value head: the scalar, times the head's own where there is one.
template <class KV>
__device__ __forceinline__ float output_scale(const AttentionParams& p, int kv_head) {
  if constexpr (sizeof(KV) == 1 && !IsInt8<KV>::value) {
    if (p.v_scale != nullptr) return p.out_scale * p.v_scale[kv_head * p.v_scale_head_stride];
  }
  return p.out_scale;
}

// Scale of the scores of a key head, likewise.
template <class KV>
__device__ __forceinline__ float score_scale(const AttentionParams& p, int kv_head) {
  if constexpr (sizeof(KV) == 1 && !IsInt8<KV>::value) {
    if (p.k_scale != nullptr) return p.scale * p.k_scale[kv_head * p.k_scale_head_stride];
  }
  return p.scale;
}

// Combines kParts partial states of one row that lie `part_stride` floats apart, each [kDim values, m, l], and
// writes element `dim` of the row; dim 0 also writes the log-sum-exp.
template <int kParts, int kDim>
__device__ __forceinline__ void finish_row(const AttentionParams& p, const WorkItem& work, int kv_head, int row,
                                           const RowView& view, int first_token, const float* parts,
                                           int part_stride, int dim, float value_scale) {
  float maximum = minus_infinity();
#pragma unroll
  for (int i = 0; i < kParts; i++) maximum = fmaxf(maximum, parts[i * part_stride + kDim]);
  float sum = 0.f, value = 0.f;
  const float base = finite_base(maximum);
#pragma unroll
  for (int i = 0; i < kParts; i++) {
    const float* part = parts + i * part_stride;
    const float weight = fast_exp2(part[kDim] - base);
    sum += part[kDim + 1] * weight;
    value += part[dim] * weight;
  }
  if (work.partial >= 0) {
    const long long index = partial_row(p, work.partial, kv_head, row);
    // The maximum and the sum apart: their log-sum-exp in fp32 would be off by what large scores round to.
    p.partial_out[index * kDim + dim] = value;
    if (dim == 0) {
      p.partial_state[2 * index] = maximum;
      p.partial_state[2 * index + 1] = sum;
    }
    return;
  }
  if (p.sinks != nullptr) {
    float rescale;
    add_sink(p.sinks[view.head] * kLog2E, maximum, sum, rescale);
    value *= rescale;
  }
  const int token = first_token + view.token;
  write_output(p, token, view.head, dim, sum > 0.f ? value / sum * value_scale : 0.f);
  if (dim == 0) write_lse(p, token, view.head, log_sum_exp(maximum, sum));
}

}  // namespace kvpager
