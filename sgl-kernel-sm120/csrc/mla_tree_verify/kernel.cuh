// SPDX-License-Identifier: Apache-2.0
// mla_tree_verify, main kernel: O = softmax(scale Q K^T + tree mask) V for rows = s_q x h_q
// against one latent KV row a token. Tokens and value columns are the MMA's M, query rows its N:
//   S^T[token, row] = K[token, 576] Q^T      O^T[column, row] += V^T[column, token] P^T[token, row]
// A block has 8..40 rows and a range of tokens in tiles of 16, each gathered once for both
// products.
// clang-format off
//   load --cp.async--> stages --bar_full--> score: S, a pair of warps a tile, half of the columns each
//     ^                                       | bar_scores_full: both halves, fp32
//   bar_empty                              softmax: mask, row_max, row_sum; a warp has every fourth row block
//     |                                       | bar_p_full: P, where the tile's rotary part was
//   value: O += V^T P^T, 128 columns a warp <-+
// clang-format on
// Q of a segment goes through the same ring of stages, ahead of its tiles: the score warps take it
// into registers and free its stages. Barriers count on from segment to segment, so that loads and
// scores of the next one start while the value warps still store the last. Four warpgroups, one a
// role; each scheduler has one warp of each. Registers move from load and softmax to score (Q: 180
// at 40 rows) and value (O: 160); where they cannot, tiles have at most 16 rows. NOTES.md has the
// arithmetic and what lost.
//
// Shared memory at 40 rows, bf16 (fp8, 32 rows): stages 5 x 18.0 KB (9 x 10.0), scores 5.0 (4.0),
// the rest 3, of the 99 KB that sm_120 gives a block (config.h asserts it).
#pragma once
#include "arch/registers.cuh"
#include "mla_tree_verify/value.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

// Grid (row tiles, columns).
template <class C>
__global__ void __launch_bounds__(kThreads, 1)
    mla_tree_verify_kernel(const __grid_constant__ MlaTreeVerifyParams params) {
  if constexpr (C::kNeedsToMoveRegisters && !arch::kCanMoveRegisters)
    return;  // the host does not launch it there
  extern __shared__ __align__(128) unsigned char raw_smem[];
  auto& smem = *reinterpret_cast<typename C::SharedMemoryPlan*>(raw_smem);
  const int role = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0),
            warp = __shfl_sync(~0u, threadIdx.x % kWarpgroup / kWarp, 0);
  init_barriers<C>(smem, threadIdx.x);
  // The plan is older than the kernel before this one (plan.cuh), nothing else is.
  find_first_segment(params, smem.work[role * kWarpsPerRole + warp]);
  __syncthreads();
  arch::wait_for_previous_kernel();
  if (role == kLoad) {
    arch::give_up_registers<C::kRegisters[kLoad]>();
    Loader<C> loader(params, smem);
    while (next_segment<C>(params, smem.work[kLoad * kWarpsPerRole + warp]))
      load_segment<C>(loader, smem.work[kLoad * kWarpsPerRole + warp].segment);
    loader.report();
    if (blockIdx.x == 0 && blockIdx.y == 0 && warp == 0) report_plan_status(params);
  } else if (role == kSoftmax) {
    arch::give_up_registers<C::kRegisters[kSoftmax]>();
    while (next_segment<C>(params, smem.work[kSoftmax * kWarpsPerRole + warp]))
      softmax_segment<C>(params, smem.work[kSoftmax * kWarpsPerRole + warp].segment, smem, warp);
  } else if (role == kValue) {
    arch::take_registers<C::kRegisters[kValue]>();
    while (next_segment<C>(params, smem.work[kValue * kWarpsPerRole + warp]))
      value_segment<C>(params, smem.work[kValue * kWarpsPerRole + warp].segment, smem, warp);
  } else {
    arch::take_registers<C::kRegisters[kScore]>();
    while (next_segment<C>(params, smem.work[kScore * kWarpsPerRole + warp])) {
      arch::launch_next_kernel();
      if (warp % kHalves == 0)
        score_segment<C, 0>(params, smem.work[kScore * kWarpsPerRole + warp].segment, smem,
                            warp / kHalves);
      else
        score_segment<C, 1>(params, smem.work[kScore * kWarpsPerRole + warp].segment, smem,
                            warp / kHalves);
    }
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
