#include "accesses.h"

namespace emulator {

void load_shared_16(std::uint16_t* value, const std::uint16_t* from) { *value = *from; }

void spoil_shared(void* to, int bytes) {
  for (int i = 0; i < bytes / 4; i++) static_cast<std::uint32_t*>(to)[i] = 0xffffffffu;
}

void land_shared(void* to, const void* from, int bytes) {
  for (int i = 0; i < bytes / 4; i++) static_cast<std::uint32_t*>(to)[i] = static_cast<const std::uint32_t*>(from)[i];
}

}  // namespace emulator
