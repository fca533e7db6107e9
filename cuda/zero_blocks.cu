// Zeroes whole blocks of one or two arrays, so that a block's next owner finds nothing of the last one.
//
// Grid: x block ids, y parts of a block, z array. Bound: bandwidth (writes only).
#include "kvpager/params.cuh"
#include "kvpager/port.cuh"

namespace kvpager {

constexpr int kZeroThreads = 128;

template <class Word>
__global__ void __launch_bounds__(kZeroThreads) zero_blocks(const KV_GRID_CONSTANT BlockParams p) {
  const int side = blockIdx.z;
  const long long to = p.to_ids[blockIdx.x * p.to_ids_stride];
  KV_ASSERT(to >= 0 && to < p.to_blocks);
  char* target = static_cast<char*>(p.to[side]) + to * p.to_block_bytes[side];
  const int row_words = p.row_bytes[side] / static_cast<int>(sizeof(Word));
  const int num_words = p.num_slots * p.num_heads * row_words;
  for (int e = blockIdx.y * kZeroThreads + threadIdx.x; e < num_words; e += gridDim.y * kZeroThreads) {
    const int row = e / row_words, word = e - row * row_words;
    const int slot = row / p.num_heads, head = row - slot * p.num_heads;
    const long long put = slot * p.to_slot_bytes[side] + head * p.to_head_bytes[side];
    reinterpret_cast<Word*>(target + put)[word] = Word{};
  }
}

}  // namespace kvpager
