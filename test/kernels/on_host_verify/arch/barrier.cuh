// SPDX-License-Identifier: Apache-2.0
// An mbarrier is 8 bytes of shared memory here too: arrivals expected and missing, and the number
// of its phase.
#pragma once
#include "arch/ldmatrix.cuh"
#include "block.h"

namespace sgl_kernel_sm120::arch {

struct Mbarrier {
  uint16_t expected, missing;
  uint32_t phase;
};
inline Mbarrier& mbarrier(uint32_t address) {
  return *static_cast<Mbarrier*>(smem_pointer(address));
}

inline void mbarrier_init(uint32_t address, uint32_t arrivals) {
  mbarrier(address) = {uint16_t(arrivals), uint16_t(arrivals), 0};
}
inline void mbarrier_arrive(uint32_t address) {
  Mbarrier& barrier = mbarrier(address);
  if (barrier.missing == 0) {
    std::fprintf(stderr, "arrival at an mbarrier that expects none\n");
    std::abort();
  }
  if (--barrier.missing == 0) barrier.missing = barrier.expected, ++barrier.phase;
}
// The build in which every lane arrives, or the other one.
#ifdef SGL_KERNEL_EVERY_LANE_ARRIVES
inline constexpr uint32_t kArrivalsPerWarp = 32;
#else
inline constexpr uint32_t kArrivalsPerWarp = 1;
#endif
inline void mbarrier_arrive_warp(uint32_t address, int lane) {
  __syncwarp();
  if (kArrivalsPerWarp > 1 || lane == 0) mbarrier_arrive(address);
}
inline void mbarrier_wait(uint32_t address, uint32_t parity) {
  on_host::wait_until([=] { return mbarrier(address).phase % 2 != parity; });
}

inline void wait_for_previous_kernel() {}
inline void launch_next_kernel() {}

}  // namespace sgl_kernel_sm120::arch
