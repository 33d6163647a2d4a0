// SPDX-License-Identifier: Apache-2.0
// Merge kernel: the parts of a request, weighted by 2^(their row_max), into out and lse; zeros for an empty request.
//
// A unit is 8 rows x 16 columns of one request, what one MMA accumulator of a value warp holds: a part of it is 32 float4, one
// a lane, 512 B in a row. The 8 warps of a block first find the weights of the parts, one row a warp, while their first
// loads of O are on the way; then each adds every eighth part, and shared memory adds the warps, in a fixed order.
#pragma once
#include "arch/barrier.cuh"
#include "mla_tree_verify/value.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kMergeWarps = 8;
constexpr int kMergePreload = 8;   // parts a warp has in flight
constexpr int kMaxParts = 256;     // columns of the largest GPU, rounded up

struct MergeUnit {
  int request, row_tile, row_block, warp, column_block;
};

template <class C>
__device__ __forceinline__ MergeUnit merge_unit(int64_t i, int row_tiles) {
  MergeUnit u;
  u.row_block = i % C::kRowBlocks, i /= C::kRowBlocks;
  u.column_block = i % kColumnBlocks, i /= kColumnBlocks;
  u.warp = i % kValueWarps, i /= kValueWarps;
  u.row_tile = i % row_tiles;
  u.request = static_cast<int>(i / row_tiles);
  return u;
}

struct MergeSharedMemory {
  float weight[kMaxParts][8];
  float4 sum[kMergeWarps][kWarp];
  float row_factor[8];
};

// Warp w: the weights of row w of the unit in all parts, divided by the sum of the row; its lse.
__device__ __forceinline__ void find_weights(const MlaTreeVerifyParams& params, MergeSharedMemory& smem, const float2* stats,
                                             int64_t stats_stride, int num_parts, float* lse) {
  const int row = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  float top = -INFINITY;
  for (int part = lane; part < num_parts; part += kWarp) top = fmaxf(top, stats[part * stats_stride + row].x);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  float sum = 0.f;
  for (int part = lane; part < num_parts; part += kWarp) {
    const float2 max_and_sum = stats[part * stats_stride + row];
    const float weight = top == -INFINITY ? 0.f : arch::exp2_approx(max_and_sum.x - top);
    smem.weight[part][row] = weight;
    sum += weight * max_and_sum.y;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (lane == 0) {
    smem.row_factor[row] = sum == 0.f ? 0.f : params.v_scale / sum;
    if (lse != nullptr) *lse = (top + log2f(sum)) / kLog2e;
  }
}

template <class C>
__device__ __forceinline__ void merge_parts(const MlaTreeVerifyParams& params, MergeSharedMemory& smem, const MergeUnit& unit,
                                            int first_slot, int num_parts) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, t = lane % 4;
  const int rows = params.s_q * params.h_q, row_tiles = num_row_tiles(rows);
  const int64_t tile = int64_t{first_slot} * row_tiles + unit.row_tile;
  const int64_t o_stride = int64_t{row_tiles} * C::kRows * kDv / 4, stats_stride = int64_t{row_tiles} * C::kRows;
  const auto* workspace = static_cast<const float*>(params.workspace);
  const auto* o = reinterpret_cast<const float4*>(workspace) + tile * (C::kRows * kDv / 4) +
                  ((unit.warp * kColumnBlocks + unit.column_block) * C::kRowBlocks + unit.row_block) * kWarp + lane;
  const auto* stats = reinterpret_cast<const float2*>(workspace + partial_slots(params.b, row_tiles, params.num_sms) * partial_o_floats(rows)) +
                      tile * C::kRows + unit.row_block * 8;
  const int row = unit.row_tile * C::kRows + unit.row_block * 8 + warp;
  const bool writes_lse = params.lse != nullptr && unit.warp == 0 && unit.column_block == 0 && row < rows;

  float4 r_first[kMergePreload];
#pragma unroll
  for (int i = 0; i < kMergePreload; ++i)
    if (const int part = warp + i * kMergeWarps; part < num_parts) r_first[i] = __ldg(o + part * o_stride);
  find_weights(params, smem, stats, stats_stride, num_parts, writes_lse ? params.lse + int64_t{unit.request} * rows + row : nullptr);
  __syncthreads();

  float4 r_sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const auto add = [&](float4 v, int part) {
    const float2 weight = *reinterpret_cast<const float2*>(&smem.weight[part][2 * t]);
    r_sum.x += weight.x * v.x, r_sum.y += weight.y * v.y, r_sum.z += weight.x * v.z, r_sum.w += weight.y * v.w;
  };
#pragma unroll
  for (int i = 0; i < kMergePreload; ++i)
    if (const int part = warp + i * kMergeWarps; part < num_parts) add(r_first[i], part);
#pragma unroll 4
  for (int part = warp + kMergePreload * kMergeWarps; part < num_parts; part += kMergeWarps) add(__ldg(o + part * o_stride), part);
  smem.sum[warp][lane] = r_sum;
}

// Adds the warps and writes 8 rows x 16 columns: thread i < 128 has element i % 4 of lane i / 4.
template <class C>
__device__ __forceinline__ void store_unit(const MlaTreeVerifyParams& params, const MergeSharedMemory& smem, const MergeUnit& unit) {
  if (threadIdx.x >= 4 * kWarp) return;
  const int element = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int r = 2 * (lane % 4) + element % 2, row = unit.row_tile * C::kRows + unit.row_block * 8 + r;
  const int rows = params.s_q * params.h_q;
  if (row >= rows) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) sum += reinterpret_cast<const float*>(&smem.sum[w][lane])[element];
  const float factor = smem.row_factor[r];
  static_cast<__nv_bfloat16*>(params.out)[(int64_t{unit.request} * rows + row) * kDv + o_column<C>(unit.warp, unit.column_block, lane, element / 2)] =
      __float2bfloat16(factor == 0.f ? 0.f : sum * factor);
}

template <class C>
__global__ void __launch_bounds__(kMergeWarps * kWarp) mla_tree_verify_merge_kernel(const __grid_constant__ MlaTreeVerifyParams params, int max_columns) {
  __shared__ MergeSharedMemory smem;
  const int row_tiles = num_row_tiles(params.s_q * params.h_q);
  const int num_tiles = load_plan_entry(params, params.b).first_tile, columns = num_columns(num_tiles, max_columns);
  const int64_t num_units = int64_t{params.b} * row_tiles * kValueWarps * kColumnBlocks * C::kRowBlocks;
  arch::launch_next_kernel();
  arch::wait_for_previous_kernel();
  for (int64_t i = blockIdx.x; i < num_units; i += gridDim.x) {
    const MergeUnit unit = merge_unit<C>(i, row_tiles);
    const int begin = load_plan_entry(params, unit.request).first_tile, end = load_plan_entry(params, unit.request + 1).first_tile;
    const int first_column = begin == end ? 0 : column_of_tile(begin, num_tiles, columns);
    const int num_parts = begin == end ? 0 : column_of_tile(end - 1, num_tiles, columns) - first_column + 1;
    if (num_parts == 1) continue;  // the main kernel wrote it
    __syncthreads();               // the last unit is done with shared memory
    merge_parts<C>(params, smem, unit, first_column + unit.request, num_parts);
    __syncthreads();
    store_unit<C>(params, smem, unit);
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
