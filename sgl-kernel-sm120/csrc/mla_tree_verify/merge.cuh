// SPDX-License-Identifier: Apache-2.0
// Merge kernel: the parts of a request, weighted by 2^(their row_max), over their sum, into out and
// lse; zeros for an empty one.
//
// A unit is 8 rows x 32 columns of one request, what a lane of a value warp packs into one uint4: a
// part of it is 512 B in a row. Each of the 8 warps of a block adds every eighth part, relative to
// the largest row_max that it has met; shared memory then adds the warps, in a fixed order.
#pragma once
#include "mla_tree_verify/value.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kMergeWarps = 8;
constexpr int kMergeBatch = 9;  // parts a warp has in flight: all of 66 columns
constexpr int kColumnPairs = kColumnBlocks / 2;

template <class C>
struct MergeUnit {
  int request, row_tile, row_block, warp, column_pair;
  int num_parts;
  // Of this lane in the first part; the others follow `row_tiles` row tiles apart.
  const uint4* o;
  const float4* stats;  // of rows 2 t and 2 t + 1
};

template <class C>
__device__ __forceinline__ MergeUnit<C> merge_unit(const MlaTreeVerifyParams& params, unsigned i,
                                                   int row_tiles, int num_tiles, int columns,
                                                   int max_columns) {
  const int lane = threadIdx.x % kWarp;
  MergeUnit<C> u;
  u.row_block = i % C::kRowBlocks, i /= C::kRowBlocks;
  u.column_pair = i % kColumnPairs, i /= kColumnPairs;
  u.warp = i % kValueWarps, i /= kValueWarps;
  u.row_tile = i % row_tiles;
  u.request = i / row_tiles;
  const int begin = load_plan_entry(params, u.request).first_tile,
            end = load_plan_entry(params, u.request + 1).first_tile;
  const int first_column = begin == end ? 0 : column_of_tile(begin, num_tiles, columns);
  u.num_parts = begin == end ? 0 : column_of_tile(end - 1, num_tiles, columns) - first_column + 1;
  const Partial<C> first(params, row_tiles, max_columns, first_column + u.request, u.row_tile);
  u.o = first.o + Partial<C>::o_index(u.warp, u.column_pair, u.row_block, lane);
  u.stats = reinterpret_cast<const float4*>(first.stats + u.warp * C::kRows +
                                            first_row_of_lane(u.row_block, lane));
  return u;
}

struct MergeSharedMemory {
  float sum[kMergeWarps][8][kWarp];
  float2 stats[kMergeWarps][8];  // of a row: what the warp's sums are relative to, log2; total
};

template <class C>
__device__ __forceinline__ void merge_parts(MergeSharedMemory& smem, const MergeUnit<C>& unit,
                                            int row_tiles) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float r_sum[8] = {};  // [column block][g or g + 8][row]
  float2 top = make_float2(-INFINITY, -INFINITY), total = make_float2(0.f, 0.f);
#pragma unroll 1
  for (int first = warp; first < unit.num_parts; first += kMergeBatch * kMergeWarps) {
    float4 r_stats[kMergeBatch];  // row_max and sum of either row
    uint4 r_o[kMergeBatch];
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const int part = first + i * kMergeWarps;
      r_stats[i] = make_float4(-INFINITY, 0.f, -INFINITY, 0.f), r_o[i] = uint4{};
      if (part < unit.num_parts) {
        r_stats[i] = __ldg(unit.stats + part * row_tiles * (Partial<C>::kStats / 2));
        r_o[i] = __ldg(unit.o + part * row_tiles * Partial<C>::kO);
      }
    }
    const float2 old = top;
#pragma unroll
    for (const float4& s : r_stats) top.x = fmaxf(top.x, s.x), top.y = fmaxf(top.y, s.z);
    const float2 factor =
        make_float2(arch::exp2_approx(old.x - top.x), arch::exp2_approx(old.y - top.y));
    total.x *= factor.x, total.y *= factor.y;
#pragma unroll
    for (int i = 0; i < 8; ++i) r_sum[i] *= i % 2 ? factor.y : factor.x;
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const float2 weight = make_float2(arch::exp2_approx(r_stats[i].x - top.x),
                                        arch::exp2_approx(r_stats[i].z - top.y));
      total.x += weight.x * r_stats[i].y, total.y += weight.y * r_stats[i].w;
      const uint32_t packed[4] = {r_o[i].x, r_o[i].y, r_o[i].z, r_o[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = arch::unpack_f16(packed[k]);
        r_sum[2 * k] += weight.x * pair.x, r_sum[2 * k + 1] += weight.y * pair.y;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) smem.sum[warp][i][lane] = r_sum[i];
  if (lane < 4) {
    smem.stats[warp][2 * lane] = make_float2(top.x, total.x);
    smem.stats[warp][2 * lane + 1] = make_float2(top.y, total.y);
  }
}

// Adds the warps and writes 8 rows x 32 columns: warp w has element w of every lane.
template <class C>
__device__ __forceinline__ void store_unit(const MlaTreeVerifyParams& params,
                                           const MergeSharedMemory& smem,
                                           const MergeUnit<C>& unit) {
  const int element = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int r = 2 * (lane % 4) + element % 2,
            row = unit.row_tile * C::kRows + unit.row_block * 8 + r;
  const int rows = params.s_q * params.h_q;
  if (row >= rows) return;
  float top = -INFINITY, total = 0.f, sum = 0.f;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) top = fmaxf(top, smem.stats[w][r].x);
  if (top != -INFINITY) {  // else the request has no part
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) {
      const float2 stats = smem.stats[w][r];
      const float weight = arch::exp2_approx(stats.x - top);
      total += weight * stats.y, sum += weight * smem.sum[w][element][lane];
    }
  }
  const int64_t at = int64_t{unit.request} * rows + row;
  const int column =
      o_column<C>(unit.warp, 2 * unit.column_pair + element / 4, lane, element / 2 % 2);
  static_cast<__nv_bfloat16*>(params.out)[at * kDv + column] =
      __float2bfloat16(total == 0.f ? 0.f : sum * params.v_scale / total);
  if (params.lse != nullptr && unit.warp == 0 && unit.column_pair == 0 && element < 2 && lane < 4)
    params.lse[at] = (top + log2f(total)) / kLog2e;
}

template <class C>
__global__ void __launch_bounds__(kMergeWarps* kWarp, 2)
    mla_tree_verify_merge_kernel(const __grid_constant__ MlaTreeVerifyParams params,
                                 int max_columns) {
  __shared__ MergeSharedMemory smem;
  const int row_tiles = num_row_tiles(params.s_q * params.h_q, C::kRowBlocks);
  const int num_tiles = load_plan_entry(params, params.b).first_tile,
            columns = num_columns(num_tiles, max_columns);
  const unsigned num_units =
      static_cast<unsigned>(params.b) * row_tiles * kValueWarps * kColumnPairs * C::kRowBlocks;
  arch::launch_next_kernel();
  MergeUnit<C> unit = merge_unit<C>(params, blockIdx.x, row_tiles, num_tiles, columns, max_columns);
  arch::wait_for_previous_kernel();
  for (unsigned i = blockIdx.x;;) {
    if (unit.num_parts != 1) {  // else the main kernel wrote it
      merge_parts<C>(smem, unit, row_tiles);
      __syncthreads();
      store_unit<C>(params, smem, unit);
      __syncthreads();
    }
    i += gridDim.x;
    if (i >= num_units) break;
    unit = merge_unit<C>(params, i, row_tiles, num_tiles, columns, max_columns);
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
