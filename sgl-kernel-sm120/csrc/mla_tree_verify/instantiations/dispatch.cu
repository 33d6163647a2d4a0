// SPDX-License-Identifier: Apache-2.0
// The entry points of kernels.h.
#include "kernels.h"
#include "mla_tree_verify/config.h"
#include "mla_tree_verify/plan.cuh"

namespace sgl_kernel_sm120 {
namespace mla_tree_verify_op {

template <class Kv, int kRowBlocks>
cudaError_t launch(const MlaTreeVerifyParams& params, cudaStream_t stream);

cudaError_t max_row_blocks(int most, int& result) {
  int device = 0, major = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      error != cudaSuccess)
    return error;
  result = major >= 9 ? most : kMaxRowBlocksFixed;
  return cudaSuccess;
}

cudaError_t launch_bf16(const MlaTreeVerifyParams& params, cudaStream_t stream) {
  int most;
  if (cudaError_t error = max_row_blocks(kMaxRowBlocksBf16, most); error != cudaSuccess)
    return error;
  switch (row_blocks_per_tile(params.s_q * params.h_q, most)) {
    case 1:
      return launch<Bf16Kv, 1>(params, stream);
    case 2:
      return launch<Bf16Kv, 2>(params, stream);
    case 3:
      return launch<Bf16Kv, 3>(params, stream);
    case 4:
      return launch<Bf16Kv, 4>(params, stream);
    default:
      return launch<Bf16Kv, 5>(params, stream);
  }
}

cudaError_t launch_fp8(const MlaTreeVerifyParams& params, cudaStream_t stream) {
  int most;
  if (cudaError_t error = max_row_blocks(kMaxRowBlocksFp8, most); error != cudaSuccess)
    return error;
  switch (row_blocks_per_tile(params.s_q * params.h_q, most)) {
    case 1:
      return launch<Fp8Kv, 1>(params, stream);
    case 2:
      return launch<Fp8Kv, 2>(params, stream);
    case 3:
      return launch<Fp8Kv, 3>(params, stream);
    default:
      return launch<Fp8Kv, 4>(params, stream);
  }
}

}  // namespace mla_tree_verify_op

cudaError_t mla_tree_verify(const MlaTreeVerifyParams& params, cudaStream_t stream) {
  using namespace mla_tree_verify_op;
  return params.kv_is_fp8 ? launch_fp8(params, stream) : launch_bf16(params, stream);
}

cudaError_t mla_tree_verify_plan(const MlaTreeVerifyPlanParams& params, cudaStream_t stream) {
  mla_tree_verify_op::mla_tree_verify_plan_kernel<<<1, mla_tree_verify_op::kMaxBatch, 0, stream>>>(
      params);
  return cudaGetLastError();
}

int64_t mla_tree_verify_workspace_bytes(int b, int s_q, int h_q, int num_sms) {
  return mla_tree_verify_op::workspace_bytes(b, s_q, h_q, num_sms);
}

int64_t mla_tree_verify_plan_ints(int b, int, int, int) { return mla_tree_verify_op::plan_ints(b); }

}  // namespace sgl_kernel_sm120
