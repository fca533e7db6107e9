// Paged attention of a few query rows on CUDA cores: decode with small groups, and anything in fp32.
//
// Idea: a block takes one work item (rows of one sequence, a range of positions) for one KV head. All kRows query
// rows share every key and value that is read, so a byte of cache crosses the bus once for the whole group.
// Grid: x work items (as many as the plan has room for; blocks past the count leave), y KV heads. A group of
// kLanes lanes holds one position, 8 elements a lane; a warp has 32 / kLanes positions in flight, times kUnroll.
// Memory: 16-byte loads (8-byte for 8-bit caches), block ids of the next round fetched ahead; shared memory only
// for the final reduction over warps, constant in the context length.
// Bound: bandwidth up to groups of 4 in 16 bits; larger groups go to paged_prefill with 16 rows.
// Never run on a GPU so far: no measurement is claimed.
#include "kvpager/finish.cuh"
#include "kvpager/paging.cuh"
#include "kvpager/warp.cuh"

namespace kvpager {

constexpr int kDecodeThreads = 128;

// Blocks of a multiprocessor to leave registers for, as many as each compiler fits without spilling.
__host__ __device__ constexpr int decode_blocks(int rows) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return rows == 1 ? 4 : 2;
#else
  return rows == 1 ? 5 : rows == 4 ? 3 : 2;
#endif
}

// Lanes that hold one head vector: a power of two, the last ones idle where head_dim is not one.
__host__ __device__ constexpr int decode_lanes(int head_dim) {
  return head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32;
}

template <class KV, int kDim, int kRows>
struct DecodeShape {
  static constexpr int kLanes = decode_lanes(kDim);
  static constexpr int kWarps = kDecodeThreads / 32;
  static constexpr int kSlots = kDecodeThreads / kLanes;                        // positions in flight in a block
  static constexpr int kUnroll = kRows == 8 ? 1 : sizeof(KV) == 4 ? 2 : 4;      // rounds of positions at a time
  static constexpr int kPartFloats = kDim + 2;                                  // values, maximum, sum
  static constexpr int kSharedBytes = kWarps * kRows * kPartFloats * 4;
  static_assert(kDim % 8 == 0 && kDim <= 8 * kLanes, "a lane holds 8 elements");
  static_assert(kSharedBytes <= 48 * 1024, "no opt-in needed");
};

// What a lane keeps of its rows: 8 elements of each query and of each weighted sum.
template <int kRows>
struct DecodeState {
  float query[kRows][8], acc[kRows][8], maximum[kRows], sum[kRows];
};

template <class KV, int kDim, int kRows>
__device__ __forceinline__ void load_queries(const AttentionParams& p, const RowView (&views)[kRows], int num_rows,
                                             int first_token, int lane_in_head, DecodeState<kRows>& state) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    state.maximum[r] = minus_infinity();
    state.sum[r] = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) state.query[r][i] = state.acc[r][i] = 0.f;
    if (r < num_rows && lane_in_head * 8 < kDim) {
      const long long token = first_token + views[r].token;
      load_as(p.query, token * p.query_token_stride + views[r].head * p.query_head_stride + lane_in_head * 8,
              p.query_dtype, state.query[r]);
    }
  }
}

// Moves every entry one place to the front, the first to the end.
template <class T, int kCount>
__device__ __forceinline__ void turn(T (&entries)[kCount]) {
  const T first = entries[0];
#pragma unroll
  for (int i = 1; i < kCount; i++) entries[i - 1] = entries[i];
  entries[kCount - 1] = first;
}
template <class T, int kCount, int kWidth>
__device__ __forceinline__ void turn(T (&entries)[kCount][kWidth]) {
#pragma unroll
  for (int column = 0; column < kWidth; column++) {
    const T first = entries[0][column];
#pragma unroll
    for (int i = 1; i < kCount; i++) entries[i - 1][column] = entries[i][column];
    entries[kCount - 1][column] = first;
  }
}

// One round: kUnroll positions of this lane's slot, all rows.
template <class KV, int kDim, int kRows>
struct DecodeRound {
  using Shape = DecodeShape<KV, kDim, kRows>;
  Raw8<KV> keys[Shape::kUnroll], values[Shape::kUnroll];
  float key_scales[Shape::kUnroll], value_scales[Shape::kUnroll];

  __device__ __forceinline__ void fetch(const AttentionParams& p, const int (&blocks)[Shape::kUnroll], int position,
                                        int end, int kv_head, int lane_in_head) {
#pragma unroll
    for (int u = 0; u < Shape::kUnroll; u++) {
      const int at = position + u * Shape::kSlots;
      clear(keys[u]);
      clear(values[u]);
      key_scales[u] = value_scales[u] = 1.f;
      if (at >= end) continue;
      const int slot = slot_at(p, at);
      if constexpr (IsInt8<KV>::value) {
        key_scales[u] = key_scale(p, blocks[u], slot, kv_head);
        value_scales[u] = value_scale(p, blocks[u], slot, kv_head);
      }
      if (lane_in_head * 8 < kDim) {
        load(keys[u], static_cast<const KV*>(p.k_cache) + key_offset(p, blocks[u], slot, kv_head) + lane_in_head * 8);
        load(values[u],
             static_cast<const KV*>(p.v_cache) + value_offset(p, blocks[u], slot, kv_head) + lane_in_head * 8);
      }
    }
  }

  // Scores of all rows against this round's positions, then the rows' states move on.
  __device__ __forceinline__ void attend(const AttentionParams& p, const int* table, const RowView (&views)[kRows],
                                         int position, int end, float scale, float (&slopes)[kRows],
                                         DecodeState<kRows>& state) const {
    float scores[kRows][Shape::kUnroll];
#pragma unroll
    for (int u = 0; u < Shape::kUnroll; u++) {
      float key[8];
      widen(keys[u], key);
      const int at = position + u * Shape::kSlots;
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float dot = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) dot = fmaf(state.query[r][i], key[i], dot);
        dot = sum_over_lanes<Shape::kLanes>(dot);
        const bool visible = at < end && at >= views[r].begin && at < views[r].end;
        scores[r][u] = visible ? score(p, dot, scale * key_scales[u], slopes[r], at - views[r].position)
                               : minus_infinity();
      }
    }
    float base[kRows], rescale[kRows];
    bool large = p.alibi_slopes != nullptr;
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float maximum = state.maximum[r];
#pragma unroll
      for (int u = 0; u < Shape::kUnroll; u++) maximum = fmaxf(maximum, scores[r][u]);
      base[r] = finite_base(maximum);
      rescale[r] = fast_exp2(state.maximum[r] - base[r]);
      state.maximum[r] = maximum;
      large = large || fabsf(base[r]) > kExactAbove;
#pragma unroll
      for (int u = 0; u < Shape::kUnroll; u++) scores[r][u] -= base[r];
    }
    if (p.query_dtype == kFloat32 && __any_sync(kAllLanes, large))
      refine(p, table, views, position, end, scale, slopes, base, scores, state);
    accumulate(rescale, scores, state);
  }

  // Computes the differences to the maximum again in fp64: a large score's rounding would show in fp32 results.
  // This rare path must not cost the kernel registers: it reads the keys again, and its loops are not unrolled;
  // arrays move past them instead, a whole turn, so that they end as they were.
  __device__ __forceinline__ void refine(const AttentionParams& p, const int* table, const RowView (&views)[kRows],
                                         int position, int end, float scale, float (&slopes)[kRows],
                                         float (&base)[kRows], float (&scores)[kRows][Shape::kUnroll],
                                         DecodeState<kRows>& state) const {
    const int kv_head = blockIdx.y, lane_in_head = threadIdx.x % Shape::kLanes;
    int positions[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) positions[r] = views[r].position;
#pragma unroll 1
    for (int at = position; at < position + Shape::kUnroll * Shape::kSlots; at += Shape::kSlots) {
      Raw8<KV> key;
      clear(key);
      double factor = scale;
      if (at < end && lane_in_head * 8 < kDim) {
        const int block = block_at(p, table, at), slot = slot_at(p, at);
        load(key, static_cast<const KV*>(p.k_cache) + key_offset(p, block, slot, kv_head) + lane_in_head * 8);
        if constexpr (IsInt8<KV>::value) factor *= key_scale(p, block, slot, kv_head);
      }
#pragma unroll 1
      for (int r = 0; r < kRows; r++) {
        double dot = 0.0;
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
          const float2 two = widen_pair(key, pair);
          dot += static_cast<double>(state.query[0][2 * pair]) * two.x;
          dot += static_cast<double>(state.query[0][2 * pair + 1]) * two.y;
        }
        dot = sum_over_lanes<Shape::kLanes>(dot * factor);
        if (scores[0][0] != minus_infinity())
          scores[0][0] = static_cast<float>(exact_score(p, dot, slopes[0], at - positions[0]) - base[0]);
        turn(scores[0]);
        turn(scores);
        turn(state.query);
        turn(slopes);
        turn(base);
        turn(positions);
      }
    }
  }

  // The positions of the round are summed apart first, so that small weights do not round at a large one's size.
  __device__ __forceinline__ void accumulate(const float (&rescale)[kRows], float (&scores)[kRows][Shape::kUnroll],
                                             DecodeState<kRows>& state) const {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float sum = 0.f;
#pragma unroll
      for (int u = 0; u < Shape::kUnroll; u++) {
        scores[r][u] = fast_exp2(scores[r][u]);
        sum += scores[r][u];
        scores[r][u] *= value_scales[u];
      }
      state.sum[r] = fmaf(state.sum[r], rescale[r], sum);
    }
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      float2 value[Shape::kUnroll];
#pragma unroll
      for (int u = 0; u < Shape::kUnroll; u++) value[u] = widen_pair(values[u], pair);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        float2 part = {0.f, 0.f};
#pragma unroll
        for (int u = 0; u < Shape::kUnroll; u++) {
          part.x = fmaf(scores[r][u], value[u].x, part.x);
          part.y = fmaf(scores[r][u], value[u].y, part.y);
        }
        state.acc[r][2 * pair] = fmaf(state.acc[r][2 * pair], rescale[r], part.x);
        state.acc[r][2 * pair + 1] = fmaf(state.acc[r][2 * pair + 1], rescale[r], part.y);
      }
    }
  }
};

// Combines the states of the positions of one warp; afterwards every lane group has the same.
template <int kLanes, int kRows>
__device__ __forceinline__ void combine_lane_groups(DecodeState<kRows>& state) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
#pragma unroll
    for (int step = kLanes; step < 32; step <<= 1) {
      const float other_maximum = __shfl_xor_sync(kAllLanes, state.maximum[r], step);
      const float other_sum = __shfl_xor_sync(kAllLanes, state.sum[r], step);
      const float maximum = fmaxf(state.maximum[r], other_maximum);
      const float base = finite_base(maximum);
      const float mine = fast_exp2(state.maximum[r] - base), theirs = fast_exp2(other_maximum - base);
      state.maximum[r] = maximum;
      state.sum[r] = state.sum[r] * mine + other_sum * theirs;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float other = __shfl_xor_sync(kAllLanes, state.acc[r][i], step);
        state.acc[r][i] = state.acc[r][i] * mine + other * theirs;
      }
    }
  }
}

template <class KV, int kDim, int kRows>
__global__ void __launch_bounds__(kDecodeThreads, decode_blocks(kRows)) paged_decode(const KV_GRID_CONSTANT AttentionParams p) {
  using Shape = DecodeShape<KV, kDim, kRows>;
  if (static_cast<int>(blockIdx.x) >= p.counts[0]) return;
  KV_DYNAMIC_SHARED(float, parts);  // [kWarps, kRows, kPartFloats]
  const WorkItem work = p.work[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int lane_in_head = threadIdx.x % Shape::kLanes, slot = threadIdx.x / Shape::kLanes;
  const int first_token = p.query_start[work.sequence];
  const int query_len = p.query_start[work.sequence + 1] - first_token;
  const int num_rows = min(kRows, query_len * p.group - work.first_row);
  const int* table = sequence_table(p, work.sequence);
  const float scale = score_scale<KV>(p, kv_head);

  RowView views[kRows];
  float slopes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    // Rows past the last one repeat it and are dropped at the end.
    views[r] = row_view(p, work.first_row + min(r, num_rows - 1), kv_head, query_len,
                        p.context_lens[work.sequence]);
    slopes[r] = p.alibi_slopes != nullptr ? p.alibi_slopes[views[r].head] : 0.f;
  }
  DecodeState<kRows> state;
  load_queries<KV, kDim, kRows>(p, views, num_rows, first_token, lane_in_head, state);

  constexpr int kStep = Shape::kSlots * Shape::kUnroll;
  int blocks[Shape::kUnroll] = {};
  for (int base = work.kv_begin; base < work.kv_end; base += kStep) {
    const int position = base + slot;
#pragma unroll
    for (int u = 0; u < Shape::kUnroll; u++) {
      const int at = position + u * Shape::kSlots;
      if (at < work.kv_end) blocks[u] = block_at(p, table, at);
    }
    DecodeRound<KV, kDim, kRows> round;
    round.fetch(p, blocks, position, work.kv_end, kv_head, lane_in_head);
    round.attend(p, table, views, position, work.kv_end, scale, slopes, state);
  }
  combine_lane_groups<Shape::kLanes>(state);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < Shape::kLanes && lane * 8 < kDim) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float* part = parts + (warp * kRows + r) * Shape::kPartFloats;
#pragma unroll
      for (int i = 0; i < 8; i++) part[lane * 8 + i] = state.acc[r][i];
      if (lane == 0) {
        part[kDim] = state.maximum[r];
        part[kDim + 1] = state.sum[r];
      }
    }
  }
  __syncthreads();
  const float value_scale = output_scale<KV>(p, kv_head);
  for (int e = threadIdx.x; e < num_rows * kDim; e += kDecodeThreads) {
    const int r = e / kDim, dim = e % kDim;
    const RowView view = row_view(p, work.first_row + r, kv_head, query_len, p.context_lens[work.sequence]);
    finish_row<Shape::kWarps, kDim>(p, work, kv_head, r, view, first_token, parts + r * Shape::kPartFloats,
                                    kRows * Shape::kPartFloats, dim, value_scale);
  }
}

}  // namespace kvpager
