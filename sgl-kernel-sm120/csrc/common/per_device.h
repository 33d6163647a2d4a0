// SPDX-License-Identifier: Apache-2.0
// Function attributes belong to one device's context, so they are set once a device, not once a
// process.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace sgl_kernel_sm120 {

constexpr int kMaxSmemBytes = 101376;  // what one block may use on sm_120: 99 KiB

// Lets `Kernel` use up to `Bytes` of dynamic shared memory on the current device. Safe from several
// threads. The bytes are a template argument so that tools/resources.py finds them beside the
// kernel's name in the symbol table of the object file.
template <auto Kernel, int Bytes>
cudaError_t allow_dynamic_smem() {
  static_assert(Bytes <= kMaxSmemBytes, "more dynamic shared memory than sm_120 has");
  static std::atomic<uint64_t> done{0};  // one bit a device
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (done.load(std::memory_order_acquire) & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace sgl_kernel_sm120
