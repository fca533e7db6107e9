// Copies whole blocks between two arrays of blocks: copy on write (one array), gather and scatter (swap).
//
// Idea: a list of (from, to) block ids; one launch moves keys and values of all of them. A thread block takes a few
// rows (head vectors) and moves them in the widest word that divides everything.
// Grid: x items, y parts of a block, z 0 for the first array and 1 for the second. No shared memory.
// No destination may be a source of the same call. Bound: bandwidth.
#include "kvpager/params.cuh"
#include "kvpager/port.cuh"

namespace kvpager {

constexpr int kCopyThreads = 128;

template <class Word>
__global__ void __launch_bounds__(kCopyThreads) copy_blocks(const KV_GRID_CONSTANT BlockParams p) {
  const int item = blockIdx.x, side = blockIdx.z;
  const long long from = p.from_ids != nullptr ? p.from_ids[item * p.from_ids_stride] : item;
  const long long to = p.to_ids != nullptr ? p.to_ids[item * p.to_ids_stride] : item;
  KV_ASSERT(from >= 0 && from < p.from_blocks && to >= 0 && to < p.to_blocks);
  const char* source = static_cast<const char*>(p.from[side]) + from * p.from_block_bytes[side];
  char* target = static_cast<char*>(p.to[side]) + to * p.to_block_bytes[side];
  const int row_words = p.row_bytes[side] / static_cast<int>(sizeof(Word));
  const int num_words = p.num_slots * p.num_heads * row_words;
  for (int e = blockIdx.y * kCopyThreads + threadIdx.x; e < num_words; e += gridDim.y * kCopyThreads) {
    const int row = e / row_words, word = e - row * row_words;
    const int slot = row / p.num_heads, head = row - slot * p.num_heads;
    const long long at = slot * p.from_slot_bytes[side] + head * p.from_head_bytes[side];
    const long long put = slot * p.to_slot_bytes[side] + head * p.to_head_bytes[side];
    reinterpret_cast<Word*>(target + put)[word] = reinterpret_cast<const Word*>(source + at)[word];
  }
}

}  // namespace kvpager
