// Relaxed atomics, the only memory order that Metal has for them.
#pragma once
#include "math.h"

namespace metal {

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;

template <class T>
MSL_INLINE T atomic_load_explicit(const volatile atomic<T>* object, memory_order) {
  T value;
  msl::msl_atomic_load(object, &value, sizeof(T));
  return value;
}
template <class T, class U>
MSL_INLINE void atomic_store_explicit(volatile atomic<T>* object, U desired, memory_order) {
  const T value = T(desired);
  msl::msl_atomic_store(object, &value, sizeof(T));
}
// No other thread runs between the load and the store: threads change only at collectives.
#define MSL_ATOMIC(name, expression)                                             \
  template <class T, class U>                                                    \
  MSL_INLINE T name(volatile atomic<T>* object, U operand, memory_order order) { \
    const T old = atomic_load_explicit(object, order), by = T(operand);          \
    atomic_store_explicit(object, T(expression), order);                         \
    return old;                                                                  \
  }
MSL_ATOMIC(atomic_exchange_explicit, by)
MSL_ATOMIC(atomic_fetch_add_explicit, old + by)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - by)
MSL_ATOMIC(atomic_fetch_max_explicit, max(old, by))
MSL_ATOMIC(atomic_fetch_min_explicit, min(old, by))
MSL_ATOMIC(atomic_fetch_and_explicit, old & by)
MSL_ATOMIC(atomic_fetch_or_explicit, old | by)
MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ by)
#undef MSL_ATOMIC

template <class T>
MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* object, T* expected,
                                                      T desired, memory_order order,
                                                      memory_order) {
  const T old = atomic_load_explicit(object, order);
  if (old == *expected) {
    atomic_store_explicit(object, desired, order);
    return true;
  }
  *expected = old;
  return false;
}

}  // namespace metal
