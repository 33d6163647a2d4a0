// SPDX-License-Identifier: Apache-2.0
#include "mla_tree_verify/launch.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {
template cudaError_t launch<Fp8Kv, 4>(const MlaTreeVerifyParams&, cudaStream_t);
}
