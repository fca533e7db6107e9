// Joins the partial results of rows whose positions were split over several blocks.
//
// Idea: each partial result is a weighted sum with the maximum and the sum of its weights; all are brought to the
// largest maximum and added. Partial results are added in plan order, so the sum does not depend on timing.
// Grid: x merge items (room of the plan; blocks past the count leave), y KV heads. Threads walk rows x head_dim.
// Memory: reads partials once; no shared memory. Bound: bandwidth, a few percent of the attention's own.
#include "kvpager/finish.cuh"

namespace kvpager {

constexpr int kMergeThreads = 128;

template <class KV>
__global__ void __launch_bounds__(kMergeThreads) merge_splits(const KV_GRID_CONSTANT AttentionParams p) {
  if (static_cast<int>(blockIdx.x) >= p.counts[1]) return;
  const MergeItem merge = p.merges[blockIdx.x];
  const int kv_head = blockIdx.y;
  const int first_token = p.query_start[merge.sequence];
  const int query_len = p.query_start[merge.sequence + 1] - first_token;
  const int num_rows = min(p.tile_rows, query_len * p.group - merge.first_row);
  const float value_scale = output_scale<KV>(p, kv_head);
  for (int e = threadIdx.x; e < num_rows * p.head_dim; e += kMergeThreads) {
    const int r = e / p.head_dim, dim = e % p.head_dim;
    float maximum = minus_infinity();
    for (int i = 0; i < merge.num_partials; i++)
      maximum = fmaxf(maximum, p.partial_state[2 * partial_row(p, merge.first_partial + i, kv_head, r)]);
    const float base = finite_base(maximum);
    float sum = 0.f, value = 0.f;
    for (int i = 0; i < merge.num_partials; i++) {
      const long long index = partial_row(p, merge.first_partial + i, kv_head, r);
      const float weight = fast_exp2(p.partial_state[2 * index] - base);
      sum += weight * p.partial_state[2 * index + 1];
      value += weight * p.partial_out[index * p.head_dim + dim];
    }
    const RowView view = row_view(p, merge.first_row + r, kv_head, query_len, p.context_lens[merge.sequence]);
    if (p.sinks != nullptr) {
      float rescale;
      add_sink(p.sinks[view.head] * kLog2E, maximum, sum, rescale);
      value *= rescale;
    }
    write_output(p, first_token + view.token, view.head, dim, sum > 0.f ? value / sum * value_scale : 0.f);
    if (dim == 0) write_lse(p, first_token + view.token, view.head, log_sum_exp(maximum, sum));
  }
}

}  // namespace kvpager
