// Zeroes the output rows past the last sequence's: padding of a batch that a captured launch covers.
//
// Where the rows start is read from memory. Grid: x over query heads, y over tokens, any sizes. A warp takes one
// head vector at a time. Sinks count as seen, so the log-sum-exp of such a row is its sink, else -inf.
#include "kvpager/finish.cuh"

namespace kvpager {

constexpr int kTailThreads = 128;

__global__ void __launch_bounds__(kTailThreads) zero_tail(const KV_GRID_CONSTANT AttentionParams p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int num_heads = p.num_kv_heads * p.group;
  const int warps = gridDim.x * (kTailThreads / 32);
  for (int token = p.query_start[p.num_sequences] + blockIdx.y; token < p.num_tokens; token += gridDim.y) {
    for (int head = blockIdx.x * (kTailThreads / 32) + warp; head < num_heads; head += warps) {
      for (int dim = lane; dim < p.head_dim; dim += 32) write_output(p, token, head, dim, 0.f);
      if (lane == 0) write_lse(p, token, head, p.sinks != nullptr ? p.sinks[head] : minus_infinity());
    }
  }
}

}  // namespace kvpager
