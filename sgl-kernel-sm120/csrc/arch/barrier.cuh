// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (mbarrier), and dependent launches.
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::arch {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

// One warp's share of a phase: what its lanes did before it is seen by whoever waits. Lane 0
// arrives for all, which tools do not understand that follow each lane on its own
// (compute-sanitizer's racecheck): SGL_KERNEL_EVERY_LANE_ARRIVES is a build for them.
#ifdef SGL_KERNEL_EVERY_LANE_ARRIVES
inline constexpr uint32_t kArrivalsPerWarp = 32;
#else
inline constexpr uint32_t kArrivalsPerWarp = 1;
#endif

__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (kArrivalsPerWarp > 1 || lane == 0) mbarrier_arrive(barrier);
}

// Returns once the phase of the given parity is complete. try_wait, which may suspend the thread,
// needs sm_90.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done "
      "bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@!done "
      "bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Programmatic dependent launch: wait for the kernel before us to finish; let the kernel after us
// start.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sgl_kernel_sm120::arch
