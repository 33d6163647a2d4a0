// SPDX-License-Identifier: Apache-2.0
// Value warps: O^T[column, row] += V^T P^T for 128 value columns each.
#pragma once
#include "mla_tree_verify/score.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kColumnBlocks = kDvPerWarp / 16;  // MMA M tiles of a value warp
constexpr int kSumsPerWarp = (kMaxRowBlocks + kValueWarps - 1) / kValueWarps;

// Of lane 4 g + t: (column g or g + 8) x (row 2 t or 2 t + 1) of each block. For fp8 "g" and "g + 8" are 2 g and 2 g + 1.
template <class C>
using OFragments = float[kColumnBlocks][C::kRowBlocks][4];

template <class C>
__device__ __forceinline__ int o_column(int warp, int block, int lane, int upper) {
  return kDvPerWarp * warp + 16 * block + (C::Kv::kFp8 ? lane / 4 * 2 + upper : lane / 4 + 8 * upper);
}

// P of the tile as B fragments: two registers a row block.
template <class C>
__device__ __forceinline__ void load_p(uint32_t (&r_p)[C::kRowBlocks][2], uint32_t s_kv) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t row = s_kv + lane % 16 * C::kPitch + C::kValueBytes;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; j += 2) {
    uint32_t r[4];
    arch::ldmatrix_x4_trans(r, row + swizzle(j + lane / 16, lane % 8));
    r_p[j][0] = r[0], r_p[j][1] = r[1];
    if (j + 1 < C::kRowBlocks) r_p[j + 1][0] = r[2], r_p[j + 1][1] = r[3];
  }
}

template <class C>
__device__ __forceinline__ void rescale_o(OFragments<C>& r_o, float (&r_sum)[kSumsPerWarp], const typename C::SharedMemoryPlan& smem,
                                          int stage, int warp) {
  const int2 rescaled = smem.rescaled[stage];
  if (!(rescaled.x | rescaled.y)) return;
  const int g = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    if (!(j < C::kOwnFirst ? rescaled.x : rescaled.y)) continue;
    const float2 factor = *reinterpret_cast<const float2*>(&smem.rescale[stage][8 * j + 2 * t]);
    if (j % kValueWarps == warp) r_sum[j / kValueWarps] *= smem.rescale[stage][8 * j + g];
#pragma unroll
    for (int m = 0; m < kColumnBlocks; ++m) {
      r_o[m][j][0] *= factor.x, r_o[m][j][2] *= factor.x;
      r_o[m][j][1] *= factor.y, r_o[m][j][3] *= factor.y;
    }
  }
}

// Row sums of P as the MMA sees it. The value warps share the row blocks out.
template <class C>
__device__ __forceinline__ void add_row_sums(float (&r_sum)[kSumsPerWarp], const uint32_t (&r_p)[C::kRowBlocks][2], int warp) {
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    if (j % kValueWarps != warp) continue;
    const float2 a = C::Kv::kFp8 ? arch::unpack_f16(r_p[j][0]) : arch::unpack_bf16(r_p[j][0]);
    const float2 b = C::Kv::kFp8 ? arch::unpack_f16(r_p[j][1]) : arch::unpack_bf16(r_p[j][1]);
    r_sum[j / kValueWarps] += (a.x + a.y) + (b.x + b.y);
  }
}

template <class C>
__device__ __forceinline__ void pv_gemm(OFragments<C>& r_o, const uint32_t (&r_p)[C::kRowBlocks][2], uint32_t s_kv, int warp) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (C::Kv::kFp8) {
    // A 16-bit element of the transposed load is two columns of a token: split them into rows 2 g and 2 g + 1 of A.
    const uint32_t row = s_kv + lane % 16 * C::kPitch + kDvPerWarp * warp;
#pragma unroll
    for (int m = 0; m < kColumnBlocks; m += 2) {
      uint32_t r[4];
      arch::ldmatrix_x4_trans(r, row + swizzle(m + lane / 16, lane % 8));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        arch::e4m3_to_f16(__byte_perm(r[2 * half], 0, 0x3120), a[0], a[1]);
        arch::e4m3_to_f16(__byte_perm(r[2 * half + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
        for (int j = 0; j < C::kRowBlocks; ++j) arch::mma_f16(r_o[m + half][j], a, r_p[j][0], r_p[j][1]);
      }
    }
  } else {
    const uint32_t row = s_kv + (lane % 8 + lane / 16 * 8) * C::kPitch + 2 * kDvPerWarp * warp;
#pragma unroll
    for (int m = 0; m < kColumnBlocks; ++m) {
      uint32_t r[4];
      arch::ldmatrix_x4_trans(r, row + swizzle(2 * m + lane / 8 % 2, lane % 8));
#pragma unroll
      for (int j = 0; j < C::kRowBlocks; ++j) arch::mma_bf16(r_o[m][j], r, r_p[j][0], r_p[j][1]);
    }
  }
}

// Whole row sums into shared memory, for all value warps.
template <class C>
__device__ __forceinline__ void share_row_sums(const float (&r_sum)[kSumsPerWarp], typename C::SharedMemoryPlan& smem, int warp) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kSumsPerWarp; ++i) {
    const int j = i * kValueWarps + warp;
    float sum = r_sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (j < C::kRowBlocks && lane % 4 == 0) smem.row_sum[8 * j + lane / 4] = sum;
  }
  arch::named_barrier_sync(kBarValueWarps, kValueWarps * kWarp);
}

// The request has other segments: unnormalised O in fragment order, and (max, sum) of each row, for the merge kernel.
template <class C>
__device__ __forceinline__ void store_partial(const OFragments<C>& r_o, const MlaTreeVerifyParams& params, const Segment& segment,
                                              const typename C::SharedMemoryPlan& smem, int row_tile, int warp) {
  const int lane = threadIdx.x % kWarp;
  const int rows = params.s_q * params.h_q, row_tiles = num_row_tiles(rows);
  const int64_t tile = int64_t{segment.slot} * row_tiles + row_tile;
  auto* o = static_cast<float4*>(params.workspace) + tile * (C::kRows * kDv / 4) + warp * (kColumnBlocks * C::kRowBlocks * kWarp) + lane;
#pragma unroll
  for (int m = 0; m < kColumnBlocks; ++m) {
#pragma unroll
    for (int j = 0; j < C::kRowBlocks; ++j)
      o[(m * C::kRowBlocks + j) * kWarp] = make_float4(r_o[m][j][0], r_o[m][j][1], r_o[m][j][2], r_o[m][j][3]);
  }
  const int64_t slots = partial_slots(params.b, row_tiles, params.num_sms);
  auto* stats = reinterpret_cast<float2*>(static_cast<float*>(params.workspace) + slots * partial_o_floats(rows)) + tile * C::kRows;
  const int r = warp * kWarp + lane;
  if (r < C::kRows) stats[r] = make_float2(smem.row_max[r], smem.row_sum[r]);
}

// The request has this segment alone: its result.
template <class C>
__device__ __forceinline__ void store_output(const OFragments<C>& r_o, const MlaTreeVerifyParams& params, const Segment& segment,
                                             const typename C::SharedMemoryPlan& smem, int first_row, int warp) {
  const int lane = threadIdx.x % kWarp, t = lane % 4;
  const int num_rows = params.s_q * params.h_q;
  auto* out = static_cast<__nv_bfloat16*>(params.out) + int64_t{segment.request} * num_rows * kDv;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int r = 8 * j + 2 * t + odd, row = first_row + r;
      const float sum = smem.row_sum[r], factor = sum > 0.f ? params.v_scale / sum : 0.f;
      if (row >= num_rows) continue;
#pragma unroll
      for (int m = 0; m < kColumnBlocks; ++m) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          out[int64_t{row} * kDv + o_column<C>(warp, m, lane, upper)] = __float2bfloat16(sum == 0.f ? 0.f : r_o[m][j][2 * upper + odd] * factor);
      }
    }
  }
  const int r = warp * kWarp + lane, row = first_row + r;
  if (params.lse != nullptr && r < C::kRows && row < num_rows)
    params.lse[int64_t{segment.request} * num_rows + row] = (smem.row_max[r] + log2f(smem.row_sum[r])) / kLog2e;
}

// Every tile of the segment, 128 columns of the value.
template <class C>
__device__ __forceinline__ void run_value_warp(const MlaTreeVerifyParams& params, const Segment& segment,
                                               typename C::SharedMemoryPlan& smem, int warp) {
  OFragments<C> r_o;
#pragma unroll
  for (int m = 0; m < kColumnBlocks; ++m) {
#pragma unroll
    for (int j = 0; j < C::kRowBlocks; ++j) r_o[m][j][0] = r_o[m][j][1] = r_o[m][j][2] = r_o[m][j][3] = 0.f;
  }
  float r_sum[kSumsPerWarp] = {};

  const int num_tiles = segment.num_tiles;
  int stage = 0;
  uint32_t parity = 0;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const uint32_t s_kv = arch::smem_address(smem.kv[stage]);
    uint32_t r_p[C::kRowBlocks][2];
    arch::mbarrier_wait(arch::smem_address(&smem.bar_p_full[stage]), parity);
    load_p<C>(r_p, s_kv);
    rescale_o<C>(r_o, r_sum, smem, stage, warp);
    pv_gemm<C>(r_o, r_p, s_kv, warp);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arch::mbarrier_arrive(arch::smem_address(&smem.bar_kv_empty[stage]));
    add_row_sums<C>(r_sum, r_p, warp);
    if (++stage == C::kStages) stage = 0, parity ^= 1;
  }
  arch::launch_next_kernel();
  share_row_sums<C>(r_sum, smem, warp);
  if (segment.num_parts == 1) store_output<C>(r_o, params, segment, smem, blockIdx.x * C::kRows, warp);
  else store_partial<C>(r_o, params, segment, smem, blockIdx.x, warp);
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
