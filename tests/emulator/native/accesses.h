// The machine's accesses to the kernel's own data. Compiled with the sanitizers, unlike the machine, so that an
// ldmatrix row past its array or a cp.async that races is seen like any other access.
#pragma once
#include <cstdint>

namespace emulator {

void load_shared_16(std::uint16_t* value, const std::uint16_t* from);
// Fills the target of an asynchronous copy with not-a-number until it lands.
void spoil_shared(void* to, int bytes);
void land_shared(void* to, const void* from, int bytes);

}  // namespace emulator
