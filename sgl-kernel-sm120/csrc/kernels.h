// SPDX-License-Identifier: Apache-2.0
// Entry points of the kernels: parameters and a stream in, cudaError_t out. They neither allocate
// nor synchronise. No torch.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace sgl_kernel_sm120 {

cudaError_t mla_tree_verify(const MlaTreeVerifyParams& params, cudaStream_t stream);
cudaError_t mla_tree_verify_plan(const MlaTreeVerifyPlanParams& params, cudaStream_t stream);

// Sizes for any batch of at most b requests, s_q rows and h_q heads on a GPU of num_sms SMs. Pure
// host arithmetic.
int64_t mla_tree_verify_workspace_bytes(int b, int s_q, int h_q, int num_sms);
int64_t mla_tree_verify_plan_ints(int b, int s_q, int h_q, int num_sms);

cudaError_t ddtree_build(const DdtreeBuildParams& params, cudaStream_t stream);
cudaError_t tree_accept(const TreeAcceptParams& params, cudaStream_t stream);
cudaError_t tree_count(const TreeCountParams& params, cudaStream_t stream);
cudaError_t pack_tree_mask(const PackTreeMaskParams& params, cudaStream_t stream);

// Rows a call can move: kv_move_max_rows(granule) for buffers whose addresses and sizes are
// multiples of granule bytes.
int64_t kv_move_max_rows(int granule);
cudaError_t kv_move_all_layers(const KvMoveParams& params, cudaStream_t stream);

}  // namespace sgl_kernel_sm120
