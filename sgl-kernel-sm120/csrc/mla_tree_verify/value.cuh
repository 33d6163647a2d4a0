// SPDX-License-Identifier: Apache-2.0
// Value warps: O^T[column, row] += V^T P^T for 128 value columns each.
#pragma once
#include "mla_tree_verify/softmax.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kColumnBlocks = kDvPerWarp / 16;  // MMA M tiles of a value warp

// Of lane 4 g + t: (column g or g + 8) x (row 2 t or 2 t + 1) of each block. For fp8 "g" and "g +
// 8" are 2 g and 2 g + 1.
template <class C>
using OFragments = float[kColumnBlocks][C::kRowBlocks][4];

template <class C>
__device__ __forceinline__ int o_column(int warp, int block, int lane, int upper) {
  return kDvPerWarp * warp + 16 * block +
         (C::Kv::kFp8 ? lane / 4 * 2 + upper : lane / 4 + 8 * upper);
}

// P of the tile as B fragments: two registers a row block.
template <class C>
__device__ __forceinline__ void load_p(uint32_t (&r_p)[C::kRowBlocks][2], uint32_t s_kv, int lane) {
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
__device__ __forceinline__ void rescale_o(OFragments<C>& r_o,
                                          const typename C::SharedMemoryPlan& smem, int stage,
                                          int lane) {
  static_assert(kSoftmaxWarps == sizeof(uint32_t), "one byte each");
  const uint32_t rescaled = *reinterpret_cast<const uint32_t*>(smem.rescaled[stage]);
  if (rescaled == 0) return;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    if ((rescaled >> 8 * (j % kSoftmaxWarps) & 1) == 0) continue;
    const float2 factor =
        *reinterpret_cast<const float2*>(&smem.rescale[stage][first_row_of_lane(j, lane)]);
#pragma unroll
    for (int m = 0; m < kColumnBlocks; ++m) {
      r_o[m][j][0] *= factor.x, r_o[m][j][2] *= factor.x;
      r_o[m][j][1] *= factor.y, r_o[m][j][3] *= factor.y;
    }
    __syncwarp();  // one block at a time: no registers to spare
  }
}

// A fragments of V^T: of the 8 column blocks (fp8: of the 4 pairs of them) so many at a time, from
// their load to their use.
constexpr int kVAhead = 3;
using VFragments = uint32_t[kVAhead][4];

// Where ldmatrix finds a column block of this warp, fp8: a pair of them.
template <class C>
__device__ __forceinline__ uint32_t v_place(uint32_t s_kv, int warp, int lane, int block) {
  if constexpr (C::Kv::kFp8) {
    const uint32_t row =
        s_kv + lane % 16 * C::kPitch + kDvPerWarp * warp + swizzle(lane / 16, lane % 8);
    return row ^ (2 * block * kChunkBytes);
  } else {
    const uint32_t row = s_kv + (lane % 8 + lane / 16 * 8) * C::kPitch + 2 * kDvPerWarp * warp +
                         swizzle(lane / 8 % 2, lane % 8);
    return (row ^ (block % 4 * 2 * kChunkBytes)) + block / 4 * kGroupBytes;
  }
}

template <class C>
__device__ __forceinline__ void load_first_v(VFragments& r_v, uint32_t s_kv, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kVAhead; ++i)
    arch::ldmatrix_x4_trans(r_v[i], v_place<C>(s_kv, warp, lane, i));
}

// `always` is not 0: arch/ldmatrix.cuh.
template <class C>
__device__ __forceinline__ void pv_gemm(OFragments<C>& r_o, VFragments& r_v,
                                        const uint32_t (&r_p)[C::kRowBlocks][2], uint32_t s_kv,
                                        int warp, int lane, int always) {
  constexpr int kBlocksPerLoad = C::Kv::kFp8 ? 2 : 1, kLoads = kColumnBlocks / kBlocksPerLoad;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    uint32_t(&v)[4] = r_v[i % kVAhead];
    if constexpr (C::Kv::kFp8) {
      // A 16-bit element of the transposed load is two columns of a token: split them into rows 2 g
      // and 2 g + 1 of A.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        arch::e4m3_to_f16(__byte_perm(v[2 * half], 0, 0x3120), a[0], a[1]);
        arch::e4m3_to_f16(__byte_perm(v[2 * half + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
        for (int j = 0; j < C::kRowBlocks; ++j)
          arch::mma_f16(r_o[2 * i + half][j], a, r_p[j][0], r_p[j][1]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < C::kRowBlocks; ++j) arch::mma_bf16(r_o[i][j], v, r_p[j][0], r_p[j][1]);
    }
    if (i + kVAhead < kLoads)
      arch::ldmatrix_x4_trans_if(v, v_place<C>(s_kv, warp, lane, i + kVAhead), always);
  }
}

// Where a partial result is. See schedule.h.
template <class C>
struct Partial {
  uint4* o;       // of a row tile: [value warp][pair of column blocks][row block][lane], 8 fp16
  float2* stats;  // [value warp][row of the tile]: what this warp's O is relative to, log2; sum

  __device__ Partial(const MlaTreeVerifyParams& params, int row_tiles, int max_columns, int slot,
                     int row_tile) {
    const int64_t tile = int64_t{slot} * row_tiles + row_tile,
                  tiles = int64_t{max_columns + params.b - 1} * row_tiles;
    o = static_cast<uint4*>(params.workspace) + tile * kO;
    stats = reinterpret_cast<float2*>(static_cast<uint4*>(params.workspace) + tiles * kO) +
            tile * kStats;
  }

  static constexpr int kO = C::kRows * kDv / 8;          // uint4 of a row tile
  static constexpr int kStats = kValueWarps * C::kRows;  // float2 of a row tile
  __device__ static int o_index(int warp, int column_pair, int row_block, int lane) {
    return ((warp * (kColumnBlocks / 2) + column_pair) * C::kRowBlocks + row_block) * kWarp + lane;
  }
};

// 1 / sum of the rows that this lane holds, 0 for an empty row.
__device__ __forceinline__ float2 inverse_row_sums(const float* row_sum, int row_block, int lane) {
  const float2 sum = *reinterpret_cast<const float2*>(&row_sum[first_row_of_lane(row_block, lane)]);
  return make_float2(sum.x == 0.f ? 0.f : __fdividef(1.f, sum.x),
                     sum.y == 0.f ? 0.f : __fdividef(1.f, sum.y));
}

// The power of two that brings a row into the range of fp16, by its largest element.
__device__ __forceinline__ float scale_to_f16(float largest) {
  const int exponent =
      max(static_cast<int>(__float_as_uint(largest) >> 23), 127 - 46);  // a sum times it is finite
  return __int_as_float((127 + 127 + 14 - exponent) << 23);
}

__device__ __forceinline__ float log2_of_power(float power) {
  return static_cast<float>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
}

// The request has other segments: for the merge kernel. O is fp16, each row of this warp's columns
// times a power of two; the sum is, too, and row_max what takes it back.
template <class C>
__device__ __forceinline__ void store_partial(const OFragments<C>& r_o,
                                              const MlaTreeVerifyParams& params, int slot,
                                              const float* row_max, const float* row_sum) {
  // Anew: no register is left to hold them since the start of the kernel.
  const int lane = arch::thread_index() % kWarp, warp = arch::thread_index() % kWarpgroup / kWarp;
  const Partial<C> partial(params, gridDim.x, gridDim.y, slot, blockIdx.x);
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    float2 largest = make_float2(0.f, 0.f);
#pragma unroll
    for (int m = 0; m < kColumnBlocks; ++m) {
      largest.x = fmaxf(largest.x, fmaxf(fabsf(r_o[m][j][0]), fabsf(r_o[m][j][2])));
      largest.y = fmaxf(largest.y, fmaxf(fabsf(r_o[m][j][1]), fabsf(r_o[m][j][3])));
    }
#pragma unroll
    for (int distance = 4; distance < kWarp; distance *= 2) {
      largest.x = fmaxf(largest.x, __shfl_xor_sync(~0u, largest.x, distance));
      largest.y = fmaxf(largest.y, __shfl_xor_sync(~0u, largest.y, distance));
    }
    const float2 scale = make_float2(scale_to_f16(largest.x), scale_to_f16(largest.y));
#pragma unroll
    for (int m = 0; m < kColumnBlocks; m += 2) {
      uint4 v;
      v.x = arch::pack_f16(r_o[m][j][0] * scale.x, r_o[m][j][1] * scale.y);
      v.y = arch::pack_f16(r_o[m][j][2] * scale.x, r_o[m][j][3] * scale.y);
      v.z = arch::pack_f16(r_o[m + 1][j][0] * scale.x, r_o[m + 1][j][1] * scale.y);
      v.w = arch::pack_f16(r_o[m + 1][j][2] * scale.x, r_o[m + 1][j][3] * scale.y);
      partial.o[Partial<C>::o_index(warp, m / 2, j, lane)] = v;
    }
    if (lane < 4) {
      const int row = first_row_of_lane(j, lane);
      const float2 top = *reinterpret_cast<const float2*>(&row_max[row]),
                   sum = *reinterpret_cast<const float2*>(&row_sum[row]);
      *reinterpret_cast<float4*>(&partial.stats[warp * C::kRows + row]) =
          make_float4(top.x - log2_of_power(scale.x), sum.x * scale.x,
                      top.y - log2_of_power(scale.y), sum.y * scale.y);
    }
    __syncwarp();  // one block at a time: no registers to spare
  }
}

// The request has this segment alone: its result.
template <class C>
__device__ __forceinline__ void store_output(const OFragments<C>& r_o,
                                             const MlaTreeVerifyParams& params, int request,
                                             const float* row_max, const float* row_sum,
                                             int first_row, int warp) {
  const int lane = arch::thread_index() % kWarp;
  const int num_rows = params.s_q * params.h_q;
  auto* out = static_cast<__nv_bfloat16*>(params.out) + int64_t{request} * num_rows * kDv;
#pragma unroll
  for (int j = 0; j < C::kRowBlocks; ++j) {
    const float2 inverse = inverse_row_sums(row_sum, j, lane);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int row = first_row + first_row_of_lane(j, lane) + odd;
      const float factor = (odd ? inverse.y : inverse.x) * params.v_scale;
      if (row >= num_rows) continue;
#pragma unroll
      for (int m = 0; m < kColumnBlocks; ++m) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper)
          out[int64_t{row} * kDv + o_column<C>(warp, m, lane, upper)] =
              __float2bfloat16(r_o[m][j][2 * upper + odd] * factor);
      }
    }
    __syncwarp();  // one block at a time: no registers to spare
  }
  const int r = warp * kWarp + lane, row = first_row + r;
  if (params.lse != nullptr && r < C::kRows && row < num_rows)
    params.lse[int64_t{request} * num_rows + row] = (row_max[r] + log2f(row_sum[r])) / kLog2e;
}

// Every tile of the segment, 128 columns of the value.
template <class C>
__device__ __forceinline__ void value_segment(const MlaTreeVerifyParams& params,
                                              const Segment& segment,
                                              typename C::SharedMemoryPlan& smem, int warp) {
  if constexpr (C::Kv::kFp8) scale_q<C>(smem, segment, C::kBusySoftmaxWarps + warp);
  OFragments<C> r_o;
#pragma unroll
  for (int m = 0; m < kColumnBlocks; ++m) {
#pragma unroll
    for (int j = 0; j < C::kRowBlocks; ++j)
      r_o[m][j][0] = r_o[m][j][1] = r_o[m][j][2] = r_o[m][j][3] = 0.f;
  }

  Stage<C> stage(segment.ring);
  for (int tile = 0; tile < segment.num_tiles; ++tile) {
    const int lane =
        arch::thread_index() % kWarp;  // here, or its products would be held across the loop
    const uint32_t s_kv = arch::smem_address(smem.stages[stage.index]);
    uint32_t r_p[C::kRowBlocks][2];
    VFragments r_v;
    arch::mbarrier_wait(arch::smem_address(&smem.bar_full[stage.index]), stage.parity);
    load_first_v<C>(r_v, s_kv, warp, lane);
    arch::mbarrier_wait(arch::smem_address(&smem.bar_p_full[stage.index]), stage.parity);
    load_p<C>(r_p, s_kv, lane);
    rescale_o<C>(r_o, smem, stage.index, lane);
    pv_gemm<C>(r_o, r_v, r_p, s_kv, warp, lane, params.b);
    arch::mbarrier_arrive_warp(arch::smem_address(&smem.bar_empty[stage.index]), lane);
    stage.template advance<1>();
  }
  const int live = segment.number % C::kLiveSegments;
  const float *row_max = smem.row_max[live], *row_sum = smem.row_sum[live];
  if (segment.is_whole)
    store_output<C>(r_o, params, segment.request, row_max, row_sum, blockIdx.x * C::kRows, warp);
  else
    store_partial<C>(r_o, params, blockIdx.y + segment.request, row_max, row_sum);
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
