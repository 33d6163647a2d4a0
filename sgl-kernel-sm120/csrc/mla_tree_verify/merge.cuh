// SPDX-License-Identifier: Apache-2.0
// Merge kernel: the parts of a request, weighted by 2^(their row_max) and their sums, into out and
// lse; zeros for an empty one.
//
// A unit is 8 rows x 32 columns of one request, what a lane of a value warp packs into one uint4: a
// part of it is 512 B in a row. The 8 warps of a block first find the weights of the parts, one row
// a warp, while their first loads of O are on the way; then each adds every eighth part, and shared
// memory adds the warps, in a fixed order.
#pragma once
#include "mla_tree_verify/value.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kMergeWarps = 8;
constexpr int kMergePreload = 9;  // parts a warp has in flight
constexpr int kMaxParts = 256;    // columns of the largest GPU, rounded up
constexpr int kColumnPairs = kColumnBlocks / 2;

template <class C>
struct MergeUnit {
  int request, row_tile, row_block, warp, column_pair;
  int num_parts;
  // Of its first part; the others follow `row_tiles` row tiles apart.
  const uint4* o;       // of this lane
  const float2* stats;  // of the row that this warp finds the weights for
  const float* o_scale;
};

template <class C>
__device__ __forceinline__ MergeUnit<C> merge_unit(const MlaTreeVerifyParams& params, unsigned i,
                                                   int row_tiles, int num_tiles, int columns,
                                                   int max_columns) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
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
  u.stats = first.stats + u.row_block * 8 + warp;
  u.o_scale = first.o_scale + u.warp;
  return u;
}

struct MergeSharedMemory {
  float weight[kMaxParts][8];
  float sum[kMergeWarps][8][kWarp];
  float row_factor[8];
};

// Warp w: the weights of row w of the unit in all parts, and its lse.
template <class C>
__device__ __forceinline__ void find_weights(const MlaTreeVerifyParams& params,
                                             MergeSharedMemory& smem, const MergeUnit<C>& unit,
                                             const float2 (&r_stats)[kMaxParts / kWarp],
                                             const float (&r_scale)[kMaxParts / kWarp]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float top = -INFINITY;
#pragma unroll
  for (const float2& max_and_sum : r_stats) top = fmaxf(top, max_and_sum.x);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxParts / kWarp; ++i) {
    if (i * kWarp >= unit.num_parts) break;
    const float weight =
        top == -INFINITY ? 0.f : arch::exp2_approx(r_stats[i].x - top) * r_stats[i].y;
    smem.weight[i * kWarp + lane][warp] = weight * r_scale[i];
    sum += weight;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane != 0) return;
  smem.row_factor[warp] = sum == 0.f ? 0.f : params.v_scale / sum;
  const int rows = params.s_q * params.h_q,
            row = unit.row_tile * C::kRows + unit.row_block * 8 + warp;
  if (params.lse != nullptr && unit.warp == 0 && unit.column_pair == 0 && row < rows)
    params.lse[int64_t{unit.request} * rows + row] = (top + log2f(sum)) / kLog2e;
}

template <class C>
__device__ __forceinline__ void merge_parts(const MlaTreeVerifyParams& params,
                                            MergeSharedMemory& smem, const MergeUnit<C>& unit,
                                            int row_tiles) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float2 r_stats[kMaxParts / kWarp];
  float r_scale[kMaxParts / kWarp];
#pragma unroll
  for (int i = 0; i < kMaxParts / kWarp; ++i) {
    const int part = i * kWarp + lane;
    r_stats[i] = make_float2(-INFINITY, 0.f), r_scale[i] = 0.f;
    if (part < unit.num_parts) {
      r_stats[i] = __ldg(unit.stats + part * row_tiles * C::kRows);
      r_scale[i] = __ldg(unit.o_scale + part * row_tiles * kValueWarps);
    }
  }
  const int stride = row_tiles * Partial<C>::kO;
  uint4 r_first[kMergePreload];
#pragma unroll
  for (int i = 0; i < kMergePreload; ++i)
    if (const int part = warp + i * kMergeWarps; part < unit.num_parts)
      r_first[i] = __ldg(unit.o + part * stride);
  find_weights<C>(params, smem, unit, r_stats, r_scale);
  __syncthreads();

  float r_sum[8] = {};  // [column block][g or g + 8][row]
  const auto add = [&](uint4 v, int part) {
    const float2 weight = *reinterpret_cast<const float2*>(&smem.weight[part][2 * (lane % 4)]);
    const uint32_t packed[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = arch::unpack_f16(packed[i]);
      r_sum[2 * i] += weight.x * pair.x, r_sum[2 * i + 1] += weight.y * pair.y;
    }
  };
#pragma unroll
  for (int i = 0; i < kMergePreload; ++i)
    if (const int part = warp + i * kMergeWarps; part < unit.num_parts) add(r_first[i], part);
#pragma unroll 4
  for (int part = warp + kMergePreload * kMergeWarps; part < unit.num_parts; part += kMergeWarps)
    add(__ldg(unit.o + part * stride), part);
#pragma unroll
  for (int i = 0; i < 8; ++i) smem.sum[warp][i][lane] = r_sum[i];
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
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) sum += smem.sum[w][element][lane];
  const int column =
      o_column<C>(unit.warp, 2 * unit.column_pair + element / 4, lane, element / 2 % 2);
  static_cast<__nv_bfloat16*>(params.out)[(int64_t{unit.request} * rows + row) * kDv + column] =
      __float2bfloat16(sum * smem.row_factor[r]);
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
      merge_parts<C>(params, smem, unit, row_tiles);
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
