// The emulated machine as kernels see it. Every CUDA thread of a block is a fiber; a fiber runs until it needs
// others (a barrier, a warp operation) or ends, then the machine picks the next one in the chosen order.
//
// Caught, with the source line: a barrier that not all live threads reach, different barriers or warp operations
// meeting, lanes outside a mask, a wait that nothing ends. Late by design: cp.async lands at the wait that covers
// it, its target is not-a-number until then. Shared memory is fresh, of the exact size, and filled with NaN.
// Not modelled: weak memory order between blocks, timing, bank conflicts, register limits.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <type_traits>

#include "numbers.h"

namespace emulator {

struct Index {
  unsigned x, y, z;
};

enum Order : int { kForward = 0, kReverse = 1, kRandom = 2 };

struct Options {
  Order order = kForward;
  std::uint64_t seed = 1;
};

// The running thread and its block.
extern thread_local Index thread_index, block_index, block_shape, grid_shape;

// Runs a grid block after block; returns null, or what went wrong.
const char* launch(Index grid, unsigned threads, std::size_t shared_bytes, const Options& options,
                   const std::function<void()>& kernel);

// Thread and block scope.
void* dynamic_shared();
void barrier(int line);
// Ends the launch with this text; the first failure wins.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Warp scope.
void warp_sync(unsigned mask, int line);
std::uint32_t shuffle_xor(unsigned mask, std::uint32_t bits, int lane_xor, int line);
void ldmatrix_x4(std::uint32_t* registers, const void* row, bool transposed, int line);
void mma(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, bool bfloat16, int line);

// Asynchronous copies of the running thread.
void copy_async(void* to, const void* from, int bytes);
void copy_async_commit();
void copy_async_wait(int pending_groups);

// Values of 64 bits go in two halves, as CUDA sends them.
template <class T>
inline T shuffle_xor_value(unsigned mask, T value, int lane_xor, int line) {
  static_assert(sizeof(T) % 4 == 0, "shuffles move 32 bits");
  std::uint32_t bits[sizeof(T) / 4];
  std::memcpy(bits, &value, sizeof(T));
  for (std::uint32_t& half : bits) half = shuffle_xor(mask, half, lane_xor, line);
  std::memcpy(&value, bits, sizeof(T));
  return value;
}
// Whether any lane of a whole warp says so.
inline bool any(unsigned mask, bool vote, int line) {
  std::uint32_t found = vote;
  for (int step = 16; step > 0; step >>= 1) found |= shuffle_xor(mask, found, step, line);
  return found != 0;
}
template <bool kTransposed>
inline void ldmatrix(unsigned (&registers)[4], const void* row, int line) {
  ldmatrix_x4(registers, row, kTransposed, line);
}
template <class T>
inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line) {
  mma(d, a, b0, b1, std::is_same_v<T, __nv_bfloat16>, line);
}

}  // namespace emulator
