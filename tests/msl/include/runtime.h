// What a kernel asks of the runtime. Implemented in runtime/runtime.cpp, loaded before any kernel.
#pragma once

// Inlined and without debug information, so that its instructions carry the kernel's own line.
#define MSL_INLINE inline __attribute__((always_inline, nodebug))
#define MSL_CONVERGENT __attribute__((convergent))
// The last parameter of a function that lanes must call together: where the kernel calls it.
#define MSL_SITE msl::Site site = msl::here(__builtin_LINE(), __builtin_COLUMN())
// Runs inside the runtime on the runtime's memory: its accesses are not the kernel's.
#define MSL_UNCHECKED __attribute__((noinline, nodebug, no_sanitize("kernel-address", "undefined")))

namespace msl {

constexpr unsigned simd_width = 32;
constexpr unsigned lane_bytes = 64;

// The values that the lanes of one SIMD group bring to a collective; the collective puts each
// lane's result in the same place.
struct Exchange {
  alignas(64) char lanes[simd_width][lane_bytes];
  unsigned active;  // bit i: lane i takes part

  template <class T> MSL_INLINE T& at(unsigned lane) { return *(T*)lanes[lane]; }
  MSL_INLINE bool is_active(unsigned lane) const { return active >> lane & 1; }
};

// Computes all results at once. Returns null, or what is wrong with this use.
typedef const char* (*Combine)(Exchange&);

// A line and a column of the kernel. Two calls remain two even where the compiler makes them one.
typedef unsigned long Site;
MSL_INLINE constexpr Site here(unsigned line, unsigned column) { return Site(line) << 32 | column; }

enum class Scope { simdgroup, threadgroup };

extern "C" {
// Waits until every live lane of the SIMD group has come to this call, combines, and replaces
// `value` with this lane's result. `combine` may be null: then the lanes only meet.
void msl_collective(const char* name, Site site, void* value, unsigned bytes,
                    Combine combine) MSL_CONVERGENT;
void msl_barrier(Scope scope, Site site, unsigned mem_flags) MSL_CONVERGENT;
unsigned msl_lane();
// The storage of the kernel's threadgroup variable number `id`.
void* msl_threadgroup_variable(unsigned id, const char* name, unsigned long bytes);
void msl_atomic_load(const volatile void* address, void* value, unsigned bytes);
void msl_atomic_store(volatile void* address, const void* value, unsigned bytes);
}

}  // namespace msl
