// Paged attention of many query rows on tensor cores: prefill chunks, verification, decode with large groups.
//
// Idea: rows are (token, head of the group) pairs, so one fetched tile of keys serves every head of the group.
// kRowWarps x kKvWarps warps: a row warp owns 16 rows; with one row warp, the others take different positions of
// the tile and are joined at the end. Scores are m16n8k16 products in fp32, the running softmax stays in
// registers, its weights become the left operand of the second product without leaving them.
// Grid: x work items (blocks past the plan's count leave), y KV heads.
// Memory: two stages of keys and values by cp.async: one is computed on while the next arrives. Shared memory is
// constant in the context length; above 48 KiB the launch opts in.
// Bound: tensor cores for long tiles, bandwidth for one row warp. Never run on a GPU so far: no speed is claimed.
#include "kvpager/finish.cuh"
#include "kvpager/tile.cuh"
#include "kvpager/warp.cuh"

namespace kvpager {

template <class KV, class T, int kDim, int kRowWarps, int kKvWarps>
struct PrefillShape {
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kThreads = 32 * kRowWarps * kKvWarps;
  static constexpr int kWarpTokens = kRowWarps > 1 && kDim <= 128 ? 32 : 16;  // positions of a warp in a tile
  static constexpr int kTokens = kWarpTokens * kKvWarps;
  static constexpr int kScoreTiles = kWarpTokens / 8;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kStride = tile_stride(kDim);
  static constexpr bool kQueryInShared = kDim > 128;  // registers hold the fragments of smaller heads
  static constexpr int kPartFloats = kDim + 2;
  using Tile = Stage<KV, T, kDim, kTokens>;
  // int8 weights are rounded with their scales, which leaves no sum to compare; fp16 rounds finely enough; with heads
  // of 96 the compiler spills for it.
  static constexpr bool kUnrounds =
      IsBFloat16<T>::value && kDim != 96 && (!IsInt8<KV>::value || Tile::kScaledValues);
  static constexpr int kStageBytes = 2 * Tile::kBytes;
  static constexpr int kQueryBytes = kQueryInShared ? kRows * kStride * 2 : 0;
  static constexpr int kPartBytes = kRows * kKvWarps * kPartFloats * 4;
  static constexpr int kSharedBytes =
      kStageBytes + kQueryBytes > kPartBytes ? kStageBytes + kQueryBytes : kPartBytes;
  static_assert(kSharedBytes <= 99 * 1024, "fits the smallest shared memory among the supported devices");
};

// A pair of neighbouring elements of a query row as one register; zero for rows that are not there.
template <class T>
__device__ __forceinline__ unsigned query_pair(const AttentionParams& p, const RowView& view, bool valid,
                                               int first_token, int dim) {
  unsigned pair = 0;
  if (valid) {
    const long long at = (first_token + view.token) * p.query_token_stride + view.head * p.query_head_stride + dim;
    pair = *reinterpret_cast<const unsigned*>(static_cast<const T*>(p.query) + at);
  }
  return pair;
}

template <class T>
__device__ __forceinline__ unsigned pack(float low, float high) {
  const T pair[2] = {from_float<T>(low), from_float<T>(high)};
  unsigned packed;
  memcpy(&packed, pair, 4);
  return packed;
}

template <class T>
__device__ __forceinline__ float sum_of_pair(unsigned packed) {
  T pair[2];
  memcpy(pair, &packed, 4);
  return to_float(pair[0]) + to_float(pair[1]);
}

// What a lane keeps: rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <class Shape, int kDim>
struct PrefillState {
  float acc[kDim / 8][4];
  float maximum[2], sum[2], rounded_sum[2];  // sums of weights, and of what the products take for them
};

// Scores of the warp's positions: products of its 16 query rows with the keys of the tile.
template <class T, class Shape, int kDim>
__device__ __forceinline__ void multiply_keys(const T* keys, const T* queries,
                                              const unsigned (&registers)[Shape::kQueryInShared ? 1 : Shape::kSteps][4],
                                              float (&scores)[Shape::kScoreTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Shape::kScoreTiles; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = 0.f;
#pragma unroll
  for (int k = 0; k < Shape::kSteps; k++) {
    unsigned query[4];
    if constexpr (Shape::kQueryInShared) {
      // Matrices: rows 0-7 and 8-15 of the low eight elements, then of the high eight.
      KV_LDMATRIX(query, queries + (lane % 16) * Shape::kStride + k * 16 + lane / 16 * 8);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) query[i] = registers[k][i];
    }
#pragma unroll
    for (int n = 0; n < Shape::kScoreTiles; n += 2) {
      // Matrices: low and high eight elements of keys 0-7, then of keys 8-15.
      unsigned key[4];
      KV_LDMATRIX(key, keys + (n * 8 + lane / 16 * 8 + lane % 8) * Shape::kStride + k * 16 + lane / 8 % 2 * 8);
      KV_MMA(T, scores[n], query, key[0], key[1]);
      KV_MMA(T, scores[n + 1], query, key[2], key[3]);
    }
  }
}

// Masks, scales and exponentiates the scores in place; the state moves to the new maximum.
template <class KV, class T, class Shape, int kDim>
__device__ __forceinline__ void weigh(const AttentionParams& p, const RowView (&views)[2], const float (&slopes)[2],
                                      float scale, int position, int end, const float* key_scales,
                                      const float* value_scales, float (&scores)[Shape::kScoreTiles][4],
                                      PrefillState<Shape, kDim>& state) {
  const int column = threadIdx.x % 4 * 2;
  float maximum[2] = {state.maximum[0], state.maximum[1]};
#pragma unroll
  for (int n = 0; n < Shape::kScoreTiles; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = i / 2, offset = n * 8 + column + i % 2, at = position + offset;
      float factor = scale;
      if constexpr (IsInt8<KV>::value) factor *= key_scales[offset];
      const bool visible = at < end && at >= views[r].begin && at < views[r].end;
      scores[n][i] = visible ? score(p, scores[n][i], factor, slopes[r], at - views[r].position) : minus_infinity();
      maximum[r] = fmaxf(maximum[r], scores[n][i]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    maximum[r] = max_over_lanes<4>(maximum[r]);
    const float rescale = fast_exp2(state.maximum[r] - finite_base(maximum[r]));
    state.maximum[r] = maximum[r];
    state.sum[r] *= rescale;
    if constexpr (Shape::kUnrounds) state.rounded_sum[r] *= rescale;
#pragma unroll
    for (int d = 0; d < kDim / 8; d++) {
      state.acc[d][2 * r] *= rescale;
      state.acc[d][2 * r + 1] *= rescale;
    }
  }
#pragma unroll
  for (int n = 0; n < Shape::kScoreTiles; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      scores[n][i] = fast_exp2(scores[n][i] - finite_base(maximum[i / 2]));
      state.sum[i / 2] += scores[n][i];
      if constexpr (IsInt8<KV>::value && !Shape::Tile::kScaledValues)
        scores[n][i] *= value_scales[n * 8 + column + i % 2];
    }
  }
}

// Adds weights x values. The weights lie in registers exactly as the left operand wants them.
template <class T, class Shape, int kDim>
__device__ __forceinline__ void multiply_values(const T* values, const float (&weights)[Shape::kScoreTiles][4],
                                                PrefillState<Shape, kDim>& state) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < Shape::kScoreTiles / 2; k++) {
    const unsigned left[4] = {pack<T>(weights[2 * k][0], weights[2 * k][1]),
                              pack<T>(weights[2 * k][2], weights[2 * k][3]),
                              pack<T>(weights[2 * k + 1][0], weights[2 * k + 1][1]),
                              pack<T>(weights[2 * k + 1][2], weights[2 * k + 1][3])};
    if constexpr (Shape::kUnrounds) {
#pragma unroll
      for (int i = 0; i < 4; i++) state.rounded_sum[i % 2] += sum_of_pair<T>(left[i]);
    }
#pragma unroll
    for (int d = 0; d < kDim / 8; d += 2) {
      // Matrices, transposed: positions 0-7 and 8-15 of the first eight elements, then of the next eight.
      unsigned value[4];
      KV_LDMATRIX_TRANSPOSED(value, values + (k * 16 + lane % 16) * Shape::kStride + d * 8 + lane / 16 * 8);
      KV_MMA(T, state.acc[d], left, value[0], value[1]);
      KV_MMA(T, state.acc[d + 1], left, value[2], value[3]);
    }
  }
}

// Copies the tile's query rows to shared memory, zeros for rows that are not there.
template <class T, class Shape, int kDim>
__device__ __forceinline__ void stage_queries(const AttentionParams& p, const WorkItem& work, int kv_head,
                                              int query_len, int first_token, int num_rows, T* queries) {
  constexpr int kParts = kDim / 8;
  for (int e = threadIdx.x; e < Shape::kRows * kParts; e += Shape::kThreads) {
    const int row = e / kParts, part = e - row * kParts;
    T* to = queries + row * Shape::kStride + part * 8;
    if (row >= num_rows) {
      zero_row_part(to);
      continue;
    }
    const RowView view = row_view(p, work.first_row + row, kv_head, query_len, 0);
    const long long at =
        (first_token + view.token) * p.query_token_stride + view.head * p.query_head_stride + part * 8;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.query) + at);
  }
}

template <class KV, class T, int kDim, int kRowWarps, int kKvWarps>
__global__ void __launch_bounds__(32 * kRowWarps * kKvWarps)
    paged_prefill(const KV_GRID_CONSTANT AttentionParams p) {
  using Shape = PrefillShape<KV, T, kDim, kRowWarps, kKvWarps>;
  using Tile = typename Shape::Tile;
  if (static_cast<int>(blockIdx.x) >= p.counts[0]) return;
  KV_DYNAMIC_SHARED(unsigned char, shared);  // stages and queries; at the end, partial states
  const WorkItem work = p.work[blockIdx.x];
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = warp / kKvWarps, kv_warp = warp % kKvWarps;
  const int first_token = p.query_start[work.sequence];
  const int query_len = p.query_start[work.sequence + 1] - first_token, context_len = p.context_lens[work.sequence];
  const int num_rows = min(Shape::kRows, query_len * p.group - work.first_row);
  const int* table = sequence_table(p, work.sequence);
  const float scale = score_scale<KV>(p, kv_head);

  RowView views[2];
  float slopes[2];
  bool valid[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row_warp * 16 + lane / 4 + r * 8;
    valid[r] = row < num_rows;
    views[r] = row_view(p, work.first_row + min(row, num_rows - 1), kv_head, query_len, context_len);
    slopes[r] = p.alibi_slopes != nullptr ? p.alibi_slopes[views[r].head] : 0.f;
  }
  Tile(shared, 0).template fetch<Shape::kThreads>(p, table, work.kv_begin, work.kv_end, kv_head);

  T* queries = reinterpret_cast<T*>(shared + Shape::kStageBytes) + row_warp * 16 * Shape::kStride;
  unsigned query[Shape::kQueryInShared ? 1 : Shape::kSteps][4];
  if constexpr (Shape::kQueryInShared) {
    stage_queries<T, Shape, kDim>(p, work, kv_head, query_len, first_token, num_rows,
                                  reinterpret_cast<T*>(shared + Shape::kStageBytes));
  } else {
#pragma unroll
    for (int k = 0; k < Shape::kSteps; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        query[k][i] = query_pair<T>(p, views[i % 2], valid[i % 2], first_token, k * 16 + i / 2 * 8 + lane % 4 * 2);
  }

  PrefillState<Shape, kDim> state;
#pragma unroll
  for (int d = 0; d < kDim / 8; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) state.acc[d][i] = 0.f;
  state.maximum[0] = state.maximum[1] = minus_infinity();
  state.sum[0] = state.sum[1] = state.rounded_sum[0] = state.rounded_sum[1] = 0.f;

  int index = 0;
  for (int base = work.kv_begin; base < work.kv_end; base += Shape::kTokens, index ^= 1) {
    // The next tile is always fetched (past the end it is zeros), so one group is always in flight.
    Tile(shared, index ^ 1).template fetch<Shape::kThreads>(p, table, base + Shape::kTokens, work.kv_end, kv_head);
    copy_async_wait<1>();
    __syncthreads();
    const Tile tile(shared, index);
    const int offset = kv_warp * Shape::kWarpTokens;
    float scores[Shape::kScoreTiles][4];
    multiply_keys<T, Shape, kDim>(tile.keys + offset * Shape::kStride, queries, query, scores);
    weigh<KV, T, Shape, kDim>(p, views, slopes, scale, base + offset, work.kv_end, tile.key_scales + offset,
                              tile.value_scales + offset, scores, state);
    multiply_values<T, Shape, kDim>(tile.values + offset * Shape::kStride, scores, state);
    __syncthreads();  // before this stage is fetched into again
  }
  copy_async_wait<0>();
  __syncthreads();  // nothing is in flight, and no warp reads a stage: partial states may take their place

  float* parts = reinterpret_cast<float*>(shared);  // [kRows, kKvWarps, kPartFloats]
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float sum = sum_over_lanes<4>(state.sum[r]);
    float factor = 1.f;
    if constexpr (Shape::kUnrounds) factor = unround(sum, sum_over_lanes<4>(state.rounded_sum[r]));
    float* part = parts + ((row_warp * 16 + lane / 4 + r * 8) * kKvWarps + kv_warp) * Shape::kPartFloats;
#pragma unroll
    for (int d = 0; d < kDim / 8; d++) {
      part[d * 8 + lane % 4 * 2] = state.acc[d][2 * r] * factor;
      part[d * 8 + lane % 4 * 2 + 1] = state.acc[d][2 * r + 1] * factor;
    }
    if (lane % 4 == 0) {
      part[kDim] = state.maximum[r];
      part[kDim + 1] = sum;
    }
  }
  __syncthreads();
  const float value_scale = output_scale<KV>(p, kv_head);
  for (int e = threadIdx.x; e < num_rows * kDim; e += Shape::kThreads) {
    const int row = e / kDim, dim = e % kDim;
    const RowView view = row_view(p, work.first_row + row, kv_head, query_len, context_len);
    finish_row<kKvWarps, kDim>(p, work, kv_head, row, view, first_token, parts + row * kKvWarps * Shape::kPartFloats,
                               Shape::kPartFloats, dim, value_scale);
  }
}

}  // namespace kvpager
