// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "kernels.h"
#include "tree_count/kernel.cuh"

namespace sgl_kernel_sm120 {

inline cudaError_t launch_tree_count(const TreeCountParams& params, cudaStream_t stream) {
  tree_count_kernel<<<params.b, tree_count_op::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sgl_kernel_sm120
