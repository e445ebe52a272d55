// One launch: what the host hands in (mirrored by launch.py), and where it stands.
#pragma once
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../include/runtime.h"
#include "fiber.h"

namespace msl {

constexpr unsigned max_threads = 1024;
constexpr unsigned max_buffers = 31;
constexpr unsigned max_variables = 64;
constexpr size_t max_threadgroup_bytes = 32 << 10;
constexpr unsigned max_access_bytes = 64;
constexpr unsigned max_collectives = 32;

enum class Kind : uint32_t { input, output, initialised_output, variable };

struct Traffic {
  uint64_t loads[max_access_bytes + 1];  // by width in bytes
  uint64_t stores[max_access_bytes + 1];
  uint64_t atomics;
  uint64_t distinct_bytes_loaded, distinct_bytes_stored;
};

struct Buffer {
  const char* name;
  void* data;
  uint64_t bytes;
  uint8_t* written;  // input: null, or 0 where no kernel wrote; output: set to 1 where written
  Kind kind;
  Traffic traffic;
};

struct Variable {
  const char* name;
  uint64_t bytes;
  Traffic traffic;
};

struct Uint3 {
  uint32_t x, y, z;
};

struct Launch {
  void (*entry)(void* const* buffers, const void* attributes);
  Buffer* buffers;
  uint32_t num_buffers;
  Uint3 grid, threadgroup;  // in threads
  uint64_t schedule;        // 0: in order; otherwise the seed of a random order
  double max_seconds;

  // Results.
  uint64_t threadgroup_barriers, simdgroup_barriers;
  struct {
    const char* name;
    uint64_t count;
  } collectives[max_collectives];
  uint32_t num_collectives;
  Variable variables[max_variables];
  uint32_t num_variables;
  const char* fault_kind;  // null: the launch ended well
  uint64_t fault_line;     // in the kernel's text; 0: ask the line table for fault_pc
  uint64_t fault_pc;       // relative to the kernel's image
  char fault[1024];
};

enum class State { running, at_collective, at_simdgroup_barrier, at_threadgroup_barrier, done };

// Three values, aligned as Metal's uint3.
struct alignas(16) Position {
  uint32_t x, y, z;
};
// Laid out as msl::Attributes in include/metal_stdlib.
struct Attributes {
  Position thread_in_grid, thread_in_threadgroup, threadgroup_in_grid, threads_per_threadgroup,
      dispatch_threads_per_threadgroup, threadgroups_per_grid, threads_per_grid, grid_size,
      grid_origin;
  uint32_t thread_in_threadgroup_index, lane, simdgroup, simdgroups, dispatch_simdgroups,
      simd_width, execution_width, thread_in_quadgroup, quadgroup, quadgroups, dispatch_quadgroups;
};

struct Thread {
  void* stack_pointer;
  char* stack;
  State state;
  const char* waiting_for;
  Site site;  // of the wait
  uintptr_t pc;
  Combine combine;
  unsigned mem_flags;
  unsigned index, lane, simdgroup;
  Attributes attributes;
};

static Launch* launch;
static Thread* running;  // null while the runtime itself runs
static void* scheduler_stack_pointer;
static uintptr_t image_base;
static Position current_threadgroup;

inline uintptr_t in_image(uintptr_t pc) { return pc - image_base; }

// Leaves the running thread for good or until the scheduler takes it up again.
inline void enter_scheduler() {
  Thread* from = running;
  running = nullptr;
  switch_stack(&from->stack_pointer, scheduler_stack_pointer);
}

inline unsigned line_of(Site site) { return unsigned(site >> 32); }

// The first fault of a launch ends it. "#12" in the text stands for line 12 of the kernel's text.
inline void record_fault(const char* kind, uintptr_t pc, unsigned line, const char* format,
                         va_list arguments) {
  if (launch->fault_kind) return;
  launch->fault_kind = kind;
  launch->fault_pc = in_image(pc);
  launch->fault_line = line;
  const int used = vsnprintf(launch->fault, sizeof(launch->fault), format, arguments);
  if (!running || used < 0 || used >= int(sizeof(launch->fault))) return;
  const Position& threadgroup = running->attributes.threadgroup_in_grid;
  snprintf(launch->fault + used, sizeof(launch->fault) - used,
           " [threadgroup (%u, %u, %u), thread %u: SIMD group %u, lane %u]", threadgroup.x,
           threadgroup.y, threadgroup.z, running->index, running->simdgroup, running->lane);
}

// A thread at fault never runs on. Where the runtime itself finds a fault, it returns and stops.
inline void abandon_thread() {
  while (running) enter_scheduler();
}

__attribute__((format(printf, 3, 4))) inline void fault(const char* kind, uintptr_t pc,
                                                        const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_fault(kind, pc, 0, format, arguments);
  va_end(arguments);
  abandon_thread();
}

// At the line where `thread` waits.
__attribute__((format(printf, 3, 4))) inline void fault_at_wait(const char* kind,
                                                                const Thread& thread,
                                                                const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record_fault(kind, thread.pc, line_of(thread.site), format, arguments);
  va_end(arguments);
  abandon_thread();
}

}  // namespace msl
