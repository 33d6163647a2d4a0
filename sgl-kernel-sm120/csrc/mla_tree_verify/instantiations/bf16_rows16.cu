// SPDX-License-Identifier: Apache-2.0
#include "mla_tree_verify/launch.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {
template cudaError_t launch<Bf16Kv, 2>(const MlaTreeVerifyParams&, cudaStream_t);
}
