// Brings the device copy of the block tables up to date from the step's change log in pinned host memory.
//
// The count is read from memory, so a captured launch serves every step; the log's order does not matter, since an
// entry appears at most once in a step. Grid: x covers the log's capacity. One small read over the bus a step.
#include "kvpager/params.cuh"
#include "kvpager/port.cuh"

namespace kvpager {

constexpr int kDeltaThreads = 128;

__global__ void __launch_bounds__(kDeltaThreads) apply_deltas(const KV_GRID_CONSTANT DeltaParams p) {
  const int count = min(*p.count, p.capacity);
  for (int i = blockIdx.x * kDeltaThreads + threadIdx.x; i < count; i += gridDim.x * kDeltaThreads) {
    const int4 delta = reinterpret_cast<const int4*>(p.deltas)[i];
    KV_ASSERT(delta.x >= 0 && delta.x < p.num_rows && delta.y >= 0 && delta.y < p.max_blocks);
    p.block_tables[delta.x * p.table_stride + delta.y] = delta.z;
  }
}

}  // namespace kvpager
