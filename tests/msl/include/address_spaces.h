// The second reading of a kernel: address spaces that do not convert into each other, and for the
// rest declarations that take anything, since the first reading has checked the types. Nothing of
// this is ever compiled.
#pragma once

typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t, ptrdiff_t;
typedef unsigned long uint64_t, ulong, size_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
#define METAL_FUNC inline

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define MSL_VECTORS(type)                                                        \
  typedef vec<type, 2> type##2;                                                  \
  typedef vec<type, 3> type##3;                                                  \
  typedef vec<type, 4> type##4;                                                  \
  typedef type packed_##type##2 __attribute__((ext_vector_type(2), aligned(1))); \
  typedef type packed_##type##3 __attribute__((ext_vector_type(3), aligned(1))); \
  typedef type packed_##type##4 __attribute__((ext_vector_type(4), aligned(1)));
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
#undef MSL_VECTORS
// What a comparison of vectors gives, in every width.
struct bool_vector {
  template <class V> bool_vector(V);
  bool operator[](int) const;
  bool x, y, z, w;
};
typedef bool_vector bool2, bool3, bool4;

template <bool Condition, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool Condition, class T = void>
using enable_if_t = typename enable_if<Condition, T>::type;
template <bool Condition, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
template <bool Condition, class A, class B>
using conditional_t = typename conditional<Condition, A, B>::type;
template <class A, class B> struct is_same { static constexpr bool value = __is_same(A, B); };
template <class A, class B> constexpr bool is_same_v = __is_same(A, B);
template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T> struct numeric_limits {
  static constexpr T max() { return T(0); }
  static constexpr T min() { return T(0); }
  static constexpr T lowest() { return T(0); }
  static constexpr T epsilon() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};

template <class To, class From> To as_type(From);

// Functions whose result has the type of their first argument.
#define MSL_SAME(name) template <class A, class... B> A name(A, B...);
#define MSL_TRANSCENDENTALS                                                                 \
  MSL_SAME(exp) MSL_SAME(exp2) MSL_SAME(exp10) MSL_SAME(log) MSL_SAME(log2) MSL_SAME(log10) \
  MSL_SAME(sqrt) MSL_SAME(rsqrt) MSL_SAME(sin) MSL_SAME(cos) MSL_SAME(tan) MSL_SAME(sinh)   \
  MSL_SAME(cosh) MSL_SAME(tanh) MSL_SAME(asin) MSL_SAME(acos) MSL_SAME(atan) MSL_SAME(pow)  \
  MSL_SAME(max) MSL_SAME(min) MSL_SAME(fmax) MSL_SAME(fmin)
MSL_TRANSCENDENTALS
namespace fast { MSL_TRANSCENDENTALS }
namespace precise { MSL_TRANSCENDENTALS }
MSL_SAME(floor) MSL_SAME(ceil) MSL_SAME(trunc) MSL_SAME(round) MSL_SAME(rint) MSL_SAME(fract)
MSL_SAME(fabs) MSL_SAME(abs) MSL_SAME(fmod) MSL_SAME(atan2) MSL_SAME(copysign) MSL_SAME(fma)
MSL_SAME(clamp) MSL_SAME(select) MSL_SAME(mix) MSL_SAME(popcount) MSL_SAME(clz) MSL_SAME(ctz)
MSL_SAME(reverse_bits) MSL_SAME(extract_bits) MSL_SAME(rotate)
MSL_SAME(simd_sum) MSL_SAME(simd_product) MSL_SAME(simd_max) MSL_SAME(simd_min)
MSL_SAME(simd_and) MSL_SAME(simd_or) MSL_SAME(simd_xor) MSL_SAME(simd_all) MSL_SAME(simd_any)
MSL_SAME(simd_prefix_inclusive_sum) MSL_SAME(simd_prefix_exclusive_sum)
MSL_SAME(simd_shuffle) MSL_SAME(simd_broadcast) MSL_SAME(simd_shuffle_xor)
MSL_SAME(simd_shuffle_down) MSL_SAME(simd_shuffle_up) MSL_SAME(simd_shuffle_rotate_down)
MSL_SAME(simd_shuffle_rotate_up) MSL_SAME(simd_broadcast_first)
MSL_SAME(quad_shuffle) MSL_SAME(quad_broadcast) MSL_SAME(quad_shuffle_xor)
#undef MSL_TRANSCENDENTALS
#undef MSL_SAME
template <class A> bool isnan(A);
template <class A> bool isinf(A);
template <class A> bool isfinite(A);
bool any(bool_vector);
bool all(bool_vector);
template <class V> struct element;
template <class T, int N> struct element<T __attribute__((ext_vector_type(N)))> { typedef T type; };
template <class V> typename element<V>::type dot(V, V);
template <class V> typename element<V>::type length(V);

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T, int Rows = 8, int Columns = 8> struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
typedef simdgroup_matrix<float> simdgroup_float8x8;
typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
template <class T, int Rows = 8, int Columns = 8>
simdgroup_matrix<T> make_filled_simdgroup_matrix(T);
template <class M, class P>
void simdgroup_load(M&, P, ulong = 8, ulong2 = ulong2(0), bool = false);
template <class M, class P>
void simdgroup_store(M, P, ulong = 8, ulong2 = ulong2(0), bool = false);
template <class D, class A, class B> void simdgroup_multiply(D&, A, B);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(D&, A, B, C);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
#define MSL_ATOMIC(name) \
  template <class P, class... A> auto name(P object, A...)->decltype(object->value);
MSL_ATOMIC(atomic_load_explicit)
MSL_ATOMIC(atomic_store_explicit)
MSL_ATOMIC(atomic_exchange_explicit)
MSL_ATOMIC(atomic_fetch_add_explicit)
MSL_ATOMIC(atomic_fetch_sub_explicit)
MSL_ATOMIC(atomic_fetch_max_explicit)
MSL_ATOMIC(atomic_fetch_min_explicit)
MSL_ATOMIC(atomic_fetch_and_explicit)
MSL_ATOMIC(atomic_fetch_or_explicit)
MSL_ATOMIC(atomic_fetch_xor_explicit)
MSL_ATOMIC(atomic_compare_exchange_weak_explicit)
#undef MSL_ATOMIC

}  // namespace metal

// float4(a, b) is not C++ for a compiler's own vectors: address_space.py writes make<float4>(a, b).
namespace msl {
template <class V, class... A> constexpr V make(A...) { return V(); }
}  // namespace msl

using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
half operator""h(long double);
half operator""h(unsigned long long);

template <class T> struct Limits {
  static constexpr T max = T(0), min = T(0), finite_max = T(0), finite_min = T(0);
};
template <class Index = long, class Shape, class Strides>
Index elem_to_loc(Index, Shape, Strides, int);
template <class T, class U> T ceildiv(T, U);
