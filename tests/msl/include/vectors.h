// vec<T, N> with its swizzles. A whole vector is loaded and stored in one access.
#pragma once
#include "types.h"

namespace metal {

template <class T, int N> struct vec;

// How a vector lies in memory: the compiler's own vector of something it knows.
template <class T> struct native_lane { typedef T type; };
template <> struct native_lane<bfloat> { typedef uint16_t type; };
template <> struct native_lane<bool> { typedef uint8_t type; };
template <class T, int N> struct native_vector {
  typedef typename native_lane<T>::type type __attribute__((ext_vector_type(N)));
};
template <class T> constexpr bool is_native = __is_same(typename native_lane<T>::type, T);

// v.zx and the like: the chosen lanes I of a vector of N, readable and assignable.
template <class T, int N, int... I> struct swizzle {
  typedef vec<T, sizeof...(I)> value_type;
  T lanes[N == 3 ? 4 : N];

  MSL_INLINE operator value_type() const { return value_type(lanes[I]...); }
  MSL_INLINE swizzle& operator=(const value_type& value) {
    int next = 0;
    ((lanes[I] = value.lanes[next++]), ...);
    return *this;
  }
  MSL_INLINE swizzle& operator=(const swizzle& other) { return *this = value_type(other); }
};

// The vector that V is or stands for; no type for anything else.
template <class V> struct vector_type {};
template <class T, int N> struct vector_type<vec<T, N>> {
  typedef vec<T, N> type;
  typedef T element;
  static constexpr int size = N;
};
template <class T, int N, int... I>
struct vector_type<swizzle<T, N, I...>> : vector_type<vec<T, sizeof...(I)>> {};
template <class V> using vector_of = typename vector_type<V>::type;
template <class V> using element_of = typename vector_type<V>::element;
template <class V> constexpr int size_of = vector_type<V>::size;

namespace lane { enum { x, y, z, w }; }
#define MSL_SWIZZLE2(a, b) swizzle<T, N, lane::a, lane::b> a##b;
#define MSL_SWIZZLE3(a, b, c) swizzle<T, N, lane::a, lane::b, lane::c> a##b##c;
#define MSL_SWIZZLE4(a, b, c, d) swizzle<T, N, lane::a, lane::b, lane::c, lane::d> a##b##c##d;
#define MSL_EACH2(f, ...) f(__VA_ARGS__, x) f(__VA_ARGS__, y)
#define MSL_EACH3(f, ...) MSL_EACH2(f, __VA_ARGS__) f(__VA_ARGS__, z)
#define MSL_EACH4(f, ...) MSL_EACH3(f, __VA_ARGS__) f(__VA_ARGS__, w)
#define MSL_TRIPLES3(a, b) MSL_EACH3(MSL_SWIZZLE3, a, b)
#define MSL_TRIPLES4(a, b) MSL_EACH4(MSL_SWIZZLE3, a, b)
#define MSL_SWIZZLES2 MSL_EACH2(MSL_SWIZZLE2, x) MSL_EACH2(MSL_SWIZZLE2, y)
#define MSL_SWIZZLES3 \
  MSL_EACH3(MSL_SWIZZLE2, x) MSL_EACH3(MSL_SWIZZLE2, y) MSL_EACH3(MSL_SWIZZLE2, z)
#define MSL_SWIZZLES4                                   \
  MSL_EACH4(MSL_SWIZZLE2, x) MSL_EACH4(MSL_SWIZZLE2, y) \
  MSL_EACH4(MSL_SWIZZLE2, z) MSL_EACH4(MSL_SWIZZLE2, w)
// Of three lanes: every order. Of four: the rotations and reversals that kernels use.
#define MSL_ORDERS3                                                 \
  MSL_SWIZZLE3(x, y, z) MSL_SWIZZLE3(x, z, y) MSL_SWIZZLE3(y, x, z) \
  MSL_SWIZZLE3(y, z, x) MSL_SWIZZLE3(z, x, y) MSL_SWIZZLE3(z, y, x) \
  MSL_SWIZZLE3(x, x, x) MSL_SWIZZLE3(y, y, y) MSL_SWIZZLE3(z, z, z)
#define MSL_ORDERS4                                                          \
  MSL_ORDERS3 MSL_SWIZZLE3(y, z, w) MSL_SWIZZLE3(w, w, w)                    \
  MSL_SWIZZLE4(x, y, z, w) MSL_SWIZZLE4(w, z, y, x)                          \
  MSL_SWIZZLE4(y, z, w, x) MSL_SWIZZLE4(z, w, x, y) MSL_SWIZZLE4(w, x, y, z) \
  MSL_SWIZZLE4(y, x, w, z) MSL_SWIZZLE4(x, z, y, w) MSL_SWIZZLE4(x, x, y, y) \
  MSL_SWIZZLE4(z, z, w, w) MSL_SWIZZLE4(x, y, x, y) MSL_SWIZZLE4(z, w, z, w) \
  MSL_SWIZZLE4(x, x, x, x) MSL_SWIZZLE4(y, y, y, y)                          \
  MSL_SWIZZLE4(z, z, z, z) MSL_SWIZZLE4(w, w, w, w)

template <class T, int Lanes> struct vec_storage;
template <class T> struct vec_storage<T, 2> {
  static constexpr int N = 2;
  union {
    typename native_vector<T, 2>::type native;
    T lanes[2];
    struct { T x, y; };
    MSL_SWIZZLES2
  };
};
template <class T> struct vec_storage<T, 3> {
  static constexpr int N = 3;
  union {
    typename native_vector<T, 3>::type native;
    T lanes[4];
    struct { T x, y, z; };
    MSL_SWIZZLES3 MSL_ORDERS3
  };
};
template <class T> struct vec_storage<T, 4> {
  static constexpr int N = 4;
  union {
    typename native_vector<T, 4>::type native;
    T lanes[4];
    struct { T x, y, z, w; };
    MSL_SWIZZLES4 MSL_ORDERS4
  };
};

template <class T, int N> struct vec : vec_storage<T, N> {
  using vec_storage<T, N>::lanes;
  using vec_storage<T, N>::native;

  vec() = default;
  MSL_INLINE vec(const vec& other) { native = other.native; }
  MSL_INLINE vec& operator=(const vec& other) {
    native = other.native;
    return *this;
  }
  MSL_INLINE vec(T value) {
    for (int i = 0; i < N; i++) lanes[i] = value;
  }
  template <class U, class = enable_if_t<is_scalar<U> && !__is_convertible(U, T)>>
  MSL_INLINE explicit vec(U value) : vec(T(value)) {}
  template <class U, class = enable_if_t<!__is_same(U, T)>>
  MSL_INLINE explicit vec(const vec<U, N>& other) {
    const vec<U, N> loaded(other);  // one access, then lane by lane
    if constexpr (is_native<T> && is_native<U>)
      native = __builtin_convertvector(loaded.native, decltype(native));
    else
      for (int i = 0; i < N; i++) lanes[i] = T(loaded.lanes[i]);
  }
  template <class U, int M, int... I, class = enable_if_t<sizeof...(I) == N && !__is_same(U, T)>>
  MSL_INLINE explicit vec(const swizzle<U, M, I...>& other) : vec(vec<U, N>(other)) {}
  // vec(float2, 1.0f, x): scalars and vectors in a row.
  template <class A, class B, class... More>
  MSL_INLINE vec(const A& a, const B& b, const More&... more) {
    static_assert(count<A>() + count<B>() + (0 + ... + count<More>()) == N,
                  "a vector needs exactly as many values as it has lanes");
    int next = 0;
    append(next, a);
    append(next, b);
    (append(next, more), ...);
  }

  MSL_INLINE T& operator[](int i) { return lanes[i]; }
  MSL_INLINE const T& operator[](int i) const { return lanes[i]; }

 private:
  template <class A> static constexpr int count() {
    if constexpr (is_scalar<A>) return 1;
    else return size_of<A>;
  }
  template <class A> MSL_INLINE void append(int& next, const A& value) {
    if constexpr (is_scalar<A>) {
      lanes[next++] = T(value);
    } else {
      const vector_of<A> all = value;
      for (int i = 0; i < size_of<A>; i++) lanes[next++] = T(all.lanes[i]);
    }
  }
};

// The type in which `a op b` is computed: at least one of them a vector, a scalar taking the
// vector's element type.
template <class A, class B, bool = !is_scalar<A>, bool = !is_scalar<B>> struct operand_type {};
template <class A, class B>
struct operand_type<A, B, true, true>
    : enable_if<__is_same(vector_of<A>, vector_of<B>), vector_of<A>> {};
template <class A, class B> struct operand_type<A, B, true, false> : vector_type<A> {};
template <class A, class B> struct operand_type<A, B, false, true> : vector_type<B> {};
template <class A, class B> using operand_vector = typename operand_type<A, B>::type;

template <class V, class A> MSL_INLINE V widen(const A& value) {
  if constexpr (is_scalar<A>) return V(element_of<V>(value));
  else return V(value);
}

#define MSL_OPERATOR(op)                                                                 \
  template <class A, class B, class V = operand_vector<A, B>>                            \
  MSL_INLINE V operator op(const A& a, const B& b) {                                     \
    const V left = widen<V>(a), right = widen<V>(b);                                     \
    V result;                                                                            \
    if constexpr (is_native<element_of<V>>) result.native = left.native op right.native; \
    else for (int i = 0; i < size_of<V>; i++) result[i] = left[i] op right[i];           \
    return result;                                                                       \
  }                                                                                      \
  template <class A, class B, class V = operand_vector<A, B>, class = vector_of<A>>      \
  MSL_INLINE A& operator op##=(A& a, const B& b) {                                       \
    a = a op b;                                                                          \
    return a;                                                                            \
  }
MSL_OPERATOR(+)
MSL_OPERATOR(-)
MSL_OPERATOR(*)
MSL_OPERATOR(/)
MSL_OPERATOR(%)
MSL_OPERATOR(&)
MSL_OPERATOR(|)
MSL_OPERATOR(^)
MSL_OPERATOR(<<)
MSL_OPERATOR(>>)
#undef MSL_OPERATOR

#define MSL_COMPARISON(op)                                                \
  template <class A, class B, class V = operand_vector<A, B>>             \
  MSL_INLINE vec<bool, size_of<V>> operator op(const A& a, const B& b) {  \
    const V left = widen<V>(a), right = widen<V>(b);                      \
    vec<bool, size_of<V>> result;                                         \
    for (int i = 0; i < size_of<V>; i++) result[i] = left[i] op right[i]; \
    return result;                                                        \
  }
MSL_COMPARISON(==)
MSL_COMPARISON(!=)
MSL_COMPARISON(<)
MSL_COMPARISON(>)
MSL_COMPARISON(<=)
MSL_COMPARISON(>=)
MSL_COMPARISON(&&)
MSL_COMPARISON(||)
#undef MSL_COMPARISON

#define MSL_PREFIX(op)                                            \
  template <class A, class V = vector_of<A>>                      \
  MSL_INLINE V operator op(const A& a) {                          \
    const V value = a;                                            \
    V result;                                                     \
    for (int i = 0; i < size_of<V>; i++) result[i] = op value[i]; \
    return result;                                                \
  }
MSL_PREFIX(-)
MSL_PREFIX(~)
MSL_PREFIX(!)
#undef MSL_PREFIX

// packed_float4 and the like: aligned as one element, otherwise a vec.
template <class T, int N> struct packed_vec {
  T lanes[N];
  packed_vec() = default;
  MSL_INLINE packed_vec(const vec<T, N>& value) {
    for (int i = 0; i < N; i++) lanes[i] = value[i];
  }
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> value;
    for (int i = 0; i < N; i++) value[i] = lanes[i];
    return value;
  }
  MSL_INLINE T& operator[](int i) { return lanes[i]; }
  MSL_INLINE const T& operator[](int i) const { return lanes[i]; }
};
template <class T, int N> struct vector_type<packed_vec<T, N>> : vector_type<vec<T, N>> {};

#define MSL_VECTORS(type)                       \
  typedef vec<type, 2> type##2;                 \
  typedef vec<type, 3> type##3;                 \
  typedef vec<type, 4> type##4;                 \
  typedef packed_vec<type, 2> packed_##type##2; \
  typedef packed_vec<type, 3> packed_##type##3; \
  typedef packed_vec<type, 4> packed_##type##4;
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
typedef vec<bool, 2> bool2;
typedef vec<bool, 3> bool3;
typedef vec<bool, 4> bool4;

// The bits of a scalar or vector, read as another of the same size.
template <class To, class From> MSL_INLINE To as_type(const From& from) {
  if constexpr (is_scalar<From>) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
  } else {
    const vector_of<From> value = from;
    static_assert(sizeof(To) == sizeof(value), "as_type needs two types of one size");
    To to;
    __builtin_memcpy(&to, &value, sizeof(to));
    return to;
  }
}

}  // namespace metal
