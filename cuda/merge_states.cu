// Joins two attention results over disjoint positions (cascade: a shared prefix and a sequence's own part).
//
// Grid: x tokens x heads, one warp each, four warps a block. out may be out_a or out_b. Bound: bandwidth.
#include "kvpager/softmax.cuh"

namespace kvpager {

constexpr int kMergeStatesThreads = 128;

__global__ void __launch_bounds__(kMergeStatesThreads) merge_states(const KV_GRID_CONSTANT MergeStatesParams p) {
  const long long vector = static_cast<long long>(blockIdx.x) * (kMergeStatesThreads / 32) + threadIdx.x / 32;
  if (vector >= static_cast<long long>(p.num_tokens) * p.num_heads) return;
  const long long token = vector / p.num_heads;
  const int head = static_cast<int>(vector - token * p.num_heads), lane = threadIdx.x % 32;
  const long long b_token = p.b_rows == nullptr ? token : p.b_rows[token];
  const float a = p.lse_a[token * p.lse_a_token_stride + head * p.lse_a_head_stride] * kLog2E;
  const float b = b_token < 0 ? minus_infinity()
                              : p.lse_b[b_token * p.lse_b_token_stride + head * p.lse_b_head_stride] * kLog2E;
  const float maximum = fmaxf(a, b), base = finite_base(maximum);
  const float weight_a = fast_exp2(a - base), weight_b = fast_exp2(b - base), sum = weight_a + weight_b;
  const float share_a = sum > 0.f ? weight_a / sum : 0.f, share_b = sum > 0.f ? weight_b / sum : 0.f;
  for (int dim = lane; dim < p.head_dim; dim += 32) {
    // A side that saw nothing has weight 0 and may hold anything, or not be there.
    float value = 0.f;
    if (share_a > 0.f)
      value += share_a * load_one_as(p.out_a, token * p.a_token_stride + head * p.a_head_stride + dim, p.dtype);
    if (share_b > 0.f)
      value += share_b * load_one_as(p.out_b, b_token * p.b_token_stride + head * p.b_head_stride + dim, p.dtype);
    store_as(p.out, token * p.out_token_stride + head * p.out_head_stride + dim, p.out_dtype, value);
  }
  __syncwarp();
  if (lane == 0 && p.lse != nullptr)
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = log_sum_exp(maximum, sum);
}

}  // namespace kvpager
