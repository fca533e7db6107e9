// The scheduler of fibers. Compiled without sanitizers: its own tables are not the kernel's data.
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "accesses.h"
#include "fiber.h"

namespace emulator {

thread_local Index thread_index, block_index, block_shape, grid_shape;

namespace {

constexpr int kMeetings = 4;      // different masks that may meet in one warp at once
constexpr int kDepositBytes = 32; // what a lane may bring to a meeting

struct AsyncCopy {
  void* to;
  const void* from;
  int bytes;
  int group;
};

struct Thread {
  Fiber fiber;
  Index index{};
  bool ended = false;
  int waiting_line = 0;
  int reading = -1;  // the meeting whose table this lane may still read
  int copy_group = 0;
  std::deque<AsyncCopy> copies;
};

// Lanes of one mask meeting at one operation. Two tables, used in turn: a fast lane may bring its next deposit
// while a slow one still reads the last.
struct Meeting {
  unsigned mask = 0, arrived = 0;
  int line = 0, readers = 0;
  unsigned turn = 0;
  alignas(16) unsigned char table[2][32][kDepositBytes];
};

struct Warp {
  unsigned ready = 0;
  Meeting meetings[kMeetings];
  char sync_edge = 0;
};

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  Fiber host;
  int num_threads = 0, num_warps = 0, live = 0, at_barrier = 0, barrier_line = 0, running = -1;
  const std::function<void()>* kernel = nullptr;
  Options options;
  std::uint64_t random = 1;
  std::vector<unsigned char> shared;
  std::string error;
  char barrier_edge = 0, start_edge = 0, end_edge = 0;

  Thread& self() { return *threads[running]; }
  Warp& warp() { return *warps[running / 32]; }
  unsigned lane() const { return static_cast<unsigned>(running) % 32; }
  unsigned next_random(unsigned below) {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return static_cast<unsigned>((random >> 16) % below);
  }
};

thread_local std::unique_ptr<Machine> machine;

int lowest(unsigned bits) { return __builtin_ctz(bits); }
int highest(unsigned bits) { return 31 - __builtin_clz(bits); }

int choose_lane(unsigned ready) {
  Machine& m = *machine;
  if (m.options.order == kForward) return lowest(ready);
  if (m.options.order == kReverse) return highest(ready);
  unsigned skip = m.next_random(static_cast<unsigned>(__builtin_popcount(ready)));
  while (skip-- > 0) ready &= ready - 1;
  return lowest(ready);
}

// The next thread to run, or -1. Forward and reverse stay in a warp while it can go on.
int choose_thread() {
  Machine& m = *machine;
  const bool reverse = m.options.order == kReverse;
  int start = m.running >= 0 ? m.running / 32 : (reverse ? m.num_warps - 1 : 0);
  if (m.options.order == kRandom) start = static_cast<int>(m.next_random(static_cast<unsigned>(m.num_warps)));
  for (int i = 0; i < m.num_warps; i++) {
    const int w = (start + (reverse ? m.num_warps - i : i)) % m.num_warps;
    if (m.warps[w]->ready != 0) return w * 32 + choose_lane(m.warps[w]->ready);
  }
  return -1;
}

void report_deadlock() {
  Machine& m = *machine;
  std::string lines;
  for (int i = 0; i < m.num_threads; i++) {
    if (m.threads[i]->ended) continue;
    const std::string line = std::to_string(m.threads[i]->waiting_line);
    if (lines.find(" " + line + ",") == std::string::npos) lines += " " + line + ",";
  }
  m.error = "deadlock: " + std::to_string(m.live) + " threads wait for ever at lines" + lines + " " +
            std::to_string(m.at_barrier) + " of them at a barrier";
}

// Leaves the running thread, which is no longer ready or has ended, or only makes room for others.
void yield_from(Thread& leaving) {
  Machine& m = *machine;
  const int next = m.error.empty() ? choose_thread() : -1;
  if (next >= 0 && m.threads[next].get() == &leaving && !leaving.ended) return;
  if (next < 0) {
    if (m.live > 0 && m.error.empty()) report_deadlock();
    m.running = -1;
    leaving.fiber.switch_to(m.host, leaving.ended);
    return;
  }
  m.running = next;
  thread_index = m.threads[next]->index;
  leaving.fiber.switch_to(m.threads[next]->fiber, leaving.ended);
}

void block_self(int line) {
  Machine& m = *machine;
  m.self().waiting_line = line;
  m.warp().ready &= ~(1u << m.lane());
  yield_from(m.self());
}

void open_barrier() {
  Machine& m = *machine;
  m.at_barrier = 0;
  for (int i = 0; i < m.num_threads; i++)
    if (!m.threads[i]->ended) m.warps[i / 32]->ready |= 1u << (i % 32);
}

// The meeting of a mask in this warp: one under way, or a free one.
int find_meeting(unsigned mask, int line) {
  Warp& warp = machine->warp();
  int free = -1;
  for (int i = 0; i < kMeetings; i++) {
    Meeting& meeting = warp.meetings[i];
    if (meeting.mask == mask) return i;
    if (meeting.arrived != 0 && (meeting.mask & mask) != 0)
      fail("warp operation at line %d (mask %08x) meets another at line %d (mask %08x)", line, mask, meeting.line, meeting.mask);
    if (meeting.arrived == 0 && meeting.readers == 0 && free < 0) free = i;
  }
  if (free < 0) fail("line %d: more than %d masks at once in one warp", line, kMeetings);
  warp.meetings[free].mask = mask;
  return free;
}

// Brings `bytes` to the meeting and waits for the other lanes; the table is valid until the lane's next meeting.
const unsigned char (*meet(unsigned mask, const void* deposit, int bytes, int line))[kDepositBytes] {
  Machine& m = *machine;
  const unsigned lane = m.lane();
  if (((mask >> lane) & 1u) == 0) fail("line %d: lane %u is not in the mask %08x of its operation", line, lane, mask);
  Thread& self = m.self();
  if (self.reading >= 0) m.warp().meetings[self.reading].readers--;
  self.reading = -1;
  const int which = find_meeting(mask, line);
  Meeting& meeting = m.warp().meetings[which];
  if (meeting.arrived == 0) meeting.line = line;
  else if (meeting.line != line) fail("warp operation at line %d meets another at line %d", line, meeting.line);
  self.reading = which;
  meeting.readers++;
  auto* table = meeting.table[meeting.turn & 1u];
  std::memcpy(table[lane], deposit, static_cast<std::size_t>(bytes));
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    meeting.turn++;
    m.warp().ready |= mask;
    if (m.options.order != kForward) yield_from(self);
  } else {
    block_self(line);
  }
  return table;
}

void thread_main() {
  Machine& m = *machine;
  Thread& self = m.self();
  self.fiber.arrived();
  observe(&m.start_edge);  // not the end edge: a thread that starts late is not ordered after one that ended
  (*m.kernel)();
  publish(&m.end_edge);
  if (self.reading >= 0) m.warp().meetings[self.reading].readers--;
  self.ended = true;
  m.live--;
  m.warp().ready &= ~(1u << m.lane());
  if (m.live > 0 && m.at_barrier == m.live) open_barrier();  // those who left no longer count
  yield_from(self);
  std::abort();
}

void run_block(unsigned threads, std::size_t shared_bytes) {
  Machine& m = *machine;
  m.num_threads = m.live = static_cast<int>(threads);
  m.num_warps = (m.num_threads + 31) / 32;
  m.at_barrier = 0;
  m.running = -1;
  while (static_cast<int>(m.threads.size()) < m.num_threads) m.threads.push_back(std::make_unique<Thread>());
  while (static_cast<int>(m.warps.size()) < m.num_warps) m.warps.push_back(std::make_unique<Warp>());
  m.shared = std::vector<unsigned char>(shared_bytes, 0xff);
  for (int w = 0; w < m.num_warps; w++)
    for (Meeting& meeting : m.warps[w]->meetings) meeting.mask = meeting.arrived = meeting.readers = 0;
  for (int i = 0; i < m.num_threads; i++) {
    Thread& thread = *m.threads[i];
    thread.fiber.prepare(thread_main);
    thread.index = {static_cast<unsigned>(i), 0, 0};
    thread.ended = false;
    thread.reading = -1;
    thread.copy_group = 0;
    thread.copies.clear();
    m.warps[i / 32]->ready |= 1u << (i % 32);
  }
  m.host.adopt_current();
  publish(&m.start_edge);
  m.running = choose_thread();
  thread_index = m.threads[m.running]->index;
  m.host.switch_to(m.threads[m.running]->fiber, false);
  observe(&m.end_edge);  // blocks are ordered for the race detector: they share stacks and shared memory
  for (auto& warp : m.warps) warp->ready = 0;
}

}  // namespace

const char* launch(Index grid, unsigned threads, std::size_t shared_bytes, const Options& options,
                   const std::function<void()>& kernel) {
  static thread_local std::string error;
  if (!machine) machine = std::make_unique<Machine>();
  Machine& m = *machine;
  m.options = options;
  m.random = options.seed * 0x9e3779b97f4a7c15ull + 1;
  m.kernel = &kernel;
  m.error.clear();
  grid_shape = grid;
  block_shape = {threads, 1, 1};
  const std::uint64_t total = static_cast<std::uint64_t>(grid.x) * grid.y * grid.z;
  for (std::uint64_t i = 0; i < total && m.error.empty(); i++) {
    const std::uint64_t b = options.order == kReverse ? total - 1 - i : i;
    block_index = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                   static_cast<unsigned>(b / grid.x / grid.y)};
    run_block(threads, shared_bytes);
  }
  error = m.error;
  return error.empty() ? nullptr : error.c_str();
}

void* dynamic_shared() { return machine->shared.data(); }

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  Machine& m = *machine;
  char whole[640];
  std::snprintf(whole, sizeof whole, "block (%u,%u,%u) thread %d: %s", block_index.x, block_index.y, block_index.z, m.running, text);
  if (m.error.empty()) m.error = whole;
  m.warp().ready &= ~(1u << m.lane());
  yield_from(m.self());
  std::abort();
}

void barrier(int line) {
  Machine& m = *machine;
  if (m.at_barrier > 0 && m.barrier_line != line)
    fail("barrier at line %d while others wait at the one at line %d", line, m.barrier_line);
  m.barrier_line = line;
  publish(&m.barrier_edge);
  if (++m.at_barrier == m.live) {
    open_barrier();
    if (m.options.order != kForward) yield_from(m.self());
  } else {
    block_self(line);
  }
  observe(&m.barrier_edge);
}

void warp_sync(unsigned mask, int line) {
  Machine& m = *machine;
  const int first = m.running / 32 * 32;
  for (int i = 0; i < 32; i++)
    if (first + i >= m.num_threads || m.threads[first + i]->ended) mask &= ~(1u << i);
  Warp& warp = m.warp();
  publish(&warp.sync_edge);
  const char nothing = 0;
  meet(mask, &nothing, 1, line);
  observe(&warp.sync_edge);
}

std::uint32_t shuffle_xor(unsigned mask, std::uint32_t bits, int lane_xor, int line) {
  const unsigned source = machine->lane() ^ static_cast<unsigned>(lane_xor);
  const auto* table = meet(mask, &bits, 4, line);
  if (source > 31 || ((mask >> source) & 1u) == 0) fail("line %d: shuffle from lane %u, outside the mask %08x", line, source, mask);
  std::memcpy(&bits, table[source], 4);
  return bits;
}

void ldmatrix_x4(std::uint32_t* registers, const void* row, bool transposed, int line) {
  const auto* table = meet(0xffffffffu, &row, sizeof row, line);
  const unsigned lane = machine->lane(), major = lane / 4, minor = lane % 4 * 2;
  for (unsigned matrix = 0; matrix < 4; matrix++) {
    std::uint16_t pair[2];
    for (unsigned i = 0; i < 2; i++) {
      const unsigned in_row = transposed ? minor + i : major, in_column = transposed ? major : minor + i;
      const std::uint16_t* values;
      std::memcpy(&values, table[matrix * 8 + in_row], sizeof values);
      if (reinterpret_cast<std::uintptr_t>(values) % 16 != 0) fail("line %d: ldmatrix row is not aligned to 16 bytes", line);
      load_shared_16(&pair[i], values + in_column);
    }
    std::memcpy(&registers[matrix], pair, 4);
  }
}

void mma(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1, bool bfloat16, int line) {
  struct Fragment {
    std::uint32_t a[4], b[2];
  } mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  static_assert(sizeof(Fragment) <= kDepositBytes, "a deposit holds a lane's fragments");
  const auto* table = meet(0xffffffffu, &mine, sizeof mine, line);
  const auto widen = [bfloat16](std::uint32_t word, unsigned half) {
    const auto bits = static_cast<std::uint16_t>(word >> (16 * half));
    if (bfloat16) return __bfloat162float({bits});
    __half value;
    std::memcpy(&value, &bits, 2);
    return __half2float(value);
  };
  const unsigned lane = machine->lane();
  for (unsigned i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = 0.f;
    for (unsigned k = 0; k < 16; k++) {
      Fragment of_row, of_column;
      std::memcpy(&of_row, table[row % 8 * 4 + k % 8 / 2], sizeof of_row);
      std::memcpy(&of_column, table[column * 4 + k % 8 / 2], sizeof of_column);
      sum += widen(of_row.a[row / 8 + k / 8 * 2], k % 2) * widen(of_column.b[k / 8], k % 2);
    }
    d[i] += sum;
  }
}

void copy_async(void* to, const void* from, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0)
    fail("cp.async of an address that is not aligned to 16 bytes");
  Thread& self = machine->self();
  spoil_shared(to, bytes);
  self.copies.push_back({to, from, bytes, self.copy_group});
}

void copy_async_commit() { machine->self().copy_group++; }

void copy_async_wait(int pending_groups) {
  Thread& self = machine->self();
  while (!self.copies.empty() && self.copies.front().group < self.copy_group - pending_groups) {
    const AsyncCopy copy = self.copies.front();
    self.copies.pop_front();
    land_shared(copy.to, copy.from, copy.bytes);
  }
}

}  // namespace emulator
