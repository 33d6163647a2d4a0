// SPDX-License-Identifier: Apache-2.0
// Softmax warps: from the scores of a tile to P, the numerators 2^(s - row_max). A warp has the
// same row blocks of every tile, so that what it knows of its rows stays in registers.
#pragma once
#include "mla_tree_verify/score.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr float kLog2e = 1.4426950408889634f;
// Stands for the maximum of a row that has seen nothing: finite, so that -inf minus it is -inf.
constexpr float kNoMax = -1e30f;

// Lane 4 g + t: tokens g (0, 1) and g + 8 (2, 3) x rows 8 j + 2 t (0, 2) and 8 j + 2 t + 1 (1, 3).
using Scores = float[4];

__device__ __forceinline__ int first_row_of_lane(int block, int lane) {
  return 8 * block + 2 * (lane % 4);
}

// What a softmax warp knows of one row block, for the two rows of the lane.
struct RowBlock {
  float2 scale;    // of a score, to units of log2
  float2 row_max;  // what P is relative to; lags behind the true maximum
  float2 row_sum;  // of this lane's tokens
};

template <class C>
__device__ __forceinline__ RowBlock new_row_block(const MlaTreeVerifyParams& params,
                                                  const typename C::SharedMemoryPlan& smem,
                                                  int segment, int block, int lane) {
  const float scale = params.score_scale * kLog2e;
  RowBlock rows;
  rows.scale = make_float2(scale, scale);
  if constexpr (C::Kv::kFp8) {
    const float2 q_scale = *reinterpret_cast<const float2*>(
        &smem.q_scale[segment % C::kLiveSegments][first_row_of_lane(block, lane)]);
    rows.scale = make_float2(__fdividef(scale, q_scale.x), __fdividef(scale, q_scale.y));
  }
  rows.row_max = make_float2(kNoMax, kNoMax);
  rows.row_sum = make_float2(0.f, 0.f);
  return rows;
}

// Adds the halves.
template <class C>
__device__ __forceinline__ void take_scores(Scores& r_s, const typename C::SharedMemoryPlan& smem,
                                            int block, int lane) {
  const float4 a = smem.scores[0][block][lane], b = smem.scores[1][block][lane];
  r_s[0] = a.x + b.x, r_s[1] = a.y + b.y, r_s[2] = a.z + b.z, r_s[3] = a.w + b.w;
}

__device__ __forceinline__ void scale_scores(Scores& r_s, const RowBlock& rows,
                                             const MlaTreeVerifyParams& params) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r_s[i] *= i % 2 ? rows.scale.y : rows.scale.x;
  if (params.logit_cap == 0.f) return;
  const float cap = params.logit_cap * kLog2e;
#pragma unroll
  for (int i = 0; i < 4; ++i)  // cap * tanh(s / cap)
    r_s[i] = cap - __fdividef(2.f * cap, 1.f + arch::exp2_approx(2.f / params.logit_cap * r_s[i]));
}

// Of the tile; negative: a prefix token, which all rows see.
__device__ __forceinline__ int first_key_of_tile(const Segment& segment, int tile) {
  return (segment.first_tile + tile) * kTileTokens - segment.prefix;
}

// The keys of the tile that the tree or the end of the request hides: bit i of the lane for element
// i of the block.
template <class C>
__device__ __forceinline__ uint32_t find_hidden(const MlaTreeVerifyParams& params,
                                                const Segment& segment, int tile, int block) {
  const int first_key = first_key_of_tile(segment, tile);
  const int lane = arch::thread_index() % kWarp, end_key = segment.num_tokens - segment.prefix;
  const float heads_inverse = __fdividef(1.f, params.h_q);
  uint32_t hidden = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = first_key + lane / 4 + i / 2 * 8,
              row = blockIdx.x * C::kRows + first_row_of_lane(block, lane) + i % 2;
    const bool visible =
        key < 0 || (key < end_key && row < params.s_q * params.h_q &&
                    draft_key_visible(params, segment, position_of_row(row, heads_inverse), key));
    hidden |= uint32_t{!visible} << i;
  }
  return hidden;
}

__device__ __forceinline__ void hide(Scores& r_s, uint32_t hidden) {
#pragma unroll
  for (int i = 0; i < 4; ++i) r_s[i] = hidden >> i & 1 ? -INFINITY : r_s[i];
}

template <class C>
__device__ __forceinline__ bool outgrows(const Scores& r_s, const RowBlock& rows) {
  const float x = rows.row_max.x + C::Kv::kRescaleAt, y = rows.row_max.y + C::Kv::kRescaleAt;
  return r_s[0] > x || r_s[2] > x || r_s[1] > y || r_s[3] > y;
}

// Raises row_max to the largest score of the tile where that has outgrown it, and leaves the
// factors that O must take.
template <class C>
__device__ __forceinline__ void raise_row_max(RowBlock& rows, const Scores& r_s,
                                              float (&rescale)[C::kRows], int block, int lane) {
  float2 top = make_float2(fmaxf(r_s[0], r_s[2]), fmaxf(r_s[1], r_s[3]));
#pragma unroll
  for (int distance = 4; distance < kWarp; distance *= 2) {
    top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, distance));
    top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, distance));
  }
  const float2 old = rows.row_max;
  if (top.x - old.x > C::Kv::kRescaleAt) rows.row_max.x = top.x;
  if (top.y - old.y > C::Kv::kRescaleAt) rows.row_max.y = top.y;
  const float2 factor = make_float2(arch::exp2_approx(old.x - rows.row_max.x),
                                    arch::exp2_approx(old.y - rows.row_max.y));
  rows.row_sum.x *= factor.x, rows.row_sum.y *= factor.y;
  if (lane < 4) *reinterpret_cast<float2*>(&rescale[first_row_of_lane(block, lane)]) = factor;
}

// P[token, row] over the rotary part of the tile, which both halves have read. The sums are of what
// the MMA sees.
template <class C>
__device__ __forceinline__ void write_p(const Scores& r_s, RowBlock& rows, uint32_t s_kv, int block,
                                        int lane) {
  const int g = lane / 4, t = lane % 4;
  const uint32_t place = s_kv + g * C::kPitch + C::kValueBytes + 4 * t + swizzle(block, g);
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // token g + 8 i
    const float even = arch::exp2_approx(r_s[2 * i] - rows.row_max.x),
                odd = arch::exp2_approx(r_s[2 * i + 1] - rows.row_max.y);
    const uint32_t p = C::Kv::kFp8 ? arch::pack_f16(even, odd) : arch::pack_bf16(even, odd);
    arch::store_shared(place + i * 8 * C::kPitch, p);
    const float2 seen = C::Kv::kFp8 ? arch::unpack_f16(p) : arch::unpack_bf16(p);
    rows.row_sum.x += seen.x, rows.row_sum.y += seen.y;
  }
}

// The segment is done: its maxima and sums, for the value warps.
template <class C>
__device__ __forceinline__ void share_rows(RowBlock& rows, typename C::SharedMemoryPlan& smem,
                                           int segment, int block, int lane) {
#pragma unroll
  for (int distance = 4; distance < kWarp; distance *= 2) {
    rows.row_sum.x += __shfl_xor_sync(~0u, rows.row_sum.x, distance);
    rows.row_sum.y += __shfl_xor_sync(~0u, rows.row_sum.y, distance);
  }
  if (lane >= 4) return;
  const int live = segment % C::kLiveSegments, row = first_row_of_lane(block, lane);
  *reinterpret_cast<float2*>(&smem.row_max[live][row]) = rows.row_max;
  *reinterpret_cast<float2*>(&smem.row_sum[live][row]) = rows.row_sum;
}

// Every tile of the segment, row blocks warp, warp + 4, ...
template <class C, int kBlocks>
__device__ __forceinline__ void softmax_tiles(const MlaTreeVerifyParams& params,
                                              const Segment& segment,
                                              typename C::SharedMemoryPlan& smem, int warp) {
  const int lane = arch::thread_index() % kWarp;
  RowBlock r_rows[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
    r_rows[i] = new_row_block<C>(params, smem, segment.number, warp + i * kSoftmaxWarps, lane);
  Stage<C> stage(segment.ring);
#pragma unroll 1
  for (int tile = 0; tile < segment.num_tiles; ++tile) {
    const bool has_draft_keys = first_key_of_tile(segment, tile) + kTileTokens > 0;
    uint32_t hidden[kBlocks];  // known before the scores are there
    if (has_draft_keys) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        hidden[i] = find_hidden<C>(params, segment, tile, warp + i * kSoftmaxWarps);
    }
    Scores r_s[kBlocks];
    const unsigned number = segment.tile + tile;
    arch::mbarrier_wait(arch::smem_address(&smem.bar_scores_full), number & 1);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) take_scores<C>(r_s[i], smem, warp + i * kSoftmaxWarps, lane);
    arch::mbarrier_arrive_warp(arch::smem_address(&smem.bar_scores_empty[number % kPairs]), lane);
    bool outgrown = false;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      scale_scores(r_s[i], r_rows[i], params);
      if (has_draft_keys) hide(r_s[i], hidden[i]);
      outgrown |= outgrows<C>(r_s[i], r_rows[i]);
    }
    const bool raise = __any_sync(~0u, outgrown);
    if (raise) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        raise_row_max<C>(r_rows[i], r_s[i], smem.rescale[stage.index], warp + i * kSoftmaxWarps,
                         lane);
    }
    const uint32_t s_kv = arch::smem_address(smem.stages[stage.index]);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      write_p<C>(r_s[i], r_rows[i], s_kv, warp + i * kSoftmaxWarps, lane);
    if (tile == segment.num_tiles - 1) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i)
        share_rows<C>(r_rows[i], smem, segment.number, warp + i * kSoftmaxWarps, lane);
    }
    if (lane == 0)
      smem.rescaled[stage.index][warp] = raise && tile > 0;  // before the first tile O is zero
    arch::mbarrier_arrive_warp(arch::smem_address(&smem.bar_p_full[stage.index]), lane);
    stage.template advance<1>();
  }
}

template <class C>
__device__ __forceinline__ void softmax_segment(const MlaTreeVerifyParams& params,
                                                const Segment segment,
                                                typename C::SharedMemoryPlan& smem, int warp) {
  if (params.status != nullptr && arch::thread_index() % kWarp == 0 && warp == 0 &&
      !mask_block_is_complete(params, segment))
    atomicOr(params.status, kMaskClamped);
  if (warp >= C::kBusySoftmaxWarps) return;
  if constexpr (C::Kv::kFp8) scale_q<C>(smem, segment, warp);
  constexpr int kMost = C::kSoftmaxBlocks;  // the last warps may have one less
  if (warp + (kMost - 1) * kSoftmaxWarps < C::kRowBlocks)
    softmax_tiles<C, kMost>(params, segment, smem, warp);
  else if constexpr (kMost > 1)
    softmax_tiles<C, kMost - 1>(params, segment, smem, warp);
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
