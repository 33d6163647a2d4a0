// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sgl_kernel_sm120 {

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(16) unsigned char smem[];
  return smem;
}

}  // namespace sgl_kernel_sm120
