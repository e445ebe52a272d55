// What a kernel calls (include/runtime.h), what the compiler makes it call at every access, and
// what the host calls to launch it.
#include <dlfcn.h>

#include "schedule.h"

namespace msl {

#define MSL_EXPORT extern "C" __attribute__((visibility("default")))
#define MSL_CALLER ((uintptr_t)__builtin_return_address(0))

MSL_EXPORT void msl_collective(const char* name, Site site, void* value, unsigned bytes,
                               Combine combine) {
  char* place = simdgroups[running->simdgroup].exchange.lanes[running->lane];
  running->combine = combine;
  memcpy(place, value, bytes);
  wait(State::at_collective, name, site, MSL_CALLER);
  memcpy(value, place, bytes);
}
MSL_EXPORT void msl_barrier(Scope scope, Site site, unsigned mem_flags) {
  running->mem_flags = mem_flags;
  if (scope == Scope::threadgroup)
    wait(State::at_threadgroup_barrier, "threadgroup_barrier", site, MSL_CALLER);
  else wait(State::at_simdgroup_barrier, "simdgroup_barrier", site, MSL_CALLER);
}
MSL_EXPORT unsigned msl_lane() { return running->lane; }
MSL_EXPORT void* msl_threadgroup_variable(unsigned id, const char* name, unsigned long bytes) {
  return place_variable(id, name, bytes, MSL_CALLER);
}
MSL_EXPORT void msl_atomic_load(const volatile void* address, void* value, unsigned bytes) {
  check_access((uintptr_t)address, bytes, bytes, Access::atomic_load, MSL_CALLER);
  memcpy(value, (const void*)address, bytes);
}
MSL_EXPORT void msl_atomic_store(volatile void* address, const void* value, unsigned bytes) {
  check_access((uintptr_t)address, bytes, bytes, Access::atomic_store, MSL_CALLER);
  memcpy((void*)address, value, bytes);
}

// The calls that the compiler's address sanitizer puts before loads and stores.
#define MSL_ACCESSES(bytes)                                         \
  MSL_EXPORT void __asan_load##bytes(uintptr_t address) {           \
    tick(MSL_CALLER);                                               \
    check_access(address, bytes, bytes, Access::load, MSL_CALLER);  \
  }                                                                 \
  MSL_EXPORT void __asan_store##bytes(uintptr_t address) {          \
    tick(MSL_CALLER);                                               \
    check_access(address, bytes, bytes, Access::store, MSL_CALLER); \
  }
MSL_ACCESSES(1)
MSL_ACCESSES(2)
MSL_ACCESSES(4)
MSL_ACCESSES(8)
MSL_ACCESSES(16)
// Packed or of another size.
MSL_EXPORT void __asan_loadN(uintptr_t address, size_t bytes) {
  check_access(address, bytes, 1, Access::load, MSL_CALLER);
}
MSL_EXPORT void __asan_storeN(uintptr_t address, size_t bytes) {
  check_access(address, bytes, 1, Access::store, MSL_CALLER);
}
MSL_EXPORT void* __asan_memcpy(void* to, const void* from, size_t bytes) {
  check_access((uintptr_t)from, bytes, 1, Access::load, MSL_CALLER);
  check_access((uintptr_t)to, bytes, 1, Access::store, MSL_CALLER);
  return memmove(to, from, bytes);
}
MSL_EXPORT void* __asan_memmove(void* to, const void* from, size_t bytes) {
  check_access((uintptr_t)from, bytes, 1, Access::load, MSL_CALLER);
  check_access((uintptr_t)to, bytes, 1, Access::store, MSL_CALLER);
  return memmove(to, from, bytes);
}
MSL_EXPORT void* __asan_memset(void* to, int value, size_t bytes) {
  check_access((uintptr_t)to, bytes, 1, Access::store, MSL_CALLER);
  return memset(to, value, bytes);
}
MSL_EXPORT void __asan_handle_no_return() {}

// And those of its undefined-behaviour sanitizer.
#define MSL_UNDEFINED(check, kind, text) \
  MSL_EXPORT void __ubsan_handle_##check##_minimal_abort() { fault(kind, MSL_CALLER, text); }
MSL_UNDEFINED(out_of_bounds, "out of bounds", "indexes an array beyond its end")
MSL_UNDEFINED(add_overflow, "overflow", "a signed addition overflows")
MSL_UNDEFINED(sub_overflow, "overflow", "a signed subtraction overflows")
MSL_UNDEFINED(mul_overflow, "overflow", "a signed multiplication overflows")
MSL_UNDEFINED(negate_overflow, "overflow", "a signed negation overflows")
MSL_UNDEFINED(shift_out_of_bounds, "overflow", "shifts by as many bits as the number has, or more")
MSL_UNDEFINED(divrem_overflow, "division", "divides by zero, or the quotient overflows")

// Runs `l` to its end or first fault.
MSL_EXPORT void msl_launch(Launch* l) {
  launch = l;
  if (!stacks) stacks = reserve_stacks(max_threads);
  if (!stacks || !reserve_memory()) {
    l->fault_kind = "memory";
    snprintf(l->fault, sizeof(l->fault), "cannot reserve address space");
    return;
  }
  Dl_info info;
  dladdr((void*)l->entry, &info);
  image_base = (uintptr_t)info.dli_fbase;
  random_state = l->schedule;
  deadline = now() + l->max_seconds;
  threadgroup_number = 0;
  for (unsigned i = 0; i < l->num_buffers; i++) {
    map_buffer(i, l->buffers[i]);
    buffer_pointers[i] = buffers[i].begin;
  }
  run_grid();
  running = nullptr;
  for (unsigned i = 0; i < l->num_buffers; i++) unmap_buffer(i, l->buffers[i]);
  for (unsigned i = 0; i <= max_buffers; i++) buffers[i] = {};
  forget_variables();
}

}  // namespace msl
