// SPDX-License-Identifier: Apache-2.0
// Score warps: S^T[token, row] = K Q^T, mask, softmax numerators P. One function a step.
#pragma once
#include "arch/barrier.cuh"
#include "arch/convert.cuh"
#include "arch/ldmatrix.cuh"
#include "arch/mma.cuh"
#include "mla_tree_verify/load.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr float kLog2e = 1.4426950408889634f;

// This warp's half of Q as MMA B fragments: [step][row block][2]. They stay in registers for the whole segment.
template <class C>
using QFragments = uint32_t[C::kSteps][C::kRowBlocks][2];

// Step i of half h covers, for bf16, chunks 4 i + 2 h and + 1 of a row of Q.
template <class C, int kHalf>
__device__ __forceinline__ void load_q_fragments_bf16(QFragments<C>& r_q, typename C::SharedMemoryPlan& smem) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t s_q = arch::smem_address(smem.kv[C::kEarlyTiles]) + lane % 8 * kQRowBytes;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < C::kSteps; i += 2) {
      const int chunk = 4 * (i + lane / 16) + 2 * kHalf + lane / 8 % 2;
      uint32_t r[4];
      arch::ldmatrix_x4(r, s_q + j * 8 * kQRowBytes + swizzle(chunk, lane % 8));
      r_q[i][j][0] = r[0], r_q[i][j][1] = r[1];
      r_q[i + 1][j][0] = r[2], r_q[i + 1][j][1] = r[3];
    }
  }
}

// For fp8 a step covers one chunk of a KV row, 16 columns, of which lane 4 g + t holds 4 t .. 4 t + 3. Scaled fp16.
template <class C, int kHalf>
__device__ __forceinline__ void load_q_fragments_fp8(QFragments<C>& r_q, typename C::SharedMemoryPlan& smem) {
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    const char* row = reinterpret_cast<const char*>(smem.kv[C::kEarlyTiles]) + (8 * j + g) * kQRowBytes;
    const float scale = smem.q_scale[8 * j + g];
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      const int kv_chunk = 4 * (i / 2) + 2 * kHalf + i % 2;
      const uint2 v = *reinterpret_cast<const uint2*>(row + swizzle(2 * kv_chunk + t / 2, g) + t % 2 * 8);
      const float2 a = arch::unpack_bf16(v.x), b = arch::unpack_bf16(v.y);
      r_q[i][j][0] = arch::pack_f16(a.x * scale, a.y * scale);
      r_q[i][j][1] = arch::pack_f16(b.x * scale, b.y * scale);
    }
  }
}

// Score and value warps, fp8: an exact power of two for each row of Q, so that its largest element lies in [2^14, 2^15).
template <class C>
__device__ __forceinline__ void find_q_scales(typename C::SharedMemoryPlan& smem) {
  const int lane = threadIdx.x % kWarp;
  for (int r = threadIdx.x / kWarp; r < C::kRows; r += kMathThreads / kWarp) {
    const auto* row = reinterpret_cast<const uint32_t*>(smem.kv[C::kEarlyTiles]) + r * (kQRowBytes / 4);
    uint32_t largest = 0;
    for (int i = lane; i < kQRowBytes / 4; i += kWarp) largest = __vmaxu2(largest, row[i] & 0x7fff7fffu);
    largest = __reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16));
    const int exponent = static_cast<int>(largest >> 7) - 127;
    if (lane == 0) smem.q_scale[r] = __int_as_float((min(max(14 - exponent, -120), 120) + 127) << 23);
  }
}

// Half of each score of the tile, over this warp's columns.
template <class C, int kHalf>
__device__ __forceinline__ void qk_gemm(float (&r_s)[C::kRowBlocks][4], const QFragments<C>& r_q, uint32_t s_kv, int always) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t row = s_kv + lane % 16 * C::kPitch + ((2 * kHalf + lane / 16) ^ lane % 8) * kChunkBytes;
  const uint32_t places[2] = {row, row ^ (4 * kChunkBytes)};  // chunks 4 i + 2 half + (0, 1) of a row for even i, for odd i
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) r_s[j][0] = r_s[j][1] = r_s[j][2] = r_s[j][3] = 0.f;
  constexpr int kLoads = C::Kv::kRowChunks / 4;  // 18, or 9 of two steps each
  constexpr int kAhead = 3;
  uint32_t r_k[kAhead][4];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) arch::ldmatrix_x4(r_k[i], places[i % 2] + i / 2 * kGroupBytes);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    uint32_t(&r)[4] = r_k[i % kAhead];
    if constexpr (C::Kv::kFp8) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        arch::e4m3_to_f16(r[2 * half], a[half][0], a[half][2]);
        arch::e4m3_to_f16(r[2 * half + 1], a[half][1], a[half][3]);
#pragma unroll
        for (int j = 0; j < C::kRowBlocks; ++j) arch::mma_f16(r_s[j], a[half], r_q[2 * i + half][j][0], r_q[2 * i + half][j][1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < C::kRowBlocks; ++j) arch::mma_bf16(r_s[j], r, r_q[i][j][0], r_q[i][j][1]);
    }
    if (i + kAhead < kLoads) arch::ldmatrix_x4_if(r, places[(i + kAhead) % 2] + (i + kAhead) / 2 * kGroupBytes, always);
  }
}

// The row blocks whose softmax a half does.
template <class C, int kHalf>
struct Own {
  static constexpr int kBegin = kHalf == 0 ? 0 : C::kOwnFirst;
  static constexpr int kEnd = kHalf == 0 ? C::kOwnFirst : C::kRowBlocks;
  static constexpr int kCount = kEnd - kBegin;
};

// Adds the other half's share to the scores of the own row blocks, after giving away the share of the others.
template <class C, int kHalf>
__device__ __forceinline__ void exchange_scores(float (&r_s)[C::kRowBlocks][4], typename C::SharedMemoryPlan& smem, int pair,
                                                bool first, bool last) {
  using Mine = Own<C, kHalf>;
  using Theirs = Own<C, 1 - kHalf>;
  const int lane = threadIdx.x % kWarp;
  if (Theirs::kCount > 0) {
    if (!first) arch::named_barrier_sync(kBarExchangeFree + 2 * pair + (1 - kHalf), 2 * kWarp);
#pragma unroll
    for (int j = Theirs::kBegin; j < Theirs::kEnd; ++j) smem.exchange[pair][j][lane] = make_float4(r_s[j][0], r_s[j][1], r_s[j][2], r_s[j][3]);
  }
  arch::named_barrier_sync(kBarPairScores + pair, 2 * kWarp);
  if (Mine::kCount > 0) {
#pragma unroll
    for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
      const float4 v = smem.exchange[pair][j][lane];
      r_s[j][0] += v.x, r_s[j][1] += v.y, r_s[j][2] += v.z, r_s[j][3] += v.w;
    }
    if (!last) arch::named_barrier_arrive(kBarExchangeFree + 2 * pair + kHalf, 2 * kWarp);
  }
}

// Scores in units of log2, capped; those that the tree or the end of the request hides become -inf.
template <class C, int kHalf>
__device__ __forceinline__ void scale_and_mask(float (&r_s)[C::kRowBlocks][4], const MlaTreeVerifyParams& params, const Segment& segment,
                                               typename C::SharedMemoryPlan& smem, int tile, bool masked) {
  using Mine = Own<C, kHalf>;
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
  const float scale = params.score_scale * kLog2e;
#pragma unroll
  for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float row_scale = scale;
      if constexpr (C::Kv::kFp8) row_scale = __fdividef(scale, smem.q_scale[8 * j + 2 * t + i % 2]);
      r_s[j][i] *= row_scale;
    }
  }
  if (params.logit_cap > 0.f) {
    const float cap = params.logit_cap * kLog2e;
#pragma unroll
    for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i)  // cap * tanh(s / cap)
        r_s[j][i] = cap - __fdividef(2.f * cap, 1.f + arch::exp2_approx(2.f / params.logit_cap * r_s[j][i]));
    }
  }
  if (!masked) return;
  const int prefix = segment.prefix, num_tokens = segment.num_tokens;
  const int position = (segment.first_tile + tile) * kTileTokens;
#pragma unroll
  for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = position + g + i / 2 * 8, key = token - prefix;
      const bool visible = key < 0 || (token < num_tokens && smem.tree_mask[8 * j + 2 * t + i % 2][key / 32] >> (key % 32) & 1);
      if (!visible) r_s[j][i] = -INFINITY;
    }
  }
}

// Raises row_max where a score has outgrown it by 2^kRescaleAt, and leaves the factors that O must take. All warps of this
// half must agree on row_max, so the pairs do this in the order of the tiles. Mostly one vote and no change.
template <class C, int kHalf>
__device__ __forceinline__ void settle_row_max(float2 (&r_max)[C::kRowBlocks], const float (&r_s)[C::kRowBlocks][4],
                                               typename C::SharedMemoryPlan& smem, int pair, int tile, int stage) {
  using Mine = Own<C, kHalf>;
  const int lane = threadIdx.x % kWarp, t = lane % 4;
  if (tile > 0) arch::mbarrier_wait(arch::smem_address(&smem.bar_order[kHalf][1 - pair]), ((tile - 1) / kPairs) & 1);
  bool outgrown = false;
#pragma unroll
  for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
    r_max[j] = *reinterpret_cast<const float2*>(&smem.row_max[8 * j + 2 * t]);
    outgrown |= fmaxf(r_s[j][0], r_s[j][2]) > r_max[j].x + C::Kv::kRescaleAt;
    outgrown |= fmaxf(r_s[j][1], r_s[j][3]) > r_max[j].y + C::Kv::kRescaleAt;
  }
  const bool any = __any_sync(~0u, outgrown);
  if (any) {
#pragma unroll
    for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
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
        *reinterpret_cast<float2*>(&smem.row_max[8 * j + 2 * t]) = r_max[j];
        *reinterpret_cast<float2*>(&smem.rescale[stage][8 * j + 2 * t]) =
            make_float2(r_max[j].x == old.x ? 1.f : arch::exp2_approx(old.x - r_max[j].x),
                        r_max[j].y == old.y ? 1.f : arch::exp2_approx(old.y - r_max[j].y));
      }
    }
  }
  __syncwarp();
  if (lane == 0) {
    (kHalf == 0 ? smem.rescaled[stage].x : smem.rescaled[stage].y) = any;
    arch::mbarrier_arrive(arch::smem_address(&smem.bar_order[kHalf][pair]));
  }
}

// P[token, row] = 2^(s - row_max), over the rotary part of the tile, which both halves have read.
template <class C, int kHalf>
__device__ __forceinline__ void write_p(const float (&r_s)[C::kRowBlocks][4], const float2 (&r_max)[C::kRowBlocks], uint32_t s_kv) {
  using Mine = Own<C, kHalf>;
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = Mine::kBegin; j < Mine::kEnd; ++j) {
    const float even = r_max[j].x == -INFINITY ? 0.f : r_max[j].x, odd = r_max[j].y == -INFINITY ? 0.f : r_max[j].y;
    const uint32_t dst = s_kv + g * C::kPitch + C::kValueBytes + swizzle(j, g) + 4 * t;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // token g + 8 i
      const float a = arch::exp2_approx(r_s[j][2 * i] - even), b = arch::exp2_approx(r_s[j][2 * i + 1] - odd);
      const uint32_t packed = C::Kv::kFp8 ? arch::pack_f16(a, b) : arch::pack_bf16(a, b);
      arch::store_shared(dst + i * 8 * C::kPitch, packed);
    }
  }
}

// Every second tile of the segment, one half of the columns.
template <class C, int kHalf>
__device__ __forceinline__ void run_score_warp(const MlaTreeVerifyParams& params, const Segment& segment,
                                               typename C::SharedMemoryPlan& smem, int pair) {
  QFragments<C> r_q;
  if constexpr (C::Kv::kFp8) load_q_fragments_fp8<C, kHalf>(r_q, smem);
  else load_q_fragments_bf16<C, kHalf>(r_q, smem);
  arch::named_barrier_arrive(kBarQRead, kWarp * (kScoreWarps + kLoadWarps));

  const int num_tiles = segment.num_tiles;
  const int first_masked = segment.prefix / kTileTokens - segment.first_tile;  // tile with a draft key or past the end
  int stage = pair;
  uint32_t parity = 0;
  for (int tile = pair; tile < num_tiles; tile += kPairs) {
    const uint32_t s_kv = arch::smem_address(smem.kv[stage]);
    float r_s[C::kRowBlocks][4];
    float2 r_max[C::kRowBlocks];
    arch::mbarrier_wait(arch::smem_address(&smem.bar_kv_full[stage]), parity);
    qk_gemm<C, kHalf>(r_s, r_q, s_kv, params.b);
    exchange_scores<C, kHalf>(r_s, smem, pair, tile < kPairs, tile + kPairs >= num_tiles);
    if (Own<C, kHalf>::kCount > 0) {
      scale_and_mask<C, kHalf>(r_s, params, segment, smem, tile, tile >= first_masked);
      settle_row_max<C, kHalf>(r_max, r_s, smem, pair, tile, stage);
      write_p<C, kHalf>(r_s, r_max, s_kv);
      __syncwarp();
      if (threadIdx.x % kWarp == 0) arch::mbarrier_arrive(arch::smem_address(&smem.bar_p_full[stage]));
    }
    stage += kPairs;
    if (stage >= C::kStages) stage -= C::kStages, parity ^= 1;
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
