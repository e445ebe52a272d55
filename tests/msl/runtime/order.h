// Which access comes before which: the clock of barriers, and what is noted of each byte.
#pragma once
#include "launch.h"

namespace msl {

enum Space { device_space, threadgroup_space, num_spaces };

// When an access happened: the barrier clock of its threadgroup, the thread, and how many others
// did the same. Zero is never.
typedef uint32_t Stamp;
enum class By : uint32_t { thread, simdgroup, threadgroup, atomic };
constexpr unsigned clock_shift = 12;
constexpr uint32_t max_clock = (1u << (32 - clock_shift)) - 1;
inline Stamp make_stamp(uint32_t clock, unsigned thread, By by) {
  return clock << clock_shift | uint32_t(by) << 10 | thread;
}
inline uint32_t clock_of(Stamp stamp) { return stamp >> clock_shift; }
inline unsigned thread_of(Stamp stamp) { return stamp & 1023; }
inline By by_of(Stamp stamp) { return By(stamp >> 10 & 3); }

// One byte's last store and last load, and the threadgroup (counted from 1) that made them.
struct Shadow {
  Stamp store, load;
  uint32_t threadgroup;
};

// Barriers order accesses: everything below a floor is over for the whole threadgroup, or for one
// SIMD group.
static uint32_t barrier_clock;
static uint32_t threadgroup_floor[num_spaces];
static uint32_t simdgroup_floor[num_spaces][max_threads / simd_width];
static uint32_t threadgroup_number;

inline void start_threadgroup_memory() {
  threadgroup_number++;
  barrier_clock = 1;
  for (int space = 0; space < num_spaces; space++) {
    threadgroup_floor[space] = 0;
    for (auto& floor : simdgroup_floor[space]) floor = 0;
  }
}

// A barrier whose flags name a space orders the accesses to that space.
inline void order_memory(unsigned mem_flags, Scope scope, unsigned simdgroup) {
  if (++barrier_clock > max_clock)
    fault("limit", image_base, "more than %u barriers in one threadgroup", max_clock);
  const bool names[num_spaces] = {bool(mem_flags & 1), bool(mem_flags & 2)};
  for (int space = 0; space < num_spaces; space++) {
    if (!names[space]) continue;
    if (scope == Scope::threadgroup) threadgroup_floor[space] = barrier_clock;
    else simdgroup_floor[space][simdgroup] = barrier_clock;
  }
}

// Whether the running thread comes after an access that its own threadgroup made.
inline bool comes_after(Stamp stamp, Space space) {
  const uint32_t clock = clock_of(stamp);
  if (clock < threadgroup_floor[space]) return true;
  const By by = by_of(stamp);
  if (by == By::threadgroup || by == By::atomic) return false;
  const unsigned thread = thread_of(stamp);
  if (by == By::thread && thread == running->index) return true;
  return thread / simd_width == running->simdgroup &&
         clock < simdgroup_floor[space][running->simdgroup];
}

}  // namespace msl
