// SPDX-License-Identifier: Apache-2.0
// Load warps: Q and the KV tiles into shared memory, 16 bytes a lane and instruction.
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

// Barriers and row maxima of a new segment.
template <class C>
__device__ __forceinline__ void reset(typename C::SharedMemoryPlan& smem, bool first_segment,
                                      int thread) {
  const auto init = [&](uint64_t& barrier, int arrivals) {
    const uint32_t address = arch::smem_address(&barrier);
    if (!first_segment) arch::mbarrier_invalidate(address);
    arch::mbarrier_init(address, arrivals);
  };
  if (thread < C::kStages) {
    init(smem.bar_kv_full[thread], kWarpgroup);
    init(smem.bar_kv_empty[thread], kValueWarps);
    init(smem.bar_p_full[thread], 1);
  }
  if (thread < kSoftmaxWarps) {
    init(smem.bar_scores_full[thread], kHalves);
    init(smem.bar_row_max[thread], 1);
  }
  if (thread < kPairs) init(smem.bar_scores_empty[thread], 1);
  if (thread < C::kRows) smem.row_max[thread] = -INFINITY;
  arch::named_barrier_sync(kBarLoadWarps, kWarpgroup);
}

// All but the load warps: the rows of Q of this block, into the stages that no early tile uses.
// Missing rows become zeros.
template <class C>
__device__ __forceinline__ void load_q(const MlaTreeVerifyParams& params,
                                       typename C::SharedMemoryPlan& smem, int request,
                                       int first_row) {
  constexpr int kRowChunks = kQRowBytes / kChunkBytes;
  const int thread = arch::thread_index(), lane = thread % kWarp,
            num_rows = params.s_q * params.h_q;
  const uint32_t s_q = arch::smem_address(smem.kv[C::kEarlyTiles]);
#pragma unroll 1
  for (int r = thread / kWarp; r < C::kRows; r += kMathThreads / kWarp) {
    const int row = min(first_row + r, num_rows - 1);
    const int64_t at = request * params.q_stride_b + row / params.h_q * params.q_stride_s +
                       row % params.h_q * params.q_stride_h;
    const char* q = static_cast<const char*>(params.q) + 2 * at;
#pragma unroll
    for (int chunk = lane; chunk < kRowChunks; chunk += kWarp)
      arch::cp_async_16(s_q + r * kQRowBytes + swizzle(chunk, r % 8), q + chunk * kChunkBytes,
                        first_row + r < num_rows ? 16 : 0);
  }
  arch::cp_async_wait_all();
}

// A load warp copies 4 tokens of a tile. Eight lanes share a token: 128 B an instruction.
template <class C>
class TileLoader {
 public:
  __device__ TileLoader(const MlaTreeVerifyParams& params, const Segment& segment,
                        typename C::SharedMemoryPlan& smem, int warp)
      : params_(params),
        num_tokens_(segment.num_tokens),
        list_length_(segment.list_length),
        list_begin_(segment.list_begin),
        draft_begin_(segment.request * params.s_q - segment.list_length) {
    const int lane = arch::thread_index() % kWarp, token = 4 * warp + lane / 8;
    chunk_ = lane % 8;
    first_position_ = segment.first_tile * kTileTokens + token;
    s_row_ = arch::smem_address(smem.kv[0]) + token * C::kPitch + swizzle(chunk_, token % 8);
    s_full_ = arch::smem_address(smem.bar_kv_full);
  }

  // The slots of this lane's token in kBatch tiles of the segment. A wait for one load waits for
  // all younger ones too (they share a scoreboard), so a batch is read as a whole, one batch before
  // its use.
  struct Slots {
    int low[kBatch], high[kBatch];
  };

  __device__ void read_slots(Slots& slots, int tile) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first_position_ + (tile + i) * kTileTokens;
      if (position >= num_tokens_) break;
      const void* base = position < list_length_ ? params_.kv_indices : params_.draft_slots;
      const int at = position + (position < list_length_ ? list_begin_ : draft_begin_);
      if (params_.indices_are_64) {
        const int2 v = __ldg(static_cast<const int2*>(base) + at);
        slots.low[i] = v.x, slots.high[i] = v.y;
      } else {
        slots.low[i] = __ldg(static_cast<const int*>(base) + at);
      }
    }
  }

  // Tokens past the end become zeros.
  __device__ void copy_tile(int low, int high, int tile, int stage) {
    const bool exists = first_position_ + tile * kTileTokens < num_tokens_;
    const char* src = static_cast<const char*>(params_.kv_cache) +
                      (exists ? row_offset(low, high) : 0) + chunk_ * kChunkBytes;
    const uint32_t dst = s_row_ + stage * C::kStageBytes, bytes = exists ? 16 : 0;
#pragma unroll
    for (int at = 0; at < C::kValueBytes; at += kGroupBytes)
      arch::cp_async_16(dst + at, src + at, bytes);
    if (C::kRopeChunks == 8 || chunk_ < C::kRopeChunks)
      arch::cp_async_16(dst + C::kValueBytes, src + C::kValueBytes, bytes);
    arch::cp_async_arrive(s_full_ + stage * sizeof(uint64_t));
  }

  __device__ void report() const {
    if (clamped_ && params_.status != nullptr) atomicOr(params_.status, kSlotClamped);
  }

 private:
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
  const int num_tokens_, list_length_, list_begin_, draft_begin_;
  int first_position_;  // in the request, of this lane's token in tile 0 of the segment
  int chunk_;           // of a group of 8
  uint32_t s_row_, s_full_;
  bool clamped_ = false;
};

// Until the score warps have Q in registers, its stages are taken.
__device__ __forceinline__ void wait_for_q_stages() {
  arch::block_barrier_sync();
  arch::named_barrier_sync(kBarQRead, 2 * kWarpgroup);
}

template <class C>
__device__ __forceinline__ void run_load_warp(const MlaTreeVerifyParams& params,
                                              const Segment& segment,
                                              typename C::SharedMemoryPlan& smem,
                                              bool first_segment) {
  const int thread = arch::thread_index() - kMathThreads, warp = thread / kWarp,
            num_tiles = segment.num_tiles;
  TileLoader<C> loader(params, segment, smem, warp);
  typename TileLoader<C>::Slots slots, next;
  loader.read_slots(slots, 0);
  reset<C>(smem, first_segment, thread);
  if (thread == 0) smem.num_parts = count_parts(params, segment.request);

  int stage = 0;
  uint32_t parity = 1;  // a fresh barrier lets the first round pass
  for (int batch = 0; batch < num_tiles; batch += kBatch) {
    loader.read_slots(next, batch + kBatch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int tile = batch + i;
      if (tile >= num_tiles) break;
      if (tile == C::kEarlyTiles) wait_for_q_stages();
      arch::mbarrier_wait(arch::smem_address(&smem.bar_kv_empty[stage]), parity);
      loader.copy_tile(slots.low[i], slots.high[i], tile, stage);
      if (++stage == C::kStages) stage = 0, parity ^= 1;
    }
    slots = next;
  }
  if (num_tiles <= C::kEarlyTiles) wait_for_q_stages();
  loader.report();
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
