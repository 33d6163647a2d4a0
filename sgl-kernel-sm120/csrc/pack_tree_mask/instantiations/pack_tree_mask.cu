// SPDX-License-Identifier: Apache-2.0
#include "pack_tree_mask/launch.cuh"

namespace sgl_kernel_sm120 {

cudaError_t pack_tree_mask(const PackTreeMaskParams& params, cudaStream_t stream) {
  return launch_pack_tree_mask(params, stream);
}

}  // namespace sgl_kernel_sm120
