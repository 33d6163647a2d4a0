// SPDX-License-Identifier: Apache-2.0
// A copy lands when the barrier that counts it is told, not before.
#pragma once
#include "arch/barrier.cuh"

namespace sgl_kernel_sm120::arch {

inline void cp_async_16(uint32_t dst, const void* src, uint32_t bytes) {
  on_host::fibers[on_host::current].copies.push_back([=] {
    std::memset(smem_pointer(dst), 0, 16);
    std::memcpy(smem_pointer(dst), src, bytes);
  });
}
inline void cp_async_arrive(uint32_t barrier) {
  auto& copies = on_host::fibers[on_host::current].copies;
  for (const auto& copy : copies) copy();
  copies.clear();
  mbarrier_arrive(barrier);
}

}  // namespace sgl_kernel_sm120::arch
