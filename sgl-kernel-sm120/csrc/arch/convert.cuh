// SPDX-License-Identifier: Apache-2.0
// Number formats and the exponential.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sgl_kernel_sm120::arch {

// 2^x, 2 ulp; 2^-inf = 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lo in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(v);
}

__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
  const __half2 v = __floats2half2_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(v);
}

__device__ __forceinline__ float2 unpack_bf16(uint32_t v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

__device__ __forceinline__ float2 unpack_f16(uint32_t v) {
  return __half22float2(reinterpret_cast<const __half2&>(v));
}

// Bytes [a, b, c, d] of fp8 e4m3 -> lo = fp16 (a, b), hi = fp16 (c, d), exact.
__device__ __forceinline__ void e4m3_to_f16(uint32_t bytes, uint32_t& lo, uint32_t& hi) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 "
      "%1, h;\n}"
      : "=r"(lo), "=r"(hi)
      : "r"(bytes));
#else
  // The 4-bit exponent moves into the 5-bit field, which divides by 2^8. Nan (0x7f) becomes 480.
  const __half2 bias = __floats2half2_rn(256.f, 256.f);
  const uint32_t spread[2] = {__byte_perm(bytes, 0, 0x1404),
                              __byte_perm(bytes, 0, 0x3424)};  // byte in bits 8..15 of each half
  uint32_t* const dst[2] = {&lo, &hi};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t v = (spread[i] & 0x80008000u) | ((spread[i] & 0x7f007f00u) >> 1);
    const __half2 scaled = __hmul2(reinterpret_cast<const __half2&>(v), bias);
    *dst[i] = reinterpret_cast<const uint32_t&>(scaled);
  }
#endif
}

}  // namespace sgl_kernel_sm120::arch
