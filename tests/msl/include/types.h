// Metal's scalar types. No system header is included: the compiler alone is enough.
#pragma once
#include "runtime.h"

typedef signed char int8_t;
typedef unsigned char uint8_t, uchar;
typedef short int16_t;
typedef unsigned short uint16_t, ushort;
typedef int int32_t;
typedef unsigned int uint32_t, uint;
typedef long int64_t, ptrdiff_t;
typedef unsigned long uint64_t, ulong, size_t;
typedef _Float16 half;

namespace metal {

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
template <class T> struct remove_cv { typedef __remove_cv(T) type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> constexpr bool is_integral_v = __is_integral(T);
template <class T> struct is_integral { static constexpr bool value = __is_integral(T); };

// bfloat converts to float silently and to anything else only when asked; it rounds to nearest
// even after every operation.
struct bfloat {
  uint16_t bits;

  bfloat() = default;
  template <class T, class = enable_if_t<__is_arithmetic(T)>>
  MSL_INLINE explicit constexpr bfloat(T value) : bits(round(float(value))) {}

  template <class T, class = enable_if_t<__is_same(T, float)>>
  MSL_INLINE constexpr operator T() const {
    return __builtin_bit_cast(float, uint32_t(bits) << 16);
  }
  template <class T, class = enable_if_t<__is_arithmetic(T) && !__is_same(T, float)>, class = void>
  MSL_INLINE explicit constexpr operator T() const {
    return T(float(*this));
  }

 private:
  static MSL_INLINE constexpr uint16_t round(float value) {
    const uint32_t word = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
    return is_nan ? uint16_t(word >> 16 | 0x40)
                  : uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
};

#define MSL_BFLOAT_OPERATOR(op)                                 \
  MSL_INLINE constexpr bfloat operator op(bfloat a, bfloat b) { \
    return bfloat(float(a) op float(b));                        \
  }                                                             \
  template <class T, class = enable_if_t<__is_integral(T)>>     \
  MSL_INLINE constexpr bfloat operator op(bfloat a, T b) {      \
    return a op bfloat(b);                                      \
  }                                                             \
  template <class T, class = enable_if_t<__is_integral(T)>>     \
  MSL_INLINE constexpr bfloat operator op(T a, bfloat b) {      \
    return bfloat(a) op b;                                      \
  }                                                             \
  MSL_INLINE constexpr bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
MSL_BFLOAT_OPERATOR(+)
MSL_BFLOAT_OPERATOR(-)
MSL_BFLOAT_OPERATOR(*)
MSL_BFLOAT_OPERATOR(/)
#undef MSL_BFLOAT_OPERATOR
MSL_INLINE constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }

template <class T> constexpr bool is_scalar = __is_arithmetic(T) || __is_same(T, bfloat);

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
};
template <> struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half min() { return half(0x1p-14f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half epsilon() { return half(0x1p-10f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
  static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};
template <> struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(0x1.fep127f); }
  static constexpr bfloat min() { return bfloat(0x1p-126f); }
  static constexpr bfloat lowest() { return bfloat(-0x1.fep127f); }
  static constexpr bfloat epsilon() { return bfloat(0x1p-7f); }
  static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
  static constexpr bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
};
#define MSL_INTEGER_LIMITS(type, lo, hi)          \
  template <> struct numeric_limits<type> {       \
    static constexpr type max() { return hi; }    \
    static constexpr type min() { return lo; }    \
    static constexpr type lowest() { return lo; } \
  };
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(int8_t, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -__INT_MAX__ - 1, __INT_MAX__)
MSL_INTEGER_LIMITS(uint, 0, 0xffffffffu)
MSL_INTEGER_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
MSL_INTEGER_LIMITS(ulong, 0, ~0ul)
#undef MSL_INTEGER_LIMITS

}  // namespace metal

MSL_INLINE constexpr half operator""h(long double value) { return half(float(value)); }
MSL_INLINE constexpr half operator""h(unsigned long long value) { return half(value); }
