// Replays a recorded case under a sanitizer: buffers of their exact sizes, then launches whose pointers are patched
// to them, then the buffers are written back. Linked with one unit of kernels.
//
// Usage: replay CASE RESULT ORDER SEED. The format is written by tests/emulator/replay.py.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" const char* emulator_run(int which, const unsigned* grid, unsigned threads, std::size_t shared_bytes,
                                    const void* parameters, int order, std::uint64_t seed);

namespace {

template <class T>
T read_one(std::FILE* file) {
  T value;
  if (std::fread(&value, sizeof value, 1, file) != 1) std::exit(3);
  return value;
}

void read_bytes(std::FILE* file, void* to, std::size_t size) {
  if (size != 0 && std::fread(to, size, 1, file) != 1) std::exit(3);
}

struct Buffer {
  unsigned char* data;
  std::size_t size;
};

// Reads one launch, patches its pointers, runs it.
const char* run_launch(std::FILE* file, const std::vector<Buffer>& buffers, int order, std::uint64_t seed) {
  const auto which = read_one<std::uint32_t>(file);
  unsigned grid[3];
  for (unsigned& size : grid) size = read_one<std::uint32_t>(file);
  const auto threads = read_one<std::uint32_t>(file), shared = read_one<std::uint32_t>(file);
  std::vector<std::uint64_t> parameters((read_one<std::uint32_t>(file) + 7) / 8);
  read_bytes(file, parameters.data(), parameters.size() * 8);
  const auto pointers = read_one<std::uint32_t>(file);
  for (std::uint32_t i = 0; i < pointers; i++) {
    const auto offset = read_one<std::uint32_t>(file), buffer = read_one<std::uint32_t>(file);
    const auto delta = read_one<std::uint64_t>(file);
    const unsigned char* address = buffers[buffer].data + delta;
    std::memcpy(reinterpret_cast<unsigned char*>(parameters.data()) + offset, &address, sizeof address);
  }
  return emulator_run(static_cast<int>(which), grid, threads, shared, parameters.data(), order, seed);
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 3;
  std::FILE* file = std::fopen(words[1], "rb");
  if (file == nullptr) return 3;
  std::vector<Buffer> buffers(read_one<std::uint32_t>(file));
  for (Buffer& buffer : buffers) {
    buffer.size = read_one<std::uint64_t>(file);
    buffer.data = static_cast<unsigned char*>(std::malloc(buffer.size != 0 ? buffer.size : 1));
    read_bytes(file, buffer.data, buffer.size);
  }
  const auto launches = read_one<std::uint32_t>(file);
  for (std::uint32_t i = 0; i < launches; i++) {
    const char* error = run_launch(file, buffers, std::atoi(words[3]), std::strtoull(words[4], nullptr, 10));
    if (error != nullptr) {
      std::fprintf(stderr, "emulator: %s\n", error);
      return 4;
    }
  }
  std::fclose(file);
  std::FILE* result = std::fopen(words[2], "wb");
  if (result == nullptr) return 3;
  for (const Buffer& buffer : buffers) std::fwrite(buffer.data, 1, buffer.size, result);
  std::fclose(result);
  for (const Buffer& buffer : buffers) std::free(buffer.data);
  return 0;
}
