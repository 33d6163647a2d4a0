// SPDX-License-Identifier: Apache-2.0
// Softmax warps: from the scores of a tile to P, the numerators 2^(s - row_max). A warp has every
// fourth tile.
#pragma once
#include "mla_tree_verify/score.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr float kLog2e = 1.4426950408889634f;

// Lane 4 g + t of block j: tokens g (0, 1) and g + 8 (2, 3) x rows 8 j + 2 t (0, 2) and 8 j + 2 t +
// 1 (1, 3).
template <class C>
using Scores = float[C::kRowBlocks][4];

__device__ __forceinline__ int first_row_of_lane(int block, int lane) {
  return 8 * block + 2 * (lane % 4);
}

// Adds the halves, in units of log2, and frees their place.
template <class C>
__device__ __forceinline__ void take_scores(Scores<C>& r_s, const MlaTreeVerifyParams& params,
                                            typename C::SharedMemoryPlan& smem, int segment,
                                            int tile, int lane) {
  const float scale = params.score_scale * kLog2e;
  arch::mbarrier_wait(arch::smem_address(&smem.bar_scores_full[tile % kSoftmaxWarps]),
                      tile / kSoftmaxWarps & 1);
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    const float4 a = smem.scores[0][j][lane], b = smem.scores[1][j][lane];
    float2 row_scale = make_float2(scale, scale);
    if constexpr (C::Kv::kFp8) {
      const float2 q_scale = *reinterpret_cast<const float2*>(
          &smem.q_scale[segment % C::kLiveSegments][first_row_of_lane(j, lane)]);
      row_scale = make_float2(__fdividef(scale, q_scale.x), __fdividef(scale, q_scale.y));
    }
    r_s[j][0] = (a.x + b.x) * row_scale.x, r_s[j][1] = (a.y + b.y) * row_scale.y,
    r_s[j][2] = (a.z + b.z) * row_scale.x, r_s[j][3] = (a.w + b.w) * row_scale.y;
  }
  __syncwarp();
  if (lane == 0) arch::mbarrier_arrive(arch::smem_address(&smem.bar_scores_empty[tile % kPairs]));
}

template <class C>
__device__ __forceinline__ void cap_scores(Scores<C>& r_s, const MlaTreeVerifyParams& params) {
  if (params.logit_cap == 0.f) return;
  const float cap = params.logit_cap * kLog2e;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)  // cap * tanh(s / cap)
      r_s[j][i] =
          cap - __fdividef(2.f * cap, 1.f + arch::exp2_approx(2.f / params.logit_cap * r_s[j][i]));
  }
}

// The keys of the tile that the tree or the end of the request hides: bit 4 j + i of the lane for
// element i of block j. Read before the scores are there. Only tiles past the prefix have any.
template <class C>
__device__ __forceinline__ uint32_t find_hidden(const MlaTreeVerifyParams& params,
                                                const Segment& segment, int tile) {
  const int first_key = (segment.first_tile + tile) * kTileTokens -
                        segment.prefix;  // of the tile; negative: a prefix token
  if (first_key + kTileTokens <= 0) return 0;
  const int lane = arch::thread_index() % kWarp, end_key = segment.num_tokens - segment.prefix;
  const float heads_inverse = __fdividef(1.f, params.h_q);
  uint32_t hidden = 0;
#pragma unroll 1
  for (int j = C::kRowBlocks - 1; j >= 0; --j) {
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const int key = first_key + lane / 4 + i / 2 * 8,
                row = blockIdx.x * C::kRows + first_row_of_lane(j, lane) + i % 2;
      const bool visible =
          key < 0 || (key < end_key && row < params.s_q * params.h_q &&
                      draft_key_visible(params, segment, position_of_row(row, heads_inverse), key));
      hidden = 2 * hidden + !visible;
    }
  }
  return hidden;
}

template <class C>
__device__ __forceinline__ void hide(Scores<C>& r_s, uint32_t hidden) {
  if (hidden == 0) return;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (hidden >> (4 * j + i) & 1) r_s[j][i] = -INFINITY;
  }
}

// Raises row_max to the largest score of the tile where that has outgrown it, and leaves the
// factors that O must take.
template <class C>
__device__ __forceinline__ void raise_row_max(float2 (&r_max)[C::kRowBlocks], const Scores<C>& r_s,
                                              typename C::SharedMemoryPlan& smem, int segment,
                                              int stage, int lane) {
  float* row_max = smem.row_max[segment % C::kLiveSegments];
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    float2 top = make_float2(fmaxf(r_s[j][0], r_s[j][2]), fmaxf(r_s[j][1], r_s[j][3]));
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2) {
      top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, distance));
      top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, distance));
    }
    const float2 old = r_max[j];
    // Not the expressions of settle_row_max, whose values would wait in registers until here.
    if (top.x - old.x > C::Kv::kRescaleAt) r_max[j].x = top.x;
    if (top.y - old.y > C::Kv::kRescaleAt) r_max[j].y = top.y;
    if (lane < 4) {
      *reinterpret_cast<float2*>(&row_max[first_row_of_lane(j, lane)]) = r_max[j];
      *reinterpret_cast<float2*>(&smem.rescale[stage][first_row_of_lane(j, lane)]) =
          make_float2(r_max[j].x == old.x ? 1.f : arch::exp2_approx(old.x - r_max[j].x),
                      r_max[j].y == old.y ? 1.f : arch::exp2_approx(old.y - r_max[j].y));
    }
  }
}

// All tiles must agree on row_max, so it is settled in their order. Mostly one vote and no change.
template <class C>
__device__ __forceinline__ void settle_row_max(float2 (&r_max)[C::kRowBlocks], const Scores<C>& r_s,
                                               typename C::SharedMemoryPlan& smem, int segment,
                                               int tile, bool first, int stage, int lane) {
  if (const int before = tile - 1; before >= 0)
    arch::mbarrier_wait(arch::smem_address(&smem.bar_row_max[before % kSoftmaxWarps]),
                        before / kSoftmaxWarps & 1);
  bool outgrown = first;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    r_max[j] = *reinterpret_cast<const float2*>(
        &smem.row_max[segment % C::kLiveSegments][first_row_of_lane(j, lane)]);
    if (first) r_max[j] = make_float2(-INFINITY, -INFINITY);
    const float2 limit =
        make_float2(r_max[j].x + C::Kv::kRescaleAt, r_max[j].y + C::Kv::kRescaleAt);
    outgrown |=
        r_s[j][0] > limit.x || r_s[j][2] > limit.x || r_s[j][1] > limit.y || r_s[j][3] > limit.y;
  }
  const bool any = __any_sync(~0u, outgrown);
  if (any) raise_row_max<C>(r_max, r_s, smem, segment, stage, lane);
  __syncwarp();
  if (lane == 0) {
    smem.rescaled[stage] = any && !first;
    arch::mbarrier_arrive(arch::smem_address(&smem.bar_row_max[tile % kSoftmaxWarps]));
  }
}

// P[token, row] over the rotary part of the tile, which both halves have read.
template <class C>
__device__ __forceinline__ void write_p(const Scores<C>& r_s, const float2 (&r_max)[C::kRowBlocks],
                                        typename C::SharedMemoryPlan& smem, int stage, int lane) {
  const int g = lane / 4, t = lane % 4;
  const uint32_t row =
      arch::smem_address(smem.stages[stage]) + g * C::kPitch + C::kValueBytes + 4 * t;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    const float even = r_max[j].x == -INFINITY ? 0.f : r_max[j].x,
                odd = r_max[j].y == -INFINITY ? 0.f : r_max[j].y;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // token g + 8 i
      const float a = arch::exp2_approx(r_s[j][2 * i] - even),
                  b = arch::exp2_approx(r_s[j][2 * i + 1] - odd);
      arch::store_shared(row + swizzle(j, g) + i * 8 * C::kPitch,
                         C::Kv::kFp8 ? arch::pack_f16(a, b) : arch::pack_bf16(a, b));
    }
  }
  __syncwarp();
  if (lane == 0) arch::mbarrier_arrive(arch::smem_address(&smem.bar_p_full[stage]));
}

template <class C>
__device__ __forceinline__ void softmax_segment(const MlaTreeVerifyParams& params,
                                                const Segment& segment,
                                                typename C::SharedMemoryPlan& smem, int warp) {
  if (params.status != nullptr && arch::thread_index() % kWarp == 0 && warp == 0 &&
      !mask_block_is_complete(params, segment))
    atomicOr(params.status, kMaskClamped);
  if constexpr (C::Kv::kFp8) scale_q<C>(smem, segment, warp);
  const int first =
      (warp - segment.tile) & (kSoftmaxWarps - 1);  // of the segment, that is this warp's
  Stage<C> stage(segment.ring + first);
  for (int tile = first; tile < segment.num_tiles; tile += kSoftmaxWarps) {
    const uint32_t hidden = find_hidden<C>(params, segment, tile);
    const int lane =
        arch::thread_index() % kWarp;  // here, or its products would be held across the loop
    Scores<C> r_s;
    float2 r_max[C::kRowBlocks];
    take_scores<C>(r_s, params, smem, segment.number, segment.tile + tile, lane);
    cap_scores<C>(r_s, params);
    hide<C>(r_s, hidden);
    settle_row_max<C>(r_max, r_s, smem, segment.number, segment.tile + tile, tile == 0, stage.index,
                      arch::thread_index() % kWarp);
    write_p<C>(r_s, r_max, smem, stage.index, arch::thread_index() % kWarp);
    stage.template advance<kSoftmaxWarps>();
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
