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

template <class C>
__device__ __forceinline__ uint32_t scaled_q_barrier(typename C::SharedMemoryPlan& smem,
                                                     const Segment& segment) {
  return arch::smem_address(&smem.bar_q_scaled[segment.number % C::kLiveSegments]);
}

template <class C>
__device__ __forceinline__ void wait_for_scaled_q(typename C::SharedMemoryPlan& smem,
                                                  const Segment& segment) {
  arch::mbarrier_wait(scaled_q_barrier<C>(smem, segment), segment.number / C::kLiveSegments & 1);
}

// fp8, value warps and the softmax warps that have a row block: each row of Q times an exact power
// of two, so that its largest element lies in [2^14, 2^15), from bf16 to fp16 in place. Not the
// other softmax warps: they go on to the last segment at once, and a warp that is more than a round
// of the ring ahead takes another phase of bar_full for its own.
template <class C>
__device__ __forceinline__ void scale_q(typename C::SharedMemoryPlan& smem, const Segment& segment,
                                        int warp) {
  const int lane = arch::thread_index() % kWarp;
  constexpr int kWarps = C::kBusySoftmaxWarps + kValueWarps, kWords = kQRowBytes / 4;
#pragma unroll 1
  for (int r = warp; r < C::kRows; r += kWarps) {
    const Stage<C> stage(segment.ring - C::kQStages + r / C::kQRowsPerStage);
    arch::mbarrier_wait(arch::smem_address(&smem.bar_full[stage.index]), stage.parity);
    auto* row =
        reinterpret_cast<uint32_t*>(smem.stages[stage.index] + r % C::kQRowsPerStage * kQRowBytes);
    uint32_t words[kWords / kWarp], largest = 0;
#pragma unroll
    for (int i = 0; i < kWords / kWarp; ++i) {
      words[i] = row[i * kWarp + lane];
      largest = max(largest, max(words[i] & 0x7fffu, words[i] >> 16 & 0x7fffu));
    }
    const int exponent = static_cast<int>(__reduce_max_sync(~0u, largest) >> 7) - 127;
    const float scale = __int_as_float((min(max(14 - exponent, -120), 120) + 127) << 23);
#pragma unroll
    for (int i = 0; i < kWords / kWarp; ++i) {
      const float2 v = arch::unpack_bf16(words[i]);
      row[i * kWarp + lane] = arch::pack_f16(v.x * scale, v.y * scale);
    }
    if (lane == 0) smem.q_scale[segment.number % C::kLiveSegments][r] = scale;
  }
  arch::mbarrier_arrive_warp(scaled_q_barrier<C>(smem, segment), lane);
  // For the scales of rows that other warps had.
  wait_for_scaled_q<C>(smem, segment);
}

// Rows of one block of Q. For bf16, step i of half h covers chunks 4 i + 2 h and + 1 of a row of Q.
template <class C, int kHalf>
__device__ __forceinline__ void load_q_block_bf16(QFragments<C>& r_q, const unsigned char* rows,
                                                  int j, int lane) {
  const uint32_t s_q = arch::smem_address(rows) + lane % 8 * kQRowBytes;
#pragma unroll
  for (int i = 0; i < C::kSteps; i += 2) {
    const int chunk = 4 * (i + lane / 16) + 2 * kHalf + lane / 8 % 2;
    uint32_t r[4];
    arch::ldmatrix_x4(r, s_q + swizzle(chunk, lane % 8));
    r_q[i][j][0] = r[0], r_q[i][j][1] = r[1];
    r_q[i + 1][j][0] = r[2], r_q[i + 1][j][1] = r[3];
  }
}

// For fp8 a step covers one chunk of a KV row, 16 columns, of which lane 4 g + t holds 4 t .. 4 t
// + 3.
template <class C, int kHalf>
__device__ __forceinline__ void load_q_block_fp8(QFragments<C>& r_q, const unsigned char* rows,
                                                 int j, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < C::kSteps; ++i) {
    const int kv_chunk = 4 * (i / 2) + 2 * kHalf + i % 2;
    const uint2 v = *reinterpret_cast<const uint2*>(rows + g * kQRowBytes +
                                                    swizzle(2 * kv_chunk + t / 2, g) + t % 2 * 8);
    r_q[i][j][0] = v.x, r_q[i][j][1] = v.y;
  }
}

template <class C, int kHalf>
__device__ __forceinline__ void take_q(QFragments<C>& r_q, typename C::SharedMemoryPlan& smem,
                                       const Segment& segment, int pair) {
  const int lane = arch::thread_index() % kWarp;
  constexpr int kBlocksPerStage = C::kQRowsPerStage / 8;
  Stage<C> stage(segment.ring - C::kQStages);
  if constexpr (C::Kv::kFp8) wait_for_scaled_q<C>(smem, segment);
#pragma unroll
  for (int first = 0; first < C::kRowBlocks; first += kBlocksPerStage) {
    arch::mbarrier_wait(arch::smem_address(&smem.bar_full[stage.index]), stage.parity);
#pragma unroll
    for (int j = first; j < first + kBlocksPerStage && j < C::kRowBlocks; ++j) {
      const unsigned char* rows = smem.stages[stage.index] + j % kBlocksPerStage * 8 * kQRowBytes;
      if constexpr (C::Kv::kFp8)
        load_q_block_fp8<C, kHalf>(r_q, rows, j, lane);
      else
        load_q_block_bf16<C, kHalf>(r_q, rows, j, lane);
    }
    // Every round of the ring completes a phase of bar_p_full, this one before the stage has its
    // next tile: a stage is free only when a score warp has seen it.
    if (pair * kHalves + kHalf < C::kBusySoftmaxWarps)
      arch::mbarrier_arrive_warp(arch::smem_address(&smem.bar_p_full[stage.index]), lane);
    stage.template advance<1>();
  }
  Stage<C> taken(segment.ring - C::kQStages);
#pragma unroll
  for (int i = 0; i < C::kQStages; ++i) {
    arch::mbarrier_wait(arch::smem_address(&smem.bar_p_full[taken.index]), taken.parity);
    arch::mbarrier_arrive_warp(arch::smem_address(&smem.bar_empty[taken.index]), lane);
    taken.template advance<1>();
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

// Every second tile of the block, one half of the columns.
template <class C, int kHalf>
__device__ __forceinline__ void score_segment(const MlaTreeVerifyParams& params,
                                              const Segment& segment,
                                              typename C::SharedMemoryPlan& smem, int pair) {
  QFragments<C> r_q;
  take_q<C, kHalf>(r_q, smem, segment, pair);
  const int end = segment.tile + segment.num_tiles,
            first = segment.tile + ((segment.tile ^ pair) & 1);
  Stage<C> stage(segment.ring + first - segment.tile);
  for (int tile = first; tile < end; tile += kPairs) {
    float r_s[C::kRowBlocks][4];
    arch::mbarrier_wait(arch::smem_address(&smem.bar_full[stage.index]), stage.parity);
    qk_gemm<C, kHalf>(r_s, r_q, arch::smem_address(smem.stages[stage.index]),
                      arch::thread_index() % kWarp, params.b);
    if (tile > 0)
      arch::mbarrier_wait(arch::smem_address(&smem.bar_scores_empty[1 - pair]),
                          (tile - 1) / kPairs & 1);
    const int lane = arch::thread_index() % kWarp;  // not held across the loop
#pragma unroll
    for (int j = 0; j < C::kRowBlocks; ++j)
      smem.scores[kHalf][j][lane] = make_float4(r_s[j][0], r_s[j][1], r_s[j][2], r_s[j][3]);
    arch::mbarrier_arrive_warp(arch::smem_address(&smem.bar_scores_full), lane);
    stage.template advance<kPairs>();
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
