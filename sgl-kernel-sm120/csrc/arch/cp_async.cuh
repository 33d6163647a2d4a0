// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies from global to shared memory.
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::arch {

// 16 bytes; only the first `bytes` (0 or 16) are read, the rest is filled with zeros.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}

// Until all copies of this thread are complete.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// One arrival on `barrier` once all earlier cp.async of this thread are complete.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace sgl_kernel_sm120::arch
