// Barriers, SIMD-group functions and 8x8 matrices: everything for which lanes wait for each other.
#pragma once
#include "math.h"

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(uint(a) | uint(b));
}
MSL_INLINE MSL_CONVERGENT void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::msl_barrier(msl::Scope::threadgroup, site, uint(flags));
}
MSL_INLINE MSL_CONVERGENT void simdgroup_barrier(mem_flags flags, MSL_SITE) {
  msl::msl_barrier(msl::Scope::simdgroup, site, uint(flags));
}

// Reductions: pairs 16 apart, then 8, 4, 2, 1; lanes that have returned are left out.
template <class T, class Operation> MSL_UNCHECKED const char* reduce(msl::Exchange& exchange) {
  T value[msl::simd_width];
  bool present[msl::simd_width];
  for (unsigned i = 0; i < msl::simd_width; i++) {
    present[i] = exchange.is_active(i);
    if (present[i]) value[i] = exchange.at<T>(i);
  }
  for (unsigned step = msl::simd_width / 2; step; step /= 2)
    for (unsigned i = 0; i < step; i++) {
      if (!present[i + step]) continue;
      value[i] = present[i] ? Operation::apply(value[i], value[i + step]) : value[i + step];
      present[i] = true;
    }
  for (unsigned i = 0; i < msl::simd_width; i++) exchange.at<T>(i) = value[0];
  return nullptr;
}
#define MSL_REDUCTION(name, operation, expression)                             \
  struct operation {                                                           \
    template <class T> static MSL_INLINE T apply(const T& a, const T& b) {     \
      return T(expression);                                                    \
    }                                                                          \
  };                                                                           \
  template <class T> MSL_INLINE MSL_CONVERGENT T name(T value, MSL_SITE) {     \
    msl::msl_collective(#name, site, &value, sizeof(T), reduce<T, operation>); \
    return value;                                                              \
  }
MSL_REDUCTION(simd_sum, add_lanes, a + b)
MSL_REDUCTION(simd_product, multiply_lanes, a * b)
MSL_REDUCTION(simd_max, max_lanes, max(a, b))
MSL_REDUCTION(simd_min, min_lanes, min(a, b))
MSL_REDUCTION(simd_and, and_lanes, a & b)
MSL_REDUCTION(simd_or, or_lanes, a | b)
MSL_REDUCTION(simd_xor, xor_lanes, a ^ b)
MSL_REDUCTION(simd_all, all_lanes, a && b)
MSL_REDUCTION(simd_any, any_lanes, a || b)
#undef MSL_REDUCTION

template <class T, bool Inclusive> MSL_UNCHECKED const char* scan(msl::Exchange& exchange) {
  T sum = T(0);
  for (unsigned i = 0; i < msl::simd_width; i++) {
    if (!exchange.is_active(i)) continue;
    const T before = sum;
    sum = T(sum + exchange.at<T>(i));
    exchange.at<T>(i) = Inclusive ? sum : before;
  }
  return nullptr;
}
template <class T> MSL_INLINE MSL_CONVERGENT T simd_prefix_inclusive_sum(T value, MSL_SITE) {
  msl::msl_collective("simd_prefix_inclusive_sum", site, &value, sizeof(T), scan<T, true>);
  return value;
}
template <class T> MSL_INLINE MSL_CONVERGENT T simd_prefix_exclusive_sum(T value, MSL_SITE) {
  msl::msl_collective("simd_prefix_exclusive_sum", site, &value, sizeof(T), scan<T, false>);
  return value;
}

// Shuffles: every lane brings a value and the lane it wants to read. Beyond the group it keeps
// its own value.
template <class T> struct shuffled {
  T value;
  int source;
};
template <class T> MSL_UNCHECKED const char* shuffle(msl::Exchange& exchange) {
  static_assert(sizeof(shuffled<T>) <= msl::lane_bytes, "too large a type for a shuffle");
  T value[msl::simd_width];
  for (unsigned i = 0; i < msl::simd_width; i++)
    if (exchange.is_active(i)) value[i] = exchange.at<shuffled<T>>(i).value;
  for (unsigned i = 0; i < msl::simd_width; i++) {
    if (!exchange.is_active(i)) continue;
    shuffled<T>& mine = exchange.at<shuffled<T>>(i);
    if (mine.source < 0 || mine.source >= int(msl::simd_width)) continue;
    if (!exchange.is_active(mine.source)) return "reads a lane that has returned";
    mine.value = value[mine.source];
  }
  return nullptr;
}
#define MSL_SHUFFLE(name, source)                                                     \
  template <class T> MSL_INLINE MSL_CONVERGENT T name(T value, ushort by, MSL_SITE) { \
    shuffled<T> exchanged = {value, source};                                          \
    msl::msl_collective(#name, site, &exchanged, sizeof(exchanged), shuffle<T>);      \
    return exchanged.value;                                                           \
  }
MSL_SHUFFLE(simd_shuffle, int(by))
MSL_SHUFFLE(simd_broadcast, int(by))
MSL_SHUFFLE(simd_shuffle_xor, int(msl::msl_lane() ^ by))
MSL_SHUFFLE(simd_shuffle_down, int(msl::msl_lane()) + by)
MSL_SHUFFLE(simd_shuffle_up, int(msl::msl_lane()) - by)
MSL_SHUFFLE(simd_shuffle_rotate_down, int((msl::msl_lane() + by) % msl::simd_width))
MSL_SHUFFLE(simd_shuffle_rotate_up, int((msl::msl_lane() - by) % msl::simd_width))
MSL_SHUFFLE(quad_shuffle, int(msl::msl_lane() / 4 * 4 + by % 4))
MSL_SHUFFLE(quad_broadcast, int(msl::msl_lane() / 4 * 4 + by % 4))
MSL_SHUFFLE(quad_shuffle_xor, int(msl::msl_lane() ^ (by & 3)))
#undef MSL_SHUFFLE
template <class T> MSL_UNCHECKED const char* take_first(msl::Exchange& exchange) {
  const T first = exchange.at<T>(__builtin_ctz(exchange.active));
  for (unsigned i = 0; i < msl::simd_width; i++) exchange.at<T>(i) = first;
  return nullptr;
}
template <class T> MSL_INLINE MSL_CONVERGENT T simd_broadcast_first(T value, MSL_SITE) {
  msl::msl_collective("simd_broadcast_first", site, &value, sizeof(T), take_first<T>);
  return value;
}

// An 8x8 matrix spread over a SIMD group, two neighbours of one row in each lane. The map from
// lane to element is not documented by Apple; kernels that use thread_elements() rely on this one.
MSL_INLINE unsigned matrix_row(unsigned lane) { return (lane / 4 & 4) + lane / 2 % 4; }
MSL_INLINE unsigned matrix_column(unsigned lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

template <class T, int Rows = 8, int Columns = 8> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix is 8 by 8");
  typedef vec<T, 2> storage_type;

  simdgroup_matrix() = default;
  // A diagonal matrix, as in Metal.
  MSL_INLINE explicit simdgroup_matrix(T diagonal) {
    const unsigned row = matrix_row(msl::msl_lane()), column = matrix_column(msl::msl_lane());
    for (unsigned j = 0; j < 2; j++) elements[j] = row == column + j ? diagonal : T(0);
  }
  MSL_INLINE storage_type& thread_elements() { return elements; }
  MSL_INLINE const storage_type& thread_elements() const { return elements; }

 private:
  storage_type elements;
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;

template <class T, int Rows = 8, int Columns = 8>
MSL_INLINE simdgroup_matrix<T> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T> filled;
  filled.thread_elements() = vec<T, 2>(value);
  return filled;
}

// Loading and storing are collective too, though each lane sees to its own elements.
MSL_UNCHECKED inline const char* require_all_lanes(msl::Exchange& exchange) {
  return exchange.active == 0xffffffffu ? nullptr : "needs all 32 lanes";
}
MSL_INLINE MSL_CONVERGENT void meet_all_lanes(const char* name, msl::Site site) {
  msl::msl_collective(name, site, nullptr, 0, require_all_lanes);
}

template <class T>
MSL_INLINE MSL_CONVERGENT void simdgroup_load(simdgroup_matrix<T>& matrix, const T* source,
                                              ulong row_elements = 8, ulong2 origin = ulong2(0),
                                              bool transpose = false, MSL_SITE) {
  meet_all_lanes("simdgroup_load", site);
  const ulong row = matrix_row(msl::msl_lane()), column = matrix_column(msl::msl_lane());
  for (ulong j = 0; j < 2; j++) {
    const ulong y = transpose ? column + j : row, x = transpose ? row : column + j;
    matrix.thread_elements()[j] = source[(origin.y + y) * row_elements + origin.x + x];
  }
}
template <class T>
MSL_INLINE MSL_CONVERGENT void simdgroup_store(const simdgroup_matrix<T>& matrix, T* destination,
                                               ulong row_elements = 8, ulong2 origin = ulong2(0),
                                               bool transpose = false, MSL_SITE) {
  meet_all_lanes("simdgroup_store", site);
  const ulong row = matrix_row(msl::msl_lane()), column = matrix_column(msl::msl_lane());
  for (ulong j = 0; j < 2; j++) {
    const ulong y = transpose ? column + j : row, x = transpose ? row : column + j;
    destination[(origin.y + y) * row_elements + origin.x + x] = matrix.thread_elements()[j];
  }
}

// One lane's share of D = A B + C.
template <class D, class A, class B, class C> struct product {
  A a[2];
  B b[2];
  C c[2];
  D d[2];
};
template <class D, class A, class B, class C>
MSL_UNCHECKED const char* multiply(msl::Exchange& exchange) {
  typedef float row8 __attribute__((ext_vector_type(8)));
  if (exchange.active != 0xffffffffu) return "needs all 32 lanes";
  float left[8][8];
  row8 right[8], sum[8];
  for (unsigned i = 0; i < msl::simd_width; i++) {
    const auto& share = exchange.at<product<D, A, B, C>>(i);
    const unsigned row = matrix_row(i), column = matrix_column(i);
    for (unsigned j = 0; j < 2; j++) {
      left[row][column + j] = float(share.a[j]);
      right[row][column + j] = float(share.b[j]);
      sum[row][column + j] = float(share.c[j]);
    }
  }
  for (unsigned row = 0; row < 8; row++)
    for (unsigned k = 0; k < 8; k++) sum[row] += left[row][k] * right[k];
  for (unsigned i = 0; i < msl::simd_width; i++)
    for (unsigned j = 0; j < 2; j++)
      exchange.at<product<D, A, B, C>>(i).d[j] = D(sum[matrix_row(i)][matrix_column(i) + j]);
  return nullptr;
}
template <class D, class A, class B, class C>
MSL_INLINE MSL_CONVERGENT void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d,
                                                             const simdgroup_matrix<A>& a,
                                                             const simdgroup_matrix<B>& b,
                                                             const simdgroup_matrix<C>& c,
                                                             MSL_SITE) {
  product<D, A, B, C> share;
  for (int j = 0; j < 2; j++) {
    share.a[j] = a.thread_elements()[j];
    share.b[j] = b.thread_elements()[j];
    share.c[j] = c.thread_elements()[j];
  }
  msl::msl_collective("simdgroup_multiply_accumulate", site, &share, sizeof(share),
                      multiply<D, A, B, C>);
  for (int j = 0; j < 2; j++) d.thread_elements()[j] = share.d[j];
}
template <class D, class A, class B>
MSL_INLINE MSL_CONVERGENT void simdgroup_multiply(simdgroup_matrix<D>& d,
                                                  const simdgroup_matrix<A>& a,
                                                  const simdgroup_matrix<B>& b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D>(D(0)), site);
}

}  // namespace metal
