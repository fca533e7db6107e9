// What a unit of emulated kernels exports. Included after the kernels and their table `kEntries`.
#pragma once
#include <cstring>

#include "machine.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// Runs kernel `which` of the unit. Returns null, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* emulator_run(int which, const unsigned* grid, unsigned threads, std::size_t shared_bytes,
                                    const void* parameters, int order, std::uint64_t seed) {
  emulator::Options options;
  options.order = static_cast<emulator::Order>(order);
  options.seed = seed;
  const auto entry = kEntries[which];
  return emulator::launch({grid[0], grid[1], grid[2]}, threads, shared_bytes, options,
                          [entry, parameters] { entry(parameters); });
}
