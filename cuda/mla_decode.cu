// Attention over a latent cache (MLA with absorbed projections): a row of 576 is the key, its first 512 the value.
//
// Idea: all query heads share the one latent row, so 16 (token, head) rows a block read each row once, and the
// value product reads the same shared memory as the key product. Four warps: for the scores each takes 8 of the
// tile's 32 positions, for the values each takes 128 of the 512 elements; the softmax weights cross over through
// shared memory. Grid: x work items (blocks past the plan's count leave), y 1.
// Memory: two stages by cp.async, queries kept in shared memory; 95 KiB, constant in the context length.
// Bound: tensor cores (242 FLOP a byte with 128 heads). Never run on a GPU so far: no speed is claimed.
#include "kvpager/finish.cuh"
#include "kvpager/tile.cuh"
#include "kvpager/warp.cuh"

namespace kvpager {

struct MlaShape {
  static constexpr int kDim = 576, kValueDim = 512;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16, kTokens = 8 * kWarps;
  static constexpr int kStride = tile_stride(kDim), kWeightStride = kTokens + 8;
  static constexpr int kWarpValues = kValueDim / kWarps;
  static constexpr int kStageBytes = kTokens * kStride * 2;
  static constexpr int kQueryBytes = kRows * kStride * 2;
  static constexpr int kWeightBytes = kRows * kWeightStride * 2;
  static constexpr int kRowBytes = 3 * kWarps * kRows * 4;  // a maximum and two sums of each warp and row
  static constexpr int kSharedBytes = 2 * kStageBytes + kQueryBytes + kWeightBytes + kRowBytes;
  static constexpr int kPartFloats = kValueDim + 2;
  static_assert(kSharedBytes <= 99 * 1024, "fits the smallest shared memory among the supported devices");
  static_assert(kRows * kPartFloats * 4 <= 2 * kStageBytes, "results take the place of the stages");
  static_assert(kDim % 32 == 0 && kWarpValues % 16 == 0 && kTokens % 16 == 0, "whole mma steps");
};

// Starts to fetch positions [base, base + kTokens); rows past the end are zero. Commits a group in every case.
template <class T>
__device__ __forceinline__ void fetch_latent(const AttentionParams& p, const int* table, int base, int end, T* rows) {
  constexpr int kParts = MlaShape::kDim / 8;
  for (int e = threadIdx.x; e < MlaShape::kTokens * kParts; e += MlaShape::kThreads) {
    const int token = e / kParts, part = e - token * kParts, position = base + token;
    T* to = rows + token * MlaShape::kStride + part * 8;
    if (position >= end) {
      zero_row_part(to);
      continue;
    }
    const int block = block_at(p, table, position), slot = slot_at(p, position);
    copy_async(to, static_cast<const T*>(p.k_cache) + key_offset(p, block, slot, 0) + part * 8);
  }
  copy_async_commit();
}

template <class T>
__device__ __forceinline__ void fetch_queries(const AttentionParams& p, const WorkItem& work, int query_len,
                                              int first_token, int num_rows, T* queries) {
  constexpr int kParts = MlaShape::kDim / 8;
  for (int e = threadIdx.x; e < MlaShape::kRows * kParts; e += MlaShape::kThreads) {
    const int row = e / kParts, part = e - row * kParts;
    T* to = queries + row * MlaShape::kStride + part * 8;
    if (row >= num_rows) {
      zero_row_part(to);
      continue;
    }
    const RowView view = row_view(p, work.first_row + row, 0, query_len, 0);
    const long long token = first_token + view.token;
    const T* from = static_cast<const T*>(p.query) + token * p.query_token_stride + view.head * p.query_head_stride;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + part * 8);
  }
}

// Scores of 16 rows against the warp's 8 positions.
template <class T>
__device__ __forceinline__ void multiply_latent_keys(const T* queries, const T* keys, float (&scores)[4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 6
  for (int k = 0; k < MlaShape::kDim / 32; k++) {
    // Matrices: four times eight elements of the 8 keys, enough for two steps.
    unsigned key[4], query[4];
    KV_LDMATRIX(key, keys + lane % 8 * MlaShape::kStride + k * 32 + lane / 8 * 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      KV_LDMATRIX(query, queries + lane % 16 * MlaShape::kStride + k * 32 + half * 16 + lane / 16 * 8);
      KV_MMA(T, scores, query, key[half * 2], key[half * 2 + 1]);
    }
  }
}

// Adds weights x the warp's 128 value elements.
template <class T>
__device__ __forceinline__ void multiply_latent_values(const T* weights, const T* values,
                                                       float (&acc)[MlaShape::kWarpValues / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < MlaShape::kTokens / 16; k++) {
    unsigned left[4];
    KV_LDMATRIX(left, weights + lane % 16 * MlaShape::kWeightStride + k * 16 + lane / 16 * 8);
#pragma unroll
    for (int d = 0; d < MlaShape::kWarpValues / 8; d += 2) {
      unsigned value[4];
      KV_LDMATRIX_TRANSPOSED(value, values + (k * 16 + lane % 16) * MlaShape::kStride + d * 8 + lane / 16 * 8);
      KV_MMA(T, acc[d], left, value[0], value[1]);
      KV_MMA(T, acc[d + 1], left, value[2], value[3]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(MlaShape::kThreads) mla_decode(const KV_GRID_CONSTANT AttentionParams p) {
  using S = MlaShape;
  if (static_cast<int>(blockIdx.x) >= p.counts[0]) return;
  KV_DYNAMIC_SHARED(unsigned char, shared);
  T* stages = reinterpret_cast<T*>(shared);
  T* queries = stages + 2 * S::kTokens * S::kStride;
  T* weights = queries + S::kRows * S::kStride;
  float* warp_maxima = reinterpret_cast<float*>(weights + S::kRows * S::kWeightStride);  // [kWarps, kRows]
  float* warp_sums = warp_maxima + S::kWarps * S::kRows;
  float* warp_rounded_sums = warp_sums + S::kWarps * S::kRows;
  const WorkItem work = p.work[blockIdx.x];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_token = p.query_start[work.sequence];
  const int query_len = p.query_start[work.sequence + 1] - first_token, context_len = p.context_lens[work.sequence];
  const int num_rows = min(S::kRows, query_len * p.group - work.first_row);
  const int* table = sequence_table(p, work.sequence);

  fetch_latent(p, table, work.kv_begin, work.kv_end, stages);
  fetch_queries(p, work, query_len, first_token, num_rows, queries);
  RowView views[2];
  float acc[S::kWarpValues / 8][4], maximum[2], sum[2] = {0.f, 0.f}, rounded_sum[2] = {0.f, 0.f};
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = min(lane / 4 + r * 8, num_rows - 1);
    views[r] = row_view(p, work.first_row + row, 0, query_len, context_len);
    maximum[r] = minus_infinity();
  }
#pragma unroll
  for (int d = 0; d < S::kWarpValues / 8; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[d][i] = 0.f;

  int index = 0;
  for (int base = work.kv_begin; base < work.kv_end; base += S::kTokens, index ^= 1) {
    fetch_latent(p, table, base + S::kTokens, work.kv_end, stages + (index ^ 1) * S::kTokens * S::kStride);
    copy_async_wait<1>();
    __syncthreads();
    const T* tile = stages + index * S::kTokens * S::kStride;
    float scores[4] = {0.f, 0.f, 0.f, 0.f};
    multiply_latent_keys(queries, tile + warp * 8 * S::kStride, scores);
    float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i / 2, at = base + warp * 8 + lane % 4 * 2 + i % 2;
      const bool visible = at < work.kv_end && at >= views[r].begin && at < views[r].end;
      scores[i] = visible ? score(p, scores[i], p.scale, 0.f, 0) : minus_infinity();
      largest[r] = fmaxf(largest[r], scores[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      largest[r] = max_over_lanes<4>(largest[r]);
      if (lane % 4 == 0) warp_maxima[warp * S::kRows + lane / 4 + r * 8] = largest[r];
    }
    __syncthreads();  // every warp's maxima are there
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = lane / 4 + r * 8;
      float next = maximum[r];
#pragma unroll
      for (int w = 0; w < S::kWarps; w++) next = fmaxf(next, warp_maxima[w * S::kRows + row]);
      const float finite = finite_base(next);
      rescale[r] = fast_exp2(maximum[r] - finite);
      maximum[r] = next;
      const float low = fast_exp2(scores[2 * r] - finite), high = fast_exp2(scores[2 * r + 1] - finite);
      sum[r] = sum[r] * rescale[r] + low + high;
      T* to = weights + row * S::kWeightStride + warp * 8 + lane % 4 * 2;
      to[0] = from_float<T>(low);
      to[1] = from_float<T>(high);
      rounded_sum[r] = rounded_sum[r] * rescale[r] + to_float(to[0]) + to_float(to[1]);
    }
#pragma unroll
    for (int d = 0; d < S::kWarpValues / 8; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[d][i] *= rescale[i / 2];
    __syncthreads();  // every warp's weights are there
    multiply_latent_values(weights, tile + warp * S::kWarpValues, acc);
    __syncthreads();  // before the stage, the maxima and the weights are written again
  }
  copy_async_wait<0>();
  __syncthreads();  // also when there was no position at all

#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int at = warp * S::kRows + lane / 4 + r * 8;
    const float total = sum_over_lanes<4>(sum[r]), rounded = sum_over_lanes<4>(rounded_sum[r]);
    if (lane % 4 != 0) continue;
    warp_sums[at] = total;
    warp_rounded_sums[at] = rounded;
  }
  __syncthreads();  // every warp's sums are there
  float* parts = reinterpret_cast<float*>(shared);  // [kRows, kPartFloats], in place of the stages
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = lane / 4 + r * 8;
    float total = 0.f, rounded = 0.f;
#pragma unroll
    for (int w = 0; w < S::kWarps; w++) {
      total += warp_sums[w * S::kRows + row];
      rounded += warp_rounded_sums[w * S::kRows + row];
    }
    const float factor = unround(total, rounded);
    float* part = parts + row * S::kPartFloats;
#pragma unroll
    for (int d = 0; d < S::kWarpValues / 8; d++) {
      part[warp * S::kWarpValues + d * 8 + lane % 4 * 2] = acc[d][2 * r] * factor;
      part[warp * S::kWarpValues + d * 8 + lane % 4 * 2 + 1] = acc[d][2 * r + 1] * factor;
    }
    if (lane % 4 == 0 && warp == 0) {
      part[S::kValueDim] = maximum[r];
      part[S::kValueDim + 1] = total;
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_rows * S::kValueDim; e += S::kThreads) {
    const int row = e / S::kValueDim, dim = e % S::kValueDim;
    const RowView view = row_view(p, work.first_row + row, 0, query_len, context_len);
    finish_row<1, S::kValueDim>(p, work, 0, row, view, first_token, parts + row * S::kPartFloats, S::kPartFloats,
                                dim, p.out_scale);
  }
}

}  // namespace kvpager
