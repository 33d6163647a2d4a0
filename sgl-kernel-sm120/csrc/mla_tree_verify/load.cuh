// SPDX-License-Identifier: Apache-2.0
// Load warps: Q and the KV tiles into shared memory, 16 bytes a lane and instruction.
#pragma once
#include "arch/barrier.cuh"
#include "arch/cp_async.cuh"
#include "arch/ldmatrix.cuh"
#include "mla_tree_verify/segment.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

// Where chunk `chunk` of a row with `row % 8 == row_in_8` lies in that row. See kGroupBytes.
__device__ __forceinline__ constexpr int swizzle(int chunk, int row_in_8) {
  return ((chunk & ~7) | ((chunk ^ row_in_8) & 7)) * kChunkBytes;
}

// Barriers and row maxima of a new segment.
template <class C>
__device__ __forceinline__ void reset(typename C::SharedMemoryPlan& smem, bool first_segment, int thread) {
  const auto init = [&](uint64_t& barrier, int arrivals) {
    const uint32_t address = arch::smem_address(&barrier);
    if (!first_segment) arch::mbarrier_invalidate(address);
    arch::mbarrier_init(address, arrivals);
  };
  if (thread < C::kStages) {
    init(smem.bar_kv_full[thread], kLoadThreads);
    init(smem.bar_p_full[thread], C::kOwnFirst < C::kRowBlocks ? kHalves : 1);
    init(smem.bar_kv_empty[thread], kValueWarps);
    smem.rescaled[thread] = make_int2(0, 0);
  }
  if (thread < kHalves * kPairs) init(smem.bar_order[thread / kPairs][thread % kPairs], 1);
  if (thread < C::kRows) smem.row_max[thread] = -INFINITY;
  arch::named_barrier_sync(kBarLoadWarps, kLoadThreads);
}

// The rows of Q of this block, from the first stage that no early tile uses. Missing rows become zeros.
template <class C>
__device__ __forceinline__ void load_q(const MlaTreeVerifyParams& params, typename C::SharedMemoryPlan& smem, int request, int first_row, int warp) {
  constexpr int kRowChunks = kQRowBytes / kChunkBytes;
  const int lane = threadIdx.x % kWarp, num_rows = params.s_q * params.h_q;
  const uint32_t s_q = arch::smem_address(smem.kv[C::kEarlyTiles]);
  for (int r = warp; r < C::kRows; r += kLoadWarps) {
    const int row = min(first_row + r, num_rows - 1);
    const int64_t at = request * params.q_stride_b + row / params.h_q * params.q_stride_s + row % params.h_q * params.q_stride_h;
    const char* q = static_cast<const char*>(params.q) + 2 * at;
#pragma unroll
    for (int chunk = lane; chunk < kRowChunks; chunk += kWarp)
      arch::cp_async_16(s_q + r * kQRowBytes + swizzle(chunk, r % 8), q + chunk * kChunkBytes, first_row + r < num_rows ? 16 : 0);
  }
  arch::cp_async_commit();
}

// A load warp copies 4 tokens of a tile. Eight lanes share a token: 128 B an instruction.
template <class C>
class TileLoader {
 public:
  __device__ TileLoader(const MlaTreeVerifyParams& params, const Segment& segment, typename C::SharedMemoryPlan& smem, int warp)
      : params_(params), lane_in_8_(threadIdx.x % 8), first_position_(segment.first_tile * kTileTokens + 4 * warp + threadIdx.x % kWarp / 8),
        num_tokens_(segment.num_tokens), list_length_(segment.list_length) {
    const int index_bytes = params.indices_are_64 ? 8 : 4, token = 4 * warp + threadIdx.x % kWarp / 8;
    list_ = static_cast<const char*>(params.kv_indices) + int64_t{segment.list_begin} * index_bytes;
    draft_ = static_cast<const char*>(params.draft_slots) + (int64_t{segment.request} * params.s_q - segment.list_length) * index_bytes;
    s_row_ = arch::smem_address(smem.kv[0]) + token * C::kPitch + swizzle(lane_in_8_, token % 8);
    s_full_ = arch::smem_address(smem.bar_kv_full);
  }

  // The slots of this lane's token in kBatch tiles of the segment. Nothing waits for them before row() does.
  struct Slots {
    int low[kBatch], high[kBatch];
  };

  __device__ void read_slots(Slots& slots, int tile) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int position = first_position_ + (tile + i) * kTileTokens;
      if (position < num_tokens_) {
        const char* base = position < list_length_ ? list_ : draft_;
        if (params_.indices_are_64) {
          const int2 v = __ldg(reinterpret_cast<const int2*>(base) + position);
          slots.low[i] = v.x, slots.high[i] = v.y;
        } else {
          slots.low[i] = __ldg(reinterpret_cast<const int*>(base) + position);
        }
      }
    }
  }

  // Where the row of a slot is; the nearest row if there is no such slot.
  __device__ const char* row(const Slots& slots, int i) {
    const int high = params_.indices_are_64 ? slots.high[i] : slots.low[i] >> 31;
    const int last = static_cast<int>(params_.num_slots - 1);
    const int slot = high < 0 ? 0 : high > 0 || slots.low[i] < 0 ? last : min(slots.low[i], last);
    clamped_ |= slot != slots.low[i] || high != 0;
    return static_cast<const char*>(params_.kv_cache) + int64_t{slot} * (params_.kv_stride * C::Kv::kElementBytes) + lane_in_8_ * kChunkBytes;
  }

  // Tile `tile` of the segment is entry i of `slots`. Tokens past the end become zeros.
  __device__ void copy_tile(const Slots& slots, int i, int tile, int stage) {
    const bool exists = first_position_ + tile * kTileTokens < num_tokens_;
    const char* src = exists ? row(slots, i) : static_cast<const char*>(params_.kv_cache);
    const uint32_t dst = s_row_ + stage * C::kStageBytes, bytes = exists ? 16 : 0;
#pragma unroll
    for (int at = 0; at < C::kValueBytes; at += kGroupBytes) arch::cp_async_16(dst + at, src + at, bytes);
    if (C::kRopeChunks == 8 || lane_in_8_ < C::kRopeChunks) arch::cp_async_16(dst + C::kValueBytes, src + C::kValueBytes, bytes);
    arch::cp_async_arrive(s_full_ + stage * sizeof(uint64_t));
  }

  // The rows of a batch into the L2, a line a lane.
  __device__ void prefetch(const Slots& slots, int tile) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first_position_ + (tile + i) * kTileTokens >= num_tokens_) break;
      const char* src = row(slots, i) + lane_in_8_ * (kGroupBytes - kChunkBytes);
      if (lane_in_8_ * kGroupBytes < C::kValueBytes) arch::prefetch_l2(src);
      if (lane_in_8_ == 0) arch::prefetch_l2(src + C::kValueBytes);
    }
  }

  __device__ void report() const {
    if (clamped_ && params_.status != nullptr) atomicOr(params_.status, kSlotClamped);
  }

 private:
  const MlaTreeVerifyParams& params_;
  const int lane_in_8_;
  const int first_position_;  // in the request, of this lane's token in tile 0 of the segment
  const int num_tokens_, list_length_;
  const char* list_;   // indexed by the position
  const char* draft_;  // likewise
  uint32_t s_row_, s_full_;
  bool clamped_ = false;
};

// Q is in shared memory: let the score warps take it into registers, then its stages are free.
__device__ __forceinline__ void hand_over_q() {
  arch::cp_async_commit();
  arch::cp_async_wait<1>();  // not for the tiles copied since
  __syncthreads();
  arch::named_barrier_sync(kBarQRead, kWarp * (kScoreWarps + kLoadWarps));
}

template <class C>
__device__ __forceinline__ void run_load_warp(const MlaTreeVerifyParams& params, const Segment& segment,
                                              typename C::SharedMemoryPlan& smem, bool first_segment) {
  const int thread = threadIdx.x - kMathThreads, warp = thread / kWarp, num_tiles = segment.num_tiles;
  TileLoader<C> loader(params, segment, smem, warp);
  typename TileLoader<C>::Slots slots, next;
  loader.read_slots(slots, 0);
  reset<C>(smem, first_segment, thread);
  load_q<C>(params, smem, segment.request, blockIdx.x * C::kRows, warp);

  int stage = 0;
  uint32_t parity = 1;  // a fresh barrier lets the first round pass
  for (int batch = 0; batch < num_tiles; batch += kBatch) {
    if (batch + kBatch < num_tiles) loader.read_slots(next, batch + kBatch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int tile = batch + i;
      if (tile >= num_tiles) break;
      if (tile == C::kEarlyTiles) hand_over_q();
      arch::mbarrier_wait(arch::smem_address(&smem.bar_kv_empty[stage]), parity);
      loader.copy_tile(slots, i, tile, stage);
      if (++stage == C::kStages) stage = 0, parity ^= 1;
      if (kPrefetch && i == 1 && batch + kBatch < num_tiles) loader.prefetch(next, batch + kBatch);
    }
    slots = next;
  }
  if (num_tiles <= C::kEarlyTiles) hand_over_q();
  loader.report();
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
