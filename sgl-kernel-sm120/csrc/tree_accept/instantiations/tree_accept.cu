// SPDX-License-Identifier: Apache-2.0
#include "tree_accept/launch.cuh"

namespace sgl_kernel_sm120 {

cudaError_t tree_accept(const TreeAcceptParams& params, cudaStream_t stream) {
  return launch_tree_accept(params, stream);
}

}  // namespace sgl_kernel_sm120
