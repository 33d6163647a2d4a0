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

// Adds the halves and frees their place.
template <class C>
__device__ __forceinline__ void take_scores(Scores<C>& r_s, typename C::SharedMemoryPlan& smem,
                                            int tile, int lane) {
  arch::mbarrier_wait(arch::smem_address(&smem.bar_scores_full[tile % kSoftmaxWarps]),
                      tile / kSoftmaxWarps & 1);
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    const float4 a = smem.scores[0][j][lane], b = smem.scores[1][j][lane];
    r_s[j][0] = a.x + b.x, r_s[j][1] = a.y + b.y, r_s[j][2] = a.z + b.z, r_s[j][3] = a.w + b.w;
  }
  __syncwarp();
  if (lane == 0) arch::mbarrier_arrive(arch::smem_address(&smem.bar_scores_empty[tile % kPairs]));
}

// Into units of log2.
template <class C>
__device__ __forceinline__ void scale_and_cap(Scores<C>& r_s, const MlaTreeVerifyParams& params,
                                              const typename C::SharedMemoryPlan& smem, int lane) {
  const float scale = params.score_scale * kLog2e;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    float2 row_scale = make_float2(scale, scale);
    if constexpr (C::Kv::kFp8) {
      const float2 q_scale =
          *reinterpret_cast<const float2*>(&smem.q_scale[first_row_of_lane(j, lane)]);
      row_scale = make_float2(__fdividef(scale, q_scale.x), __fdividef(scale, q_scale.y));
    }
    r_s[j][0] *= row_scale.x, r_s[j][1] *= row_scale.y, r_s[j][2] *= row_scale.x,
        r_s[j][3] *= row_scale.y;
  }
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

// What the tree or the end of the request hides becomes -inf. Only tiles past the prefix have any.
template <class C>
__device__ __forceinline__ void apply_mask(Scores<C>& r_s, const Segment& segment,
                                           const typename C::SharedMemoryPlan& smem, int tile,
                                           int lane) {
  const int first_key = (segment.first_tile + tile) * kTileTokens -
                        segment.prefix;  // of the tile; negative: a prefix token
  if (first_key + kTileTokens <= 0) return;
  const int end_key = segment.num_tokens - segment.prefix;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = first_key + lane / 4 + i / 2 * 8;
    if (key < 0) continue;
    const int word = min(key, kMaxDraft - 1) / 32, bit = key % 32;
#pragma unroll
    for (int j = 0; j < C::kRowBlocks; ++j) {
      const bool visible =
          key < end_key && smem.tree_mask[first_row_of_lane(j, lane) + i % 2][word] >> bit & 1;
      if (!visible) r_s[j][i] = -INFINITY;
    }
  }
}

// Raises row_max to the largest score of the tile where that has outgrown it, and leaves the
// factors that O must take.
template <class C>
__device__ __forceinline__ void raise_row_max(float2 (&r_max)[C::kRowBlocks], const Scores<C>& r_s,
                                              typename C::SharedMemoryPlan& smem, int stage,
                                              int lane) {
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    float2 top = make_float2(fmaxf(r_s[j][0], r_s[j][2]), fmaxf(r_s[j][1], r_s[j][3]));
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2) {
      top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, distance));
      top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, distance));
    }
    const float2 old = r_max[j];
    if (top.x > old.x + C::Kv::kRescaleAt) r_max[j].x = top.x;
    if (top.y > old.y + C::Kv::kRescaleAt) r_max[j].y = top.y;
    if (lane < 4) {
      *reinterpret_cast<float2*>(&smem.row_max[first_row_of_lane(j, lane)]) = r_max[j];
      *reinterpret_cast<float2*>(&smem.rescale[stage][first_row_of_lane(j, lane)]) =
          make_float2(r_max[j].x == old.x ? 1.f : arch::exp2_approx(old.x - r_max[j].x),
                      r_max[j].y == old.y ? 1.f : arch::exp2_approx(old.y - r_max[j].y));
    }
    __syncwarp();  // one block at a time: no registers to spare
  }
}

// All tiles must agree on row_max, so it is settled in their order. Mostly one vote and no change.
template <class C>
__device__ __forceinline__ void settle_row_max(float2 (&r_max)[C::kRowBlocks], const Scores<C>& r_s,
                                               typename C::SharedMemoryPlan& smem, int tile,
                                               int stage, int lane) {
  if (const int before = tile - 1; before >= 0)
    arch::mbarrier_wait(arch::smem_address(&smem.bar_row_max[before % kSoftmaxWarps]),
                        before / kSoftmaxWarps & 1);
  bool outgrown = false;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    r_max[j] = *reinterpret_cast<const float2*>(&smem.row_max[first_row_of_lane(j, lane)]);
    outgrown |= fmaxf(r_s[j][0], r_s[j][2]) > r_max[j].x + C::Kv::kRescaleAt;
    outgrown |= fmaxf(r_s[j][1], r_s[j][3]) > r_max[j].y + C::Kv::kRescaleAt;
  }
  const bool any = __any_sync(~0u, outgrown);
  if (any) raise_row_max<C>(r_max, r_s, smem, stage, lane);
  __syncwarp();
  if (lane == 0) {
    smem.rescaled[stage] = any;
    arch::mbarrier_arrive(arch::smem_address(&smem.bar_row_max[tile % kSoftmaxWarps]));
  }
}

// P[token, row] over the rotary part of the tile, which both halves have read.
template <class C>
__device__ __forceinline__ void write_p(const Scores<C>& r_s, const float2 (&r_max)[C::kRowBlocks],
                                        typename C::SharedMemoryPlan& smem, int stage, int lane) {
  const int g = lane / 4, t = lane % 4;
  const uint32_t row = arch::smem_address(smem.kv[stage]) + g * C::kPitch + C::kValueBytes + 4 * t;
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
__device__ __forceinline__ void run_softmax_warp(const MlaTreeVerifyParams& params,
                                                 const Segment& segment,
                                                 typename C::SharedMemoryPlan& smem, int warp) {
  int stage = warp;
  for (int tile = warp; tile < segment.num_tiles; tile += kSoftmaxWarps) {
    const int lane =
        arch::thread_index() % kWarp;  // here, or its products would be held across the loop
    Scores<C> r_s;
    float2 r_max[C::kRowBlocks];
    take_scores<C>(r_s, smem, tile, lane);
    scale_and_cap<C>(r_s, params, smem, lane);
    apply_mask<C>(r_s, segment, smem, tile, lane);
    settle_row_max<C>(r_max, r_s, smem, tile, stage, arch::thread_index() % kWarp);
    write_p<C>(r_s, r_max, smem, stage, arch::thread_index() % kWarp);
    stage += kSoftmaxWarps;
    if (stage >= C::kStages) stage -= C::kStages;
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
