// The kernel's memory: where buffers and threadgroup variables lie, who touched which byte when.
#pragma once
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "order.h"

namespace msl {

// Each buffer lies in the middle of an address range of its own, so that an index that is wrong by
// gigabytes still tells which buffer it was meant for. Threadgroup variables likewise, in small.
constexpr unsigned widest_buffer_window = 36, narrowest_buffer_window = 31;  // powers of two
constexpr size_t variable_window = 128 << 10;
constexpr size_t variables_span = variable_window * max_variables;
constexpr size_t page_bytes = 16 << 10;

struct Region {
  const char* name;
  char* begin;
  size_t bytes;
  Kind kind;
  Traffic* traffic;
  Shadow* shadows;         // outputs and variables
  uint8_t* loaded;         // inputs: 1 where a byte was loaded
  const uint8_t* written;  // inputs: null or 0 where no kernel wrote

  bool is_variable() const { return kind == Kind::variable; }
};

static char* reservation;
static unsigned buffer_window;  // as a power of two
static size_t buffers_span;
static Region buffers[max_buffers + 1];
static Region variables[max_variables];
static size_t threadgroup_bytes;

// Only addresses: memory is taken up when a buffer is mapped.
inline bool reserve_memory() {
  if (reservation) return true;
  for (buffer_window = widest_buffer_window; buffer_window >= narrowest_buffer_window;
       buffer_window--) {
    buffers_span = size_t(max_buffers + 1) << buffer_window;
    void* base = mmap(nullptr, buffers_span + variables_span, PROT_NONE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) continue;
    reservation = (char*)base;
    return mprotect(reservation + buffers_span, variables_span, PROT_READ | PROT_WRITE) == 0;
  }
  return false;
}

inline size_t whole_pages(size_t bytes) { return (bytes + page_bytes) / page_bytes * page_bytes; }

inline void map_buffer(unsigned index, Buffer& buffer) {
  Region& region = buffers[index];
  region = {};
  region.name = buffer.name;
  region.begin = reservation + (size_t(2 * index + 1) << (buffer_window - 1));
  region.bytes = buffer.bytes;
  region.kind = buffer.kind;
  region.traffic = &buffer.traffic;
  mprotect(region.begin, whole_pages(buffer.bytes), PROT_READ | PROT_WRITE);
  memcpy(region.begin, buffer.data, buffer.bytes);
  if (buffer.kind == Kind::input) {
    region.loaded = (uint8_t*)calloc(buffer.bytes + 1, 1);
    region.written = buffer.written;
  } else {
    region.shadows = (Shadow*)calloc(buffer.bytes + 1, sizeof(Shadow));
  }
}

inline void unmap_buffer(unsigned index, Buffer& buffer) {
  Region& region = buffers[index];
  if (region.kind == Kind::input) {
    for (size_t i = 0; i < region.bytes; i++)
      buffer.traffic.distinct_bytes_loaded += region.loaded[i];
  } else {
    memcpy(buffer.data, region.begin, buffer.bytes);
    for (size_t i = 0; i < region.bytes; i++) {
      buffer.traffic.distinct_bytes_loaded += region.shadows[i].load != 0;
      buffer.traffic.distinct_bytes_stored += region.shadows[i].store != 0;
      if (buffer.written) buffer.written[i] = region.shadows[i].store != 0;
    }
  }
  free(region.loaded);
  free(region.shadows);
  mmap(region.begin, whole_pages(region.bytes), PROT_NONE,
       MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// Gives a threadgroup variable its place at its first use in a launch.
inline char* place_variable(unsigned id, const char* name, size_t bytes, uintptr_t pc) {
  if (id >= max_variables) fault("limit", pc, "more than %u threadgroup variables", max_variables);
  Region& region = variables[id];
  if (region.begin) return region.begin;
  threadgroup_bytes += (bytes + 15) / 16 * 16;
  if (threadgroup_bytes > max_threadgroup_bytes)
    fault("limit", pc, "threadgroup memory of %zu bytes with `%s`, the limit is %zu",
          threadgroup_bytes, name, max_threadgroup_bytes);
  Variable& variable = launch->variables[launch->num_variables++];
  variable.name = name;
  variable.bytes = bytes;
  region.name = name;
  region.begin = reservation + buffers_span + id * variable_window + variable_window / 4;
  region.bytes = bytes;
  region.kind = Kind::variable;
  region.traffic = &variable.traffic;
  region.shadows = (Shadow*)calloc(bytes + 1, sizeof(Shadow));
  return region.begin;
}

inline void forget_variables() {
  for (unsigned i = 0; i < max_variables; i++) {
    free(variables[i].shadows);
    variables[i] = {};
  }
  threadgroup_bytes = 0;
}

enum class Access { load, store, atomic_load, atomic_store };
inline bool is_store(Access access) {
  return access == Access::store || access == Access::atomic_store;
}
inline bool is_atomic(Access access) {
  return access == Access::atomic_load || access == Access::atomic_store;
}

__attribute__((noinline)) inline void race(const Region& region, size_t offset, Access access,
                                           const char* earlier, Stamp stamp, uint32_t threadgroup,
                                           uintptr_t pc) {
  char other[80];
  if (threadgroup != threadgroup_number)
    snprintf(other, sizeof(other), "threadgroup number %u", threadgroup - 1);
  else if (by_of(stamp) == By::thread)
    snprintf(other, sizeof(other), "thread %u", thread_of(stamp));
  else snprintf(other, sizeof(other), "several threads");
  fault("race", pc, "%s byte %zu of `%s`, which %s %s with no barrier between",
        is_store(access) ? "stores" : "loads", offset, region.name, other, earlier);
}

// Checks and notes one byte of an output or a threadgroup variable.
inline void touch(Region& region, size_t offset, Access access, uintptr_t pc) {
  Shadow& shadow = region.shadows[offset];
  const Space space = region.is_variable() ? threadgroup_space : device_space;
  if (shadow.threadgroup != threadgroup_number) {
    // Threadgroup memory begins anew; to device memory no other threadgroup is ordered.
    if (!region.is_variable() && !is_atomic(access)) {
      if (shadow.store)
        race(region, offset, access, "stored", shadow.store, shadow.threadgroup, pc);
      if (shadow.load && is_store(access))
        race(region, offset, access, "loaded", shadow.load, shadow.threadgroup, pc);
    }
    shadow.threadgroup = threadgroup_number;
    if (region.is_variable() || !is_atomic(access)) shadow.store = shadow.load = 0;
  }
  if (!is_store(access) && !shadow.store && region.kind != Kind::initialised_output)
    fault("uninitialised", pc, "loads byte %zu of `%s`, which nothing has written", offset,
          region.name);
  const bool both_atomic =
      is_atomic(access) && (!shadow.store || by_of(shadow.store) == By::atomic);
  if (!both_atomic) {
    if (shadow.store && !comes_after(shadow.store, space))
      race(region, offset, access, "stored", shadow.store, shadow.threadgroup, pc);
    if (is_store(access) && shadow.load && !comes_after(shadow.load, space))
      race(region, offset, access, "loaded", shadow.load, shadow.threadgroup, pc);
  }
  const By by = is_atomic(access) ? By::atomic : By::thread;
  const Stamp stamp = make_stamp(barrier_clock, running->index, by);
  if (is_store(access)) {
    shadow.store = stamp;
  } else if (!is_atomic(access)) {
    const bool alone = !shadow.load || comes_after(shadow.load, space);
    if (alone) {
      shadow.load = stamp;
    } else {
      const bool same_group = by_of(shadow.load) != By::threadgroup &&
                              thread_of(shadow.load) / simd_width == running->simdgroup;
      shadow.load =
          make_stamp(barrier_clock, running->index, same_group ? By::simdgroup : By::threadgroup);
    }
  }
}

// Tables in the kernel's own image (program-scope constants) may be read.
__attribute__((noinline)) inline bool is_constant_data(uintptr_t address) {
  static uintptr_t known_page;
  if (address / 4096 == known_page) return true;
  Dl_info info;
  if (!dladdr((void*)address, &info) || (uintptr_t)info.dli_fbase != image_base) return false;
  known_page = address / 4096;
  return true;
}

__attribute__((noinline)) inline void outside(uintptr_t address, size_t bytes, Access access,
                                              uintptr_t pc) {
  const char* verb = is_store(access) ? "stores" : "loads";
  if (is_constant_data(address)) {
    if (is_store(access)) fault("write to input", pc, "stores to program-scope memory");
    return;
  }
  if (address < 4096)
    fault("out of bounds", pc, "%s %zu bytes through a null pointer", verb, bytes);
  fault("out of bounds", pc,
        "%s %zu bytes at an address in no buffer or threadgroup variable, nor on its own stack",
        verb, bytes);
}

__attribute__((noinline)) inline void out_of_bounds(const Region& region, intptr_t offset,
                                                    size_t bytes, Access access, uintptr_t pc) {
  fault("out of bounds", pc, "%s %zu bytes at byte %zd of `%s`, which has %zu bytes",
        is_store(access) ? "stores" : "loads", bytes, offset, region.name, region.bytes);
}

inline Region* region_at(uintptr_t address) {
  size_t offset = address - (uintptr_t)reservation;
  Region* region = nullptr;
  if (offset < buffers_span) region = &buffers[offset >> buffer_window];
  else if ((offset -= buffers_span) < variables_span) region = &variables[offset / variable_window];
  return region && region->begin ? region : nullptr;
}

// Every load and store of the kernel comes through here. `alignment` 1 is for accesses that the
// compiler knows to be packed.
inline void check_access(uintptr_t address, size_t bytes, size_t alignment, Access access,
                         uintptr_t pc) {
  if (!running || address - (uintptr_t)running->stack < stack_bytes) return;
  Region* region = region_at(address);
  if (!region) return outside(address, bytes, access, pc);
  const size_t offset = address - (uintptr_t)region->begin;
  if (offset + bytes > region->bytes || offset > region->bytes)
    out_of_bounds(*region, intptr_t(offset), bytes, access, pc);
  if (address & (alignment - 1))
    fault("misaligned", pc, "%s %zu bytes at byte %zu of `%s`, not a multiple of %zu",
          is_store(access) ? "stores" : "loads", bytes, offset, region->name, alignment);

  const size_t width = bytes < max_access_bytes ? bytes : max_access_bytes;
  if (is_store(access)) region->traffic->stores[width]++;
  else region->traffic->loads[width]++;
  if (access == Access::atomic_store) region->traffic->atomics++;
  if (region->kind == Kind::input) {
    if (is_store(access)) fault("write to input", pc, "stores to the input `%s`", region->name);
    if (region->written)
      for (size_t i = offset; i < offset + bytes; i++)
        if (!region->written[i])
          fault("uninitialised", pc,
                "loads byte %zu of `%s`, which its kernel left unwritten or lies between elements",
                i, region->name);
    memset(region->loaded + offset, 1, bytes);
    return;
  }
  for (size_t i = offset; i < offset + bytes; i++) touch(*region, i, access, pc);
}

}  // namespace msl
