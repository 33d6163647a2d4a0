// SPDX-License-Identifier: Apache-2.0
// Score warps: S^T[token, row] = K Q^T.
#pragma once
#include "arch/barrier.cuh"
#include "arch/convert.cuh"
#include "arch/ldmatrix.cuh"
#include "arch/mma.cuh"
#include "mla_tree_verify/load.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

// This warp's half of Q as MMA B fragments: [step][row block][2]. They stay in registers for the
// whole segment.
template <class C>
using QFragments = uint32_t[C::kSteps][C::kRowBlocks][2];

// Step i of half h covers, for bf16, chunks 4 i + 2 h and + 1 of a row of Q.
template <class C, int kHalf>
__device__ __forceinline__ void load_q_fragments_bf16(QFragments<C>& r_q,
                                                      typename C::SharedMemoryPlan& smem) {
  const int lane = arch::thread_index() % kWarp;
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

// For fp8 a step covers one chunk of a KV row, 16 columns, of which lane 4 g + t holds 4 t .. 4 t
// + 3. Scaled fp16.
template <class C, int kHalf>
__device__ __forceinline__ void load_q_fragments_fp8(QFragments<C>& r_q,
                                                     typename C::SharedMemoryPlan& smem) {
  const int lane = arch::thread_index() % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    const char* row =
        reinterpret_cast<const char*>(smem.kv[C::kEarlyTiles]) + (8 * j + g) * kQRowBytes;
    const float scale = smem.q_scale[8 * j + g];
#pragma unroll
    for (int i = 0; i < C::kSteps; ++i) {
      const int kv_chunk = 4 * (i / 2) + 2 * kHalf + i % 2;
      const uint2 v =
          *reinterpret_cast<const uint2*>(row + swizzle(2 * kv_chunk + t / 2, g) + t % 2 * 8);
      const float2 a = arch::unpack_bf16(v.x), b = arch::unpack_bf16(v.y);
      r_q[i][j][0] = arch::pack_f16(a.x * scale, a.y * scale);
      r_q[i][j][1] = arch::pack_f16(b.x * scale, b.y * scale);
    }
  }
}

// All but the load warps, fp8: an exact power of two for each row of Q, so that its largest element
// lies in [2^14, 2^15).
template <class C>
__device__ __forceinline__ void find_q_scales(typename C::SharedMemoryPlan& smem) {
  const int thread = arch::thread_index(), lane = thread % kWarp;
  for (int r = thread / kWarp; r < C::kRows; r += kMathThreads / kWarp) {
    const auto* row =
        reinterpret_cast<const uint32_t*>(smem.kv[C::kEarlyTiles]) + r * (kQRowBytes / 4);
    uint32_t largest = 0;
    for (int i = lane; i < kQRowBytes / 4; i += kWarp)
      largest = __vmaxu2(largest, row[i] & 0x7fff7fffu);
    largest = __reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16));
    const int exponent = static_cast<int>(largest >> 7) - 127;
    if (lane == 0)
      smem.q_scale[r] = __int_as_float((min(max(14 - exponent, -120), 120) + 127) << 23);
  }
}

// Half of each score of the tile, over this warp's columns.
template <class C, int kHalf>
__device__ __forceinline__ void qk_gemm(float (&r_s)[C::kRowBlocks][4], const QFragments<C>& r_q,
                                        uint32_t s_kv, int lane, int always) {
  const uint32_t row =
      s_kv + lane % 16 * C::kPitch + ((2 * kHalf + lane / 16) ^ lane % 8) * kChunkBytes;
  const uint32_t places[2] = {
      row, row ^ (4 * kChunkBytes)};  // chunks 4 i + 2 half + (0, 1) of a row for even i, for odd i
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) r_s[j][0] = r_s[j][1] = r_s[j][2] = r_s[j][3] = 0.f;
  constexpr int kLoads = C::Kv::kRowChunks / 4;  // 18, or 9 of two steps each
  constexpr int kAhead = C::Kv::kFp8 ? 1 : 2;    // loads in flight
  uint32_t r_k[kAhead][4];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) arch::ldmatrix_x4(r_k[i], places[i % 2] + i / 2 * kGroupBytes);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    uint32_t(&r)[4] = r_k[i % kAhead];
    if constexpr (C::Kv::kFp8) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        arch::e4m3_to_f16(r[2 * half], a[0], a[2]);
        arch::e4m3_to_f16(r[2 * half + 1], a[1], a[3]);
#pragma unroll
        for (int j = 0; j < C::kRowBlocks; ++j)
          arch::mma_f16(r_s[j], a, r_q[2 * i + half][j][0], r_q[2 * i + half][j][1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < C::kRowBlocks; ++j) arch::mma_bf16(r_s[j], r, r_q[i][j][0], r_q[i][j][1]);
    }
    if (i + kAhead < kLoads)
      arch::ldmatrix_x4_if(r, places[(i + kAhead) % 2] + (i + kAhead) / 2 * kGroupBytes, always);
  }
}

// Every second tile of the segment, one half of the columns.
template <class C, int kHalf>
__device__ __forceinline__ void run_score_warp(const MlaTreeVerifyParams& params,
                                               const Segment& segment,
                                               typename C::SharedMemoryPlan& smem, int pair) {
  QFragments<C> r_q;
  if constexpr (C::Kv::kFp8)
    load_q_fragments_fp8<C, kHalf>(r_q, smem);
  else
    load_q_fragments_bf16<C, kHalf>(r_q, smem);
  arch::named_barrier_arrive(kBarQRead, 2 * kWarpgroup);

  const int num_tiles = segment.num_tiles;
  int stage = pair;
  uint32_t parity = 0;
  for (int tile = pair; tile < num_tiles; tile += kPairs) {
    const int lane =
        arch::thread_index() % kWarp;  // here, or its products would be held across the loop
    float r_s[C::kRowBlocks][4];
    arch::mbarrier_wait(arch::smem_address(&smem.bar_kv_full[stage]), parity);
    qk_gemm<C, kHalf>(r_s, r_q, arch::smem_address(smem.kv[stage]), lane, params.b);
    if (tile > 0)
      arch::mbarrier_wait(arch::smem_address(&smem.bar_scores_empty[1 - pair]),
                          (tile - 1) / kPairs & 1);
#pragma unroll
    for (int j = 0; j < C::kRowBlocks; ++j)
      smem.scores[kHalf][j][lane] = make_float4(r_s[j][0], r_s[j][1], r_s[j][2], r_s[j][3]);
    __syncwarp();
    if (lane == 0)
      arch::mbarrier_arrive(arch::smem_address(&smem.bar_scores_full[tile % kSoftmaxWarps]));
    stage += kPairs;
    if (stage >= C::kStages) stage -= C::kStages, parity ^= 1;
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
