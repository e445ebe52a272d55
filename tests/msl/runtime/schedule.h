// The order in which everything runs: threadgroups one after another, the threads of each as fibers
// that change over only where they must wait for each other.
#pragma once
#include <time.h>

#include "memory.h"

namespace msl {

struct Simdgroup {
  Thread* live[simd_width];  // those that have not returned, in the order in which they run
  unsigned num_live;
  unsigned turn;
  Exchange exchange;
};

static Thread threads[max_threads];
static Simdgroup simdgroups[max_threads / simd_width];
static char* stacks;
static void* buffer_pointers[max_buffers + 1];
static uint64_t random_state;
static uint64_t ticks;
static double deadline;

static double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

static inline void tick(uintptr_t pc) {
  if (++ticks % (1 << 18) == 0 && now() > deadline)
    fault("time", pc, "still runs after %.0f seconds", launch->max_seconds);
}

static uint64_t random_below(uint64_t bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state % bound;
}

template <class T> static void shuffle_order(T* items, unsigned count) {
  for (unsigned i = count; i > 1; i--) {
    const unsigned j = unsigned(random_below(i));
    const T item = items[i - 1];
    items[i - 1] = items[j];
    items[j] = item;
  }
}

static void resume(Thread* thread) {
  Thread* from = running;
  if (thread == from) return;
  running = thread;
  switch_stack(&from->stack_pointer, thread->stack_pointer);
}

static void start_round(Simdgroup& group) {
  if (random_state) shuffle_order(group.live, group.num_live);
  for (unsigned i = 0; i < group.num_live; i++) group.live[i]->state = State::running;
  group.turn = 0;
}

static void drop_finished(Simdgroup& group) {
  unsigned kept = 0;
  for (unsigned i = 0; i < group.num_live; i++)
    if (group.live[i]->state != State::done) group.live[kept++] = group.live[i];
  group.num_live = kept;
}

static bool wait_together(const Thread& a, const Thread& b) {
  return a.site == b.site && a.pc == b.pc;
}

static void require_convergence(const Simdgroup& group) {
  const Thread& first = *group.live[0];
  for (unsigned i = 1; i < group.num_live; i++) {
    const Thread& other = *group.live[i];
    if (!wait_together(first, other))
      fault_at_wait("divergence", first,
                    "lane %u of SIMD group %u is at %s, but lane %u is at %s, #%u", first.lane,
                    first.simdgroup, first.waiting_for, other.lane, other.waiting_for,
                    line_of(other.site));
  }
}

static void count_collective(const char* name) {
  unsigned i = 0;
  while (i < launch->num_collectives && strcmp(launch->collectives[i].name, name)) i++;
  if (i == max_collectives) return;
  if (i == launch->num_collectives) launch->collectives[launch->num_collectives++].name = name;
  launch->collectives[i].count++;
}

static void combine(Simdgroup& group) {
  const Thread& first = *group.live[0];
  group.exchange.active = 0;
  for (unsigned i = 0; i < group.num_live; i++) group.exchange.active |= 1u << group.live[i]->lane;
  count_collective(first.waiting_for);
  if (!first.combine) return;
  Thread* caller = running;
  running = nullptr;
  const char* wrong = first.combine(group.exchange);
  running = caller;
  if (wrong) fault_at_wait("divergence", first, "%s %s", first.waiting_for, wrong);
}

// Every lane of the group now waits or has returned. Runs on the stack of the last to do so.
static void settle(Simdgroup& group) {
  drop_finished(group);
  if (group.num_live == 0) return enter_scheduler();
  require_convergence(group);
  const Thread& first = *group.live[0];
  if (first.state == State::at_threadgroup_barrier) return enter_scheduler();
  if (first.state == State::at_simdgroup_barrier) {
    launch->simdgroup_barriers++;
    order_memory(first.mem_flags, Scope::simdgroup, first.simdgroup);
  } else {
    combine(group);
  }
  start_round(group);
  resume(group.live[0]);
}

static void wait(State state, const char* name, Site site, uintptr_t pc) {
  tick(pc);
  running->state = state;
  running->waiting_for = name;
  running->site = site;
  running->pc = pc;
  Simdgroup& group = simdgroups[running->simdgroup];
  if (++group.turn < group.num_live) resume(group.live[group.turn]);
  else settle(group);
}

static void run_thread() {
  launch->entry(buffer_pointers, &running->attributes);
  for (;;) wait(State::done, "its end", 0, 0);
}

static void start_thread(unsigned index, Uint3 extent, Position groups) {
  Thread& thread = threads[index];
  const Launch& l = *launch;
  const Position tg = current_threadgroup;
  const unsigned count = extent.x * extent.y * extent.z;
  const unsigned full = l.threadgroup.x * l.threadgroup.y * l.threadgroup.z;
  const Position grid = {l.grid.x, l.grid.y, l.grid.z};
  const Position local = {index % extent.x, index / extent.x % extent.y,
                          index / (extent.x * extent.y)};
  thread.index = index;
  thread.lane = index % simd_width;
  thread.simdgroup = index / simd_width;
  thread.state = State::running;
  thread.stack = stack_of(stacks, index);
  thread.stack_pointer = prepare_stack(thread.stack, run_thread);
  thread.attributes = {
      {tg.x * l.threadgroup.x + local.x, tg.y * l.threadgroup.y + local.y,
       tg.z * l.threadgroup.z + local.z},
      local,
      tg,
      {extent.x, extent.y, extent.z},
      {l.threadgroup.x, l.threadgroup.y, l.threadgroup.z},
      groups,
      grid,
      grid,
      {0, 0, 0},
      index,
      thread.lane,
      thread.simdgroup,
      (count + simd_width - 1) / simd_width,
      (full + simd_width - 1) / simd_width,
      simd_width,
      simd_width,
      index % 4,
      index / 4,
      (count + 3) / 4,
      (full + 3) / 4,
  };
}

static void run_simdgroup(Simdgroup& group) {
  start_round(group);
  running = group.live[0];
  switch_stack(&scheduler_stack_pointer, running->stack_pointer);
}

// All SIMD groups have stopped at a threadgroup barrier or ended. False if all have ended.
static bool pass_barrier(unsigned num_threads, unsigned num_groups) {
  const Thread* first = nullptr;
  for (unsigned g = 0; g < num_groups && !first; g++)
    if (simdgroups[g].num_live) first = simdgroups[g].live[0];
  if (!first) return false;
  for (unsigned i = 0; i < num_threads; i++) {
    const Thread& thread = threads[i];
    if (thread.state == State::done)
      fault_at_wait("divergence", *first,
                    "thread %u waits at a barrier, but thread %u has returned", first->index, i);
    else if (!wait_together(*first, thread))
      fault_at_wait("divergence", *first,
                    "thread %u waits at a barrier, but thread %u at another, #%u", first->index, i,
                    line_of(thread.site));
  }
  launch->threadgroup_barriers++;
  order_memory(first->mem_flags, Scope::threadgroup, 0);
  return !launch->fault_kind;
}

static void run_threadgroup(Position position, Position groups) {
  const Uint3 full = launch->threadgroup, grid = launch->grid;
  const auto extent_of = [](uint32_t full, uint32_t grid, uint32_t at) {
    return grid - at * full < full ? grid - at * full : full;
  };
  const Uint3 extent = {extent_of(full.x, grid.x, position.x),
                        extent_of(full.y, grid.y, position.y),
                        extent_of(full.z, grid.z, position.z)};
  const unsigned num_threads = extent.x * extent.y * extent.z;
  const unsigned num_groups = (num_threads + simd_width - 1) / simd_width;
  current_threadgroup = position;
  start_threadgroup_memory();
  for (unsigned g = 0; g < num_groups; g++) simdgroups[g].num_live = 0;
  for (unsigned i = 0; i < num_threads; i++) {
    start_thread(i, extent, groups);
    Simdgroup& group = simdgroups[i / simd_width];
    group.live[group.num_live++] = &threads[i];
  }
  unsigned order[max_threads / simd_width];
  for (unsigned g = 0; g < num_groups; g++) order[g] = g;
  do {
    if (random_state) shuffle_order(order, num_groups);
    for (unsigned g = 0; g < num_groups && !launch->fault_kind; g++)
      if (simdgroups[order[g]].num_live) run_simdgroup(simdgroups[order[g]]);
  } while (!launch->fault_kind && pass_barrier(num_threads, num_groups));
}

static uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  return b ? greatest_common_divisor(b, a % b) : a;
}

static void run_grid() {
  const Uint3 grid = launch->grid, full = launch->threadgroup;
  const Position groups = {(grid.x + full.x - 1) / full.x, (grid.y + full.y - 1) / full.y,
                           (grid.z + full.z - 1) / full.z};
  const uint64_t count = uint64_t(groups.x) * groups.y * groups.z;
  uint64_t stride = 1, at = 0;  // a stride that shares no divisor with the count visits all
  if (random_state) {
    at = random_below(count);
    do stride = 1 + random_below(count);
    while (greatest_common_divisor(stride, count) != 1);
  }
  for (uint64_t i = 0; i < count && !launch->fault_kind; i++, at = (at + stride) % count)
    run_threadgroup({uint32_t(at % groups.x), uint32_t(at / groups.x % groups.y),
                     uint32_t(at / groups.x / groups.y)},
                    groups);
}

}  // namespace msl
