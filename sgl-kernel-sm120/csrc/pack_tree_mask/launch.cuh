// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "kernels.h"
#include "pack_tree_mask/kernel.cuh"

namespace sgl_kernel_sm120 {

inline cudaError_t launch_pack_tree_mask(const PackTreeMaskParams& params, cudaStream_t stream) {
  using namespace pack_tree_mask_config;
  const auto blocks = static_cast<unsigned>((params.rows + kRowsPerBlock - 1) / kRowsPerBlock);
  pack_tree_mask_kernel<<<blocks, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sgl_kernel_sm120
