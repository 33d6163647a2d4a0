// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ddtree_build/kernel.cuh"
#include "kernels.h"

namespace sgl_kernel_sm120 {

inline cudaError_t launch_ddtree_build(const DdtreeBuildParams& params, cudaStream_t stream) {
  ddtree_build_kernel<<<params.b, ddtree_build_op::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace sgl_kernel_sm120
