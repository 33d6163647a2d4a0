// SPDX-License-Identifier: Apache-2.0
// Number formats in software, rounded to nearest even.
#pragma once
#include "block.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16(float v) {
  const uint32_t b = __float_as_uint(v);
  if (v != v) return {0x7fff};
  return {uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}

namespace sgl_kernel_sm120::arch {

inline float half_to_float(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                     : exponent == 0 ? std::ldexp(float(fraction), -24)
                                     : std::ldexp(float(fraction + 1024), exponent - 25);
  return h >> 15 ? -size : size;
}
inline uint16_t float_to_half(float v) {
  const uint16_t sign = std::signbit(v) << 15;
  if (v != v) return 0x7fff;
  const float size = std::fabs(v);
  if (size >= 65520.f) return sign | 0x7c00;
  const int exponent = std::max(size == 0.f ? -14 : std::ilogb(size), -14);
  const auto fraction = uint16_t(std::nearbyint(std::ldexp(size, 10 - exponent)));  // up to 2048
  return sign | uint16_t(((exponent + 14) << 10) + fraction);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline uint32_t pack_bf16(float lo, float hi) {
  return __float2bfloat16(lo).bits | uint32_t{__float2bfloat16(hi).bits} << 16;
}
inline uint32_t pack_f16(float lo, float hi) {
  return float_to_half(lo) | uint32_t{float_to_half(hi)} << 16;
}
inline float2 unpack_bf16(uint32_t v) {
  return {__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u)};
}
inline float2 unpack_f16(uint32_t v) {
  return {half_to_float(uint16_t(v)), half_to_float(uint16_t(v >> 16))};
}
inline uint16_t e4m3_to_half(uint8_t v) {
  const int exponent = v >> 3 & 15, fraction = v & 7;
  const float size = (v & 127) == 127 ? NAN
                     : exponent == 0  ? std::ldexp(float(fraction), -9)
                                      : std::ldexp(float(fraction + 8), exponent - 10);
  return float_to_half(v >> 7 ? -size : size);
}
inline void e4m3_to_f16(uint32_t bytes, uint32_t& lo, uint32_t& hi) {
  lo = e4m3_to_half(uint8_t(bytes)) | uint32_t{e4m3_to_half(uint8_t(bytes >> 8))} << 16;
  hi = e4m3_to_half(uint8_t(bytes >> 16)) | uint32_t{e4m3_to_half(uint8_t(bytes >> 24))} << 16;
}

}  // namespace sgl_kernel_sm120::arch
