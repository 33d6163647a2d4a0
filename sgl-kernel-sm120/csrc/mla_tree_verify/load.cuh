// SPDX-License-Identifier: Apache-2.0
// Load warps: for each segment its rows of Q, then its KV tiles, into the ring of stages. 16 bytes
// a lane and instruction; a warp has 4 rows of a stage, 8 lanes a row.
#pragma once
#include "arch/barrier.cuh"
#include "arch/cp_async.cuh"
#include "arch/ldmatrix.cuh"
#include "arch/registers.cuh"
#include "mla_tree_verify/segment.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

// Where chunk `chunk` of a row with `row % 8 == row_in_8` lies in that row. See kGroupBytes.
__device__ __forceinline__ constexpr int swizzle(int chunk, int row_in_8) {
  return ((chunk & ~7) | ((chunk ^ row_in_8) & 7)) * kChunkBytes;
}

template <class C>
__device__ __forceinline__ void init_barriers(typename C::SharedMemoryPlan& smem, int thread) {
  const auto init = [](uint64_t& barrier, int arrivals) {
    arch::mbarrier_init(arch::smem_address(&barrier), arrivals);
  };
  constexpr int kWarpArrives = arch::kArrivalsPerWarp;
  if (thread < C::kStages) {
    init(smem.bar_full[thread], kWarpgroup);
    init(smem.bar_empty[thread], kWarpArrives * kValueWarps);
    init(smem.bar_p_full[thread], kWarpArrives * C::kBusySoftmaxWarps);
    for (unsigned char& rescaled : smem.rescaled[thread]) rescaled = 0;
  }
  if (thread < kPairs) init(smem.bar_scores_empty[thread], kWarpArrives * C::kBusySoftmaxWarps);
  if (thread == 0) {
    init(smem.bar_scores_full, kWarpArrives * kHalves);
    for (uint64_t& barrier : smem.bar_q_scaled)
      init(barrier, kWarpArrives * (C::kBusySoftmaxWarps + kValueWarps));
  }
}

// A lane's part of the load warps' work.
template <class C>
class Loader {
 public:
  __device__ Loader(const MlaTreeVerifyParams& params, typename C::SharedMemoryPlan& smem)
      : params_(params), smem_(smem) {
    const int lane = arch::thread_index() % kWarp;
    row_ = arch::thread_index() % kWarpgroup / kWarp * kRowsPerLoadWarp + lane / kLanesPerRow;
    chunk_ = lane % kLanesPerRow;
  }

  // Rows of Q of this block. Missing rows become zeros.
  __device__ void load_q(const Segment& segment) {
    Stage<C> stage(segment.ring - C::kQStages);
    const float heads_inverse = __fdividef(1.f, params_.h_q);
#pragma unroll 1
    for (int i = 0; i < C::kQStages; ++i) {
      wait_until_empty(stage);
      const int r = i * C::kQRowsPerStage + row_, first_row = blockIdx.x * C::kRows,
                num_rows = params_.s_q * params_.h_q, row = min(first_row + r, num_rows - 1),
                position = position_of_row(row, heads_inverse);
      const int64_t at = segment.request * params_.q_stride_b + position * params_.q_stride_s +
                         (row - position * params_.h_q) * params_.q_stride_h;
      if (row_ < C::kQRowsPerStage && r < C::kRows)
        copy_row<kQRowBytes>(
            arch::as_one_value(static_cast<const char*>(params_.q) + 2 * at + chunk_ * kChunkBytes),
            s_stage(stage) + row_ * kQRowBytes + swizzle(chunk_, row_ % 8),
            first_row + r < num_rows ? 16 : 0);
      arch::cp_async_arrive(full_barrier(stage));
      stage.template advance<1>();
    }
  }

  // An entry of the list. Of the kLanesPerRow lanes of a row each reads that of another tile: one
  // load for so many tiles, a batch before its use.
  struct Slot {
    int low, high;
  };

  __device__ Slot read_slot(const Segment& segment, int tile) const {
    const int position = first_position(segment) + (tile + chunk_) * kTileTokens;
    Slot slot{};
    if (position >= segment.num_tokens) return slot;
    const bool listed = position < segment.list_length;
    const void* base = listed ? params_.kv_indices : params_.draft_slots;
    const int at = position + (listed ? segment.list_begin
                                      : segment.request * params_.s_q - segment.list_length);
    if (params_.indices_are_64) {
      const int2 v = __ldg(static_cast<const int2*>(base) + at);
      slot.low = v.x, slot.high = v.y;
    } else {
      slot.low = __ldg(static_cast<const int*>(base) + at);  // to touch it here would be to wait
    }
    return slot;
  }

  // The slot, or the nearest one that exists; -1 past the end of the request.
  __device__ int nearest_slot(const Segment& segment, Slot slot, int tile) {
    if (first_position(segment) + (tile + chunk_) * kTileTokens >= segment.num_tokens) return -1;
    if (!params_.indices_are_64) slot.high = slot.low >> 31;
    const int last = static_cast<int>(params_.num_slots - 1);
    const int nearest = slot.high < 0                   ? 0
                        : slot.high > 0 || slot.low < 0 ? last
                                                        : min(slot.low, last);
    clamped_ |= nearest != slot.low || slot.high != 0;
    return nearest;
  }

  __device__ void wait_until_empty(Stage<C> stage) const {
    arch::mbarrier_wait(arch::smem_address(&smem_.bar_empty[stage.index]),
                        stage.parity ^ 1);  // a fresh barrier lets the first round pass
  }

  // `slots`: of a batch, as nearest_slot gave them to the lanes; tile `i` of it. A missing token
  // becomes zeros.
  __device__ void copy_tile(int slots, int i, Stage<C> stage) const {
    const int slot = __shfl_sync(~0u, slots, row_ % kRowsPerLoadWarp * kLanesPerRow + i);
    const char* src = static_cast<const char*>(params_.kv_cache) +
                      static_cast<uint64_t>(static_cast<uint32_t>(max(slot, 0))) *
                          static_cast<uint32_t>(params_.kv_stride * C::Kv::kElementBytes);
    // All but the copies is done while the stage is still in use.
    src = arch::as_one_value(src + chunk_ * kChunkBytes);
    const uint32_t s_row = s_stage(stage) + row_ * C::kPitch + swizzle(chunk_, row_ % 8);
    wait_until_empty(stage);
    copy_row<kDqk * C::Kv::kElementBytes>(src, s_row, slot < 0 ? 0 : 16);
    arch::cp_async_arrive(full_barrier(stage));
  }

  __device__ void report() const {
    if (clamped_ && params_.status != nullptr) atomicOr(params_.status, kSlotClamped);
  }

 private:
  // In the request, of this lane's token in tile 0 of the segment.
  __device__ int first_position(const Segment& segment) const {
    return segment.first_tile * kTileTokens + row_;
  }

  __device__ uint32_t full_barrier(Stage<C> stage) const {
    return arch::smem_address(&smem_.bar_full[stage.index]);
  }
  __device__ uint32_t s_stage(Stage<C> stage) const {
    return arch::smem_address(smem_.stages[stage.index]);
  }

  // This lane's chunks: every kLanesPerRow-th one.
  template <int kBytes>
  __device__ void copy_row(const char* src, uint32_t s_row, uint32_t bytes) const {
#pragma unroll
    for (int at = 0; at < kBytes; at += kGroupBytes)
      if (at + kGroupBytes <= kBytes || chunk_ < kBytes % kGroupBytes / kChunkBytes)
        arch::cp_async_16(s_row + at, src + at, bytes);
  }

  const MlaTreeVerifyParams& params_;
  typename C::SharedMemoryPlan& smem_;
  int row_, chunk_;  // of a stage; of a group
  bool clamped_ = false;
};

template <class C>
__device__ __forceinline__ void load_segment(Loader<C>& loader, const Segment segment) {
  auto next = loader.read_slot(segment, 0);
  loader.load_q(segment);
  Stage<C> stage(segment.ring);
#pragma unroll 1
  for (int batch = 0; batch < segment.num_tiles; batch += kLanesPerRow) {
    const int slots = loader.nearest_slot(segment, next, batch);
    next = loader.read_slot(segment, batch + kLanesPerRow);
    const int tiles = min(kLanesPerRow, segment.num_tiles - batch);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      loader.copy_tile(slots, i, stage);
      stage.template advance<1>();
    }
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
