// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "kernels.h"
#include "tree_accept/kernel.cuh"

namespace sgl_kernel_sm120 {

inline cudaError_t launch_tree_accept(const TreeAcceptParams& params, cudaStream_t stream) {
  tree_accept_kernel<<<params.b, tree_accept_op::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sgl_kernel_sm120
