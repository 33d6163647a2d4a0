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
  if (thread < C::kStages) {
    init(smem.bar_full[thread], kWarpgroup);
    init(smem.bar_empty[thread], kValueWarps);
    init(smem.bar_p_full[thread], 1);
  }
  if (thread < kSoftmaxWarps) {
    init(smem.bar_scores_full[thread], kHalves);
    init(smem.bar_row_max[thread], 1);
  }
  if (thread < kPairs) init(smem.bar_scores_empty[thread], 1);
  if (thread == 0) init(smem.bar_q_scaled, kSoftmaxWarps + kValueWarps);
}

// A lane's part of the load warps' work.
template <class C>
class Loader {
 public:
  __device__ Loader(const MlaTreeVerifyParams& params, typename C::SharedMemoryPlan& smem)
      : params_(params), smem_(smem) {
    const int lane = arch::thread_index() % kWarp;
    row_ = arch::thread_index() % kWarpgroup / kWarp * 4 + lane / 8;
    chunk_ = lane % 8;
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
        copy_row<kQRowBytes>(static_cast<const char*>(params_.q) + 2 * at,
                             s_stage(stage) + row_ * kQRowBytes, first_row + r < num_rows ? 16 : 0);
      arch::cp_async_arrive(full_barrier(stage));
      stage.template advance<1>();
    }
  }

  // The slots of this lane's token in kBatch tiles of the segment. A wait for one load waits for
  // all younger ones too (they share a scoreboard), so a batch is read as a whole, one batch before
  // its use.
  struct Slots {
    int low[kBatch], high[kBatch];
  };

  __device__ void read_slots(Slots& slots, const Segment& segment, int tile) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first_position(segment) + (tile + i) * kTileTokens;
      if (position >= segment.num_tokens) break;
      const bool listed = position < segment.list_length;
      const void* base = listed ? params_.kv_indices : params_.draft_slots;
      const int at = position + (listed ? segment.list_begin
                                        : segment.request * params_.s_q - segment.list_length);
      if (params_.indices_are_64) {
        const int2 v = __ldg(static_cast<const int2*>(base) + at);
        slots.low[i] = v.x, slots.high[i] = v.y;
      } else {
        slots.low[i] = __ldg(static_cast<const int*>(base) + at);
      }
    }
  }

  __device__ void wait_until_empty(Stage<C> stage) const {
    arch::mbarrier_wait(arch::smem_address(&smem_.bar_empty[stage.index]),
                        stage.parity ^ 1);  // a fresh barrier lets the first round pass
  }

  // Tokens past the end become zeros.
  __device__ void copy_tile(const Segment& segment, int low, int high, int tile, Stage<C> stage) {
    const bool exists = first_position(segment) + tile * kTileTokens < segment.num_tokens;
    const char* src =
        static_cast<const char*>(params_.kv_cache) + (exists ? row_offset(low, high) : 0);
    copy_row<kDqk * C::Kv::kElementBytes>(src, s_stage(stage) + row_ * C::kPitch, exists ? 16 : 0);
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

  template <int kBytes>
  __device__ void copy_row(const char* src, uint32_t s_row, uint32_t bytes) const {
    src += chunk_ * kChunkBytes;
    s_row += swizzle(chunk_, row_ % 8);
#pragma unroll
    for (int at = 0; at < kBytes; at += kGroupBytes)
      if (at + kGroupBytes <= kBytes || chunk_ < kBytes % kGroupBytes / kChunkBytes)
        arch::cp_async_16(s_row + at, src + at, bytes);
  }

  // Of the slot, or of the nearest one that exists.
  __device__ uint64_t row_offset(int low, int high) {
    if (!params_.indices_are_64) high = low >> 31;
    const int last = static_cast<int>(params_.num_slots - 1);
    const int nearest = high < 0 ? 0 : high > 0 || low < 0 ? last : min(low, last);
    clamped_ |= nearest != low || high != 0;
    return static_cast<uint64_t>(static_cast<uint32_t>(nearest)) *
           static_cast<uint32_t>(params_.kv_stride * C::Kv::kElementBytes);
  }

  const MlaTreeVerifyParams& params_;
  typename C::SharedMemoryPlan& smem_;
  int row_, chunk_;  // of a stage; of a group
  bool clamped_ = false;
};

template <class C>
__device__ __forceinline__ void load_segment(Loader<C>& loader, const Segment& segment) {
  typename Loader<C>::Slots slots, next;
  loader.read_slots(slots, segment, 0);
  loader.load_q(segment);
  Stage<C> stage(segment.ring);
  for (int batch = 0; batch < segment.num_tiles; batch += kBatch) {
    loader.read_slots(next, segment, batch + kBatch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int tile = batch + i;
      if (tile >= segment.num_tiles) break;
      loader.wait_until_empty(stage);
      loader.copy_tile(segment, slots.low[i], slots.high[i], tile, stage);
      stage.template advance<1>();
    }
    slots = next;
  }
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
