// SPDX-License-Identifier: Apache-2.0
// The plan of a step: where each request lies on the line of tiles, and its list. One block, one
// request a thread.
#pragma once
#include "mla_tree_verify/config.h"
#include "params.h"

namespace sgl_kernel_sm120::mla_tree_verify_op {

template <typename T>
__device__ __forceinline__ int inclusive_block_sum(T value, int (&s_warp_sums)[kMaxBatch / kWarp]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int below = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += below;
  }
  if (lane == kWarp - 1) s_warp_sums[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; ++w) value += s_warp_sums[w];
  return value;
}

__device__ __forceinline__ int64_t load_indptr(const MlaTreeVerifyPlanParams& params, int i) {
  return params.indptr_is_64 ? static_cast<const int64_t*>(params.kv_indptr)[i]
                             : static_cast<const int32_t*>(params.kv_indptr)[i];
}

__global__ void __launch_bounds__(kMaxBatch)
    mla_tree_verify_plan_kernel(const __grid_constant__ MlaTreeVerifyPlanParams params) {
  __shared__ int s_warp_sums[kMaxBatch / kWarp];
  const int request = threadIdx.x;
  PlanEntry entry{};
  int tiles = 0;
  bool clamped = false;
  if (request < params.b) {
    const int64_t begin = load_indptr(params, request), end = load_indptr(params, request + 1);
    const int64_t first = min(max(begin, int64_t{0}), params.num_indices),
                  last = min(max(end, first), params.num_indices);
    clamped = first != begin || last != end;
    entry.list_begin = static_cast<int>(first);
    entry.list_length = static_cast<int>(last - first);
    entry.num_tokens = entry.list_length + (params.has_draft_slots ? params.s_q : 0);
    tiles = (entry.num_tokens + kTileTokens - 1) / kTileTokens;
  }
  const int line_end = inclusive_block_sum(tiles, s_warp_sums);
  const bool any_clamped = __syncthreads_or(clamped);
  entry.first_tile = line_end - tiles;
  auto* plan = reinterpret_cast<int4*>(params.plan);
  if (request < params.b)
    plan[request] =
        make_int4(entry.first_tile, entry.list_begin, entry.list_length, entry.num_tokens);
  if (request == kMaxBatch - 1)
    plan[params.b] = make_int4(line_end, 0, any_clamped ? kListClamped : 0, 0);
  // The main kernel reads the plan before it waits for its predecessor, which may be this kernel:
  // no dependent starts before all blocks have left, and by then the plan is in memory.
  __threadfence();
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
