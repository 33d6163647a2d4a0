// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "arch/convert.cuh"

namespace sgl_kernel_sm120::arch {

template <class Unpack>
void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Unpack unpack) {
  const auto* all = on_host::share({a[0], a[1], a[2], a[3], b0, b1});
  const int lane = on_host::current % on_host::kWarp, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int upper = i / 2, column = 2 * t + i % 2;
    for (int pair = 0; pair < 8; ++pair) {  // k = 2 pair, 2 pair + 1
      const float2 x = unpack(uint32_t(all[4 * g + pair % 4][pair / 4 * 2 + upper])),
                   y = unpack(uint32_t(all[4 * column + pair % 4][4 + pair / 4]));
      d[i] += x.x * y.x + x.y * y.y;
    }
  }
  on_host::shared_is_read();
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply(d, a, b0, b1, unpack_bf16);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  multiply(d, a, b0, b1, unpack_f16);
}

}  // namespace sgl_kernel_sm120::arch
