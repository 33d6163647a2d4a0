// SPDX-License-Identifier: Apache-2.0
// mla_tree_verify, main kernel: O = softmax(scale Q K^T + tree mask) V for rows = s_q x h_q
// against one latent KV row a token. Tokens and value columns are the MMA's M, query rows its N:
//   S^T[token, row] = K[token, 576] Q^T      O^T[column, row] += V^T[column, token] P^T[token, row]
// A block has 8..40 rows and a range of tokens in tiles of 16, each gathered once for both
// products.
// clang-format off
//   load --cp.async--> kv[stage] --bar_kv_full--> score: S, a pair of warps a tile, half of the columns each
//     ^                                              | bar_scores_full: both halves, fp32
//   bar_kv_empty                                  softmax: a warp a tile; mask, row_max in the order of tiles
//     |                                              | bar_p_full: P, where the tile's rotary part was
//   value: O += V^T P^T, 128 columns a warp <--------+
// clang-format on
// Four warpgroups, one a role; each scheduler has one warp of each. Registers move from load and
// softmax to score (Q: 180 at 40 rows) and value (O: 160); where they cannot, tiles have at most 16
// rows. NOTES.md has the arithmetic and what lost.
//
// Shared memory at 40 rows, bf16 (fp8, 32 rows): KV 5 x 18.0 KB (9 x 10.0), scores 5.0 (4.0), the
// rest 2, of the 99 KB that sm_120 gives a block (config.h asserts it).
#pragma once
#include "arch/registers.cuh"
#include "mla_tree_verify/value.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

// All but the load warps, until Q is in shared memory. False: there is no further segment.
template <class C, int kRole>
__device__ __forceinline__ bool begin_segment(const MlaTreeVerifyParams& params,
                                              const Segment& segment,
                                              typename C::SharedMemoryPlan& smem) {
  arch::named_barrier_arrive(kBarSegmentDone, kThreads);
  arch::block_barrier_sync();  // load warps have written `segment`
  if (segment.num_tiles == 0) return false;
  load_q<C>(params, smem, segment.request, blockIdx.x * C::kRows);
  if (kRole == kSoftmax && (segment.first_tile + segment.num_tiles) * kTileTokens > segment.prefix)
    build_tree_mask<C>(params, segment, smem, blockIdx.x * C::kRows);
  arch::block_barrier_sync();  // Q has landed, barriers are set
  if constexpr (C::Kv::kFp8) {
    find_q_scales<C>(smem);
    arch::role_barrier_sync(kBarMathWarps, kMathThreads);
  }
  return true;
}

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
  arch::wait_for_previous_kernel();

  if (role == kLoad) {
    arch::give_up_registers<C::kRegisters[kLoad]>();
    const int thread = arch::thread_index() - kMathThreads;
    Segments segments(params);
    for (bool first = true;; first = false) {
      const Segment segment = segments.next();
      arch::named_barrier_sync(kBarSegmentDone, kThreads);
      if (thread == 0) smem.segment = segment;
      arch::block_barrier_sync();
      if (segment.num_tiles == 0) break;
      run_load_warp<C>(params, segment, smem, first);
    }
    if (blockIdx.x == 0 && blockIdx.y == 0 && thread == 0) report_plan_status(params);
  } else if (role == kSoftmax) {
    arch::give_up_registers<C::kRegisters[kSoftmax]>();
    while (begin_segment<C, kSoftmax>(params, smem.segment, smem))
      run_softmax_warp<C>(params, smem.segment, smem, warp);
  } else if (role == kValue) {
    arch::take_registers<C::kRegisters[kValue]>();
    while (begin_segment<C, kValue>(params, smem.segment, smem))
      run_value_warp<C>(params, smem.segment, smem, warp);
  } else {
    arch::take_registers<C::kRegisters[kScore]>();
    while (begin_segment<C, kScore>(params, smem.segment, smem)) {
      if (warp % kHalves == 0)
        run_score_warp<C, 0>(params, smem.segment, smem, warp / kHalves);
      else
        run_score_warp<C, 1>(params, smem.segment, smem, warp / kHalves);
    }
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
