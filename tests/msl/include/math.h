// Metal's arithmetic functions. One accurate float implementation each: half and bfloat round its
// result, and fast:: and precise:: are the same functions.
#pragma once
#include "vectors.h"

namespace metal {

// A function of one number, for every floating type and lane by lane for vectors.
#define MSL_FUNCTION1(name, expression)                                              \
  MSL_INLINE float name(float x) { return expression; }                              \
  MSL_INLINE half name(half h) { const float x = h; return half(expression); }       \
  MSL_INLINE bfloat name(bfloat b) { const float x = b; return bfloat(expression); } \
  template <class A, class V = vector_of<A>> MSL_INLINE V name(const A& a) {         \
    const V x = a;                                                                   \
    V result;                                                                        \
    for (int i = 0; i < size_of<V>; i++) result[i] = name(x[i]);                     \
    return result;                                                                   \
  }
#define MSL_TRANSCENDENTALS                       \
  MSL_FUNCTION1(exp, __builtin_expf(x))           \
  MSL_FUNCTION1(exp2, __builtin_exp2f(x))         \
  MSL_FUNCTION1(exp10, __builtin_powf(10.0f, x))  \
  MSL_FUNCTION1(log, __builtin_logf(x))           \
  MSL_FUNCTION1(log2, __builtin_log2f(x))         \
  MSL_FUNCTION1(log10, __builtin_log10f(x))       \
  MSL_FUNCTION1(sqrt, __builtin_sqrtf(x))         \
  MSL_FUNCTION1(rsqrt, 1.0f / __builtin_sqrtf(x)) \
  MSL_FUNCTION1(sin, __builtin_sinf(x))           \
  MSL_FUNCTION1(cos, __builtin_cosf(x))           \
  MSL_FUNCTION1(tan, __builtin_tanf(x))           \
  MSL_FUNCTION1(sinh, __builtin_sinhf(x))         \
  MSL_FUNCTION1(cosh, __builtin_coshf(x))         \
  MSL_FUNCTION1(tanh, __builtin_tanhf(x))         \
  MSL_FUNCTION1(asin, __builtin_asinf(x))         \
  MSL_FUNCTION1(acos, __builtin_acosf(x))         \
  MSL_FUNCTION1(atan, __builtin_atanf(x))
MSL_TRANSCENDENTALS
namespace fast { MSL_TRANSCENDENTALS }
namespace precise { MSL_TRANSCENDENTALS }

MSL_FUNCTION1(floor, __builtin_floorf(x))
MSL_FUNCTION1(ceil, __builtin_ceilf(x))
MSL_FUNCTION1(trunc, __builtin_truncf(x))
MSL_FUNCTION1(round, __builtin_roundf(x))
MSL_FUNCTION1(rint, __builtin_rintf(x))
MSL_FUNCTION1(fract, x - __builtin_floorf(x))
MSL_FUNCTION1(fabs, __builtin_fabsf(x))
MSL_FUNCTION1(abs, __builtin_fabsf(x))
#undef MSL_TRANSCENDENTALS
#undef MSL_FUNCTION1
MSL_INLINE int abs(int x) { return x < 0 ? -x : x; }
MSL_INLINE long abs(long x) { return x < 0 ? -x : x; }
MSL_INLINE short abs(short x) { return x < 0 ? -x : x; }

template <class T> MSL_INLINE enable_if_t<is_scalar<T>, bool> isnan(T x) { return x != x; }
template <class T> MSL_INLINE enable_if_t<is_scalar<T>, bool> isinf(T x) {
  return __builtin_isinf(float(x));
}
template <class T> MSL_INLINE enable_if_t<is_scalar<T>, bool> isfinite(T x) {
  return __builtin_isfinite(float(x));
}

// Functions of two numbers of one type.
#define MSL_FUNCTION2(name, expression)                                       \
  template <class T> MSL_INLINE enable_if_t<is_scalar<T>, T> name(T a, T b) { \
    return expression;                                                        \
  }                                                                           \
  template <class A, class B, class V = operand_vector<A, B>>                 \
  MSL_INLINE V name(const A& a, const B& b) {                                 \
    const V left = widen<V>(a), right = widen<V>(b);                          \
    V result;                                                                 \
    for (int i = 0; i < size_of<V>; i++) result[i] = name(left[i], right[i]); \
    return result;                                                            \
  }
// The number, if one of the two is not a number.
MSL_FUNCTION2(max, a != a ? b : a < b ? b : a)
MSL_FUNCTION2(min, a != a ? b : b < a ? b : a)
MSL_FUNCTION2(fmax, a != a ? b : a < b ? b : a)
MSL_FUNCTION2(fmin, a != a ? b : b < a ? b : a)
MSL_FUNCTION2(pow, T(__builtin_powf(float(a), float(b))))
MSL_FUNCTION2(fmod, T(__builtin_fmodf(float(a), float(b))))
MSL_FUNCTION2(atan2, T(__builtin_atan2f(float(a), float(b))))
MSL_FUNCTION2(copysign, T(__builtin_copysignf(float(a), float(b))))
#undef MSL_FUNCTION2
#define MSL_SPACE(name) \
  namespace name {         \
  using metal::fmax;       \
  using metal::fmin;       \
  using metal::max;        \
  using metal::min;        \
  using metal::pow;        \
  }
MSL_SPACE(fast)
MSL_SPACE(precise)
#undef MSL_SPACE

MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_INLINE half fma(half a, half b, half c) { return half(__builtin_fmaf(a, b, c)); }
MSL_INLINE bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(a, b, c)); }
template <class A, class B, class C, class V = operand_vector<A, B>>
MSL_INLINE V fma(const A& a, const B& b, const C& c) {
  const V x = widen<V>(a), y = widen<V>(b), z = widen<V>(c);
  V result;
  for (int i = 0; i < size_of<V>; i++) result[i] = fma(x[i], y[i], z[i]);
  return result;
}

template <class T> MSL_INLINE enable_if_t<is_scalar<T>, T> clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class A, class L, class H, class V = vector_of<A>>
MSL_INLINE V clamp(const A& x, const L& low, const H& high) {
  return min(max(V(x), widen<V>(low)), widen<V>(high));
}
template <class T> MSL_INLINE enable_if_t<is_scalar<T>, T> select(T a, T b, bool choose_b) {
  return choose_b ? b : a;
}
template <class A, class B, class V = operand_vector<A, B>>
MSL_INLINE V select(const A& a, const B& b, const vec<bool, size_of<V>>& choose_b) {
  const V left = widen<V>(a), right = widen<V>(b);
  V result;
  for (int i = 0; i < size_of<V>; i++) result[i] = choose_b[i] ? right[i] : left[i];
  return result;
}
template <class T> MSL_INLINE enable_if_t<is_scalar<T>, T> mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <int N> MSL_INLINE bool any(const vec<bool, N>& v) {
  bool result = false;
  for (int i = 0; i < N; i++) result |= v[i];
  return result;
}
template <int N> MSL_INLINE bool all(const vec<bool, N>& v) {
  bool result = true;
  for (int i = 0; i < N; i++) result &= v[i];
  return result;
}

template <class A, class B, class V = operand_vector<A, B>>
MSL_INLINE element_of<V> dot(const A& a, const B& b) {
  const V left = a, right = b;
  element_of<V> sum = left[0] * right[0];
  for (int i = 1; i < size_of<V>; i++) sum = element_of<V>(sum + left[i] * right[i]);
  return sum;
}
template <class A, class V = vector_of<A>> MSL_INLINE element_of<V> length(const A& a) {
  return sqrt(dot(a, a));
}

MSL_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
template <class T> MSL_INLINE T extract_bits(T x, uint offset, uint bits) {
  return bits ? T(T(x << (8 * sizeof(T) - offset - bits)) >> (8 * sizeof(T) - bits)) : T(0);
}
template <class T> MSL_INLINE T rotate(T x, T by) {
  constexpr T width = 8 * sizeof(T);
  by %= width;
  return by ? T(x << by | x >> (width - by)) : x;
}

}  // namespace metal
