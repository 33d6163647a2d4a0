// SPDX-License-Identifier: Apache-2.0
#include "ddtree_build/launch.cuh"

namespace sgl_kernel_sm120 {

cudaError_t ddtree_build(const DdtreeBuildParams& params, cudaStream_t stream) {
  return launch_ddtree_build(params, stream);
}

}  // namespace sgl_kernel_sm120
