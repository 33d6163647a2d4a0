// SPDX-License-Identifier: Apache-2.0
#include "tree_count/launch.cuh"

namespace sgl_kernel_sm120 {

cudaError_t tree_count(const TreeCountParams& params, cudaStream_t stream) {
  return launch_tree_count(params, stream);
}

}  // namespace sgl_kernel_sm120
