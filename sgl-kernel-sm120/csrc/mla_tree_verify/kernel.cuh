// SPDX-License-Identifier: Apache-2.0
// mla_tree_verify, main kernel: O = softmax(scale Q K^T + tree mask) V for rows = s_q x h_q against one latent KV row a token.
//
// MMA operands are swapped: tokens and value columns are M, query rows are N (no padding to 16 rows):
//   S^T[token, row] = K[token, 576] Q^T          O^T[column, row] += V^T[column, token] P^T[token, row]
// A block has 8..40 rows and a range of tokens, in tiles of 16. Each tile is gathered once and used for both products.
//
//   value warps 4..7 --cp.async--> kv[stage] --bar_kv_full--> score warps (pair tile % 2, half of the columns each)
//     ^                                                          | exchange halves, mask, row_max in tile order, P
//     +-- O += V^T P^T (128 columns a warp) <--bar_p_full--------+ P lies where the tile's rotary part was
// A value warp refills its own columns as soon as it has used them, the rotary group after bar_p_empty.
//
// Eight warps, two a scheduler: one of each kind, so that softmax and loads of one hide behind the MMA of the other, and
// every thread may have 255 registers (Q: 180 of a score warp, O: 160 of a value warp at 40 rows; a ninth warp would leave 224
// to each and a third one on a scheduler 168). NOTES.md has the arithmetic and what else was measured.
//
// Shared memory at 40 rows, bf16 (fp8): KV 5 x 18.0 KB (9 x 10.0), score exchange 5.0, masks, maxima and barriers 1.9: 99 KB
// is all that sm_120 has (measured in SharedMemoryPlan).
#pragma once
#include "mla_tree_verify/value.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

template <class C>
__device__ __forceinline__ void reset(typename C::SharedMemoryPlan& smem, bool first_segment) {
  const auto init = [&](uint64_t& barrier, int arrivals) {
    const uint32_t address = arch::smem_address(&barrier);
    if (!first_segment) arch::mbarrier_invalidate(address);
    arch::mbarrier_init(address, arrivals);
  };
  if (threadIdx.x < C::kStages) {
    init(smem.bar_kv_full[threadIdx.x], kValueWarps * kWarp);
    init(smem.bar_p_full[threadIdx.x], C::kOwnFirst < C::kRowBlocks ? kHalves : 1);
    init(smem.bar_p_empty[threadIdx.x], kValueWarps);
    smem.rescaled[threadIdx.x] = make_int2(0, 0);
  }
  if (threadIdx.x < kHalves * kPairs) init(smem.bar_order[threadIdx.x / kPairs][threadIdx.x % kPairs], 1);
  for (int r = threadIdx.x; r < C::kRows; r += kThreads) smem.row_max[r] = -INFINITY;
}

template <class C>
__device__ __forceinline__ void run_segment(const MlaTreeVerifyParams& params, const Segment& segment,
                                            typename C::SharedMemoryPlan& smem, bool first_segment) {
  const int warp = threadIdx.x / kWarp, row_tile = blockIdx.x, first_row = row_tile * C::kRows;
  const bool is_value_warp = warp >= kScoreWarps;
  TileLoader<C> loader(params, segment, smem, warp - kScoreWarps);
  int r_slots[C::kFirstLoads];  // of the first tiles, two tiles a register

  // Start all loads before waiting for any.
  reset<C>(smem, first_segment);
  if (is_value_warp) {
#pragma unroll
    for (int i = 0; i < C::kFirstLoads; ++i) r_slots[i] = loader.slots_of_two(2 * i);
    const int tile = threadIdx.x - kScoreWarps * kWarp;
    if (kPrefetchTiles > 0 && tile < C::kStages + kPrefetchTiles + kPrefetchListTiles && tile < segment.num_tiles) loader.prefetch_list(tile);
  }
  load_q<C>(params, smem, segment.request, first_row);
  __syncthreads();
  if (is_value_warp) {
#pragma unroll
    for (int tile = 0; tile < C::kEarlyTiles; ++tile) {
      if (tile >= segment.num_tiles) break;
      loader.copy_values(tile, r_slots[tile / 2], tile % 2);
      loader.copy_rope(tile, loader.rope_slot(r_slots[tile / 2], tile % 2));
      arch::cp_async_arrive(arch::smem_address(&smem.bar_kv_full[tile]));
    }
    arch::cp_async_commit();
  }
  if ((segment.first_tile + segment.num_tiles) * kTileTokens > segment.prefix) {
    build_tree_mask<C>(params, segment, smem, first_row);
    if (threadIdx.x == 0 && params.status != nullptr && !mask_block_is_complete(params, segment)) atomicOr(params.status, kMaskClamped);
  }

  // Wait for Q alone.
  if (is_value_warp) arch::cp_async_wait<1>();
  else arch::cp_async_wait<0>();
  __syncthreads();
  if constexpr (C::Kv::kFp8) {
    find_q_scales<C>(smem);
    __syncthreads();
  }

  if (is_value_warp) run_value_warp<C>(params, segment, loader, r_slots, smem, row_tile, warp - kScoreWarps);
  else if (warp % kHalves == 0) run_score_warp<C, 0>(params, segment, smem, warp / kHalves);
  else run_score_warp<C, 1>(params, segment, smem, warp / kHalves);
}

// Grid (row tiles, columns).
template <class C>
__global__ void __launch_bounds__(kThreads, 1) mla_tree_verify_kernel(const __grid_constant__ MlaTreeVerifyParams params) {
  extern __shared__ __align__(128) unsigned char raw_smem[];
  auto& smem = *reinterpret_cast<typename C::SharedMemoryPlan*>(raw_smem);
  arch::wait_for_previous_kernel();

  const int request_end = threadIdx.x < params.b ? load_plan_entry(params, threadIdx.x + 1).first_tile : INT32_MAX;
  const PlanEntry totals = load_plan_entry(params, params.b);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && totals.list_length != 0 && params.status != nullptr)
    atomicOr(params.status, totals.list_length);

  const int columns = num_columns(totals.first_tile, gridDim.y), column = blockIdx.y;
  if (column >= columns) return;
  int64_t line = column_begin(column, totals.first_tile, columns);
  const int64_t line_begin = line, line_end = column_begin(column + 1, totals.first_tile, columns);
  while (line < line_end) {
    const int request = __syncthreads_count(request_end <= line);  // also: the last segment is done with shared memory
    const Segment segment = make_segment(params, request, line, line_end, totals.first_tile, columns, column);
    run_segment<C>(params, segment, smem, line == line_begin);
    line += segment.num_tiles;
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
