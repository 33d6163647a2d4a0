// SPDX-License-Identifier: Apache-2.0
// Copies of Q and of KV tiles into shared memory.
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

// All threads: the rows of Q of this block, from the first stage that no early tile uses. Missing rows become zeros.
template <class C>
__device__ __forceinline__ void load_q(const MlaTreeVerifyParams& params, typename C::SharedMemoryPlan& smem, int request, int first_row) {
  constexpr int kRowChunks = kQRowBytes / kChunkBytes;
  const uint32_t s_q = arch::smem_address(smem.kv[C::kEarlyTiles]);
  const int num_rows = params.s_q * params.h_q;
  const auto* q = static_cast<const char*>(params.q);
  for (int i = threadIdx.x; i < C::kRows * kRowChunks; i += kThreads) {
    const int r = i / kRowChunks, chunk = i % kRowChunks;
    const int row = min(first_row + r, num_rows - 1);
    const int64_t at = request * params.q_stride_b + row / params.h_q * params.q_stride_s + row % params.h_q * params.q_stride_h;
    arch::cp_async_16(s_q + r * kQRowBytes + swizzle(chunk, r % 8), q + 2 * at + chunk * kChunkBytes, first_row + r < num_rows ? 16 : 0);
  }
  arch::cp_async_commit();
}

// What one value warp copies: the value columns that it alone will read, for all 16 tokens of a tile, and the rotary part
// of 4 tokens. Eight lanes copy 128 B of a token. A warp may refill its columns as soon as it has used them; the rotary
// group also holds P, which all value warps read, so it waits for them.
template <class C>
class TileLoader {
 public:
  __device__ TileLoader(const MlaTreeVerifyParams& params, const Segment& segment, typename C::SharedMemoryPlan& smem, int warp)
      : params_(params), segment_(segment), smem_(smem), warp_(warp), lane_(threadIdx.x % kWarp) {
    index_bytes_ = params.indices_are_64 ? 8 : 4;
    list_ = static_cast<const char*>(params.kv_indices) + int64_t{segment.list_begin} * index_bytes_;
    draft_ = static_cast<const char*>(params.draft_slots) +
             (int64_t{segment.request} * params.s_q - segment.list_length) * index_bytes_;
    row_bytes_ = params.kv_stride * C::Kv::kElementBytes;
  }

  // The slots of two tiles of the segment: of the second one in lanes 16..31. -1 past the end of the request.
  __device__ int slots_of_two(int tile) {
    const int position = (segment_.first_tile + tile) * kTileTokens + lane_;
    if (position >= segment_.num_tokens) return -1;
    const char* base = position < segment_.list_length ? list_ : draft_;
    const int64_t slot = params_.indices_are_64 ? __ldg(reinterpret_cast<const int64_t*>(base) + position)
                                                : int64_t{__ldg(reinterpret_cast<const int32_t*>(base) + position)};
    const int64_t inside = slot < 0 ? 0 : slot < params_.num_slots ? slot : params_.num_slots - 1;
    clamped_ |= inside != slot;
    return static_cast<int>(inside);
  }

  // `slots` as slots_of_two gives them, `odd` says which of the two tiles.
  __device__ void copy_values(int stage, int slots, int odd) const {
#pragma unroll
    for (int i = 0; i < kTileTokens / 4; ++i) {
      const int token = 4 * i + lane_ / 8;
      const int slot = __shfl_sync(~0u, slots, odd * kTileTokens + token);
      const char* src = row(slot) + kSliceBytes * warp_ + lane_ % 8 * kChunkBytes;
      const uint32_t dst = arch::smem_address(smem_.kv[stage]) + token * C::kPitch + kSliceBytes * warp_ + swizzle(lane_ % 8, token % 8);
#pragma unroll
      for (int at = 0; at < kSliceBytes; at += kGroupBytes) arch::cp_async_16(dst + at, src + at, slot < 0 ? 0 : 16);
    }
  }

  // The slot whose rotary part this lane copies.
  __device__ int rope_slot(int slots, int odd) const { return __shfl_sync(~0u, slots, odd * kTileTokens + 4 * warp_ + lane_ / 8); }

  __device__ void copy_rope(int stage, int slot) const {
    const int token = 4 * warp_ + lane_ / 8;
    const uint32_t dst = arch::smem_address(smem_.kv[stage]) + token * C::kPitch + C::kValueBytes + swizzle(lane_ % 8, token % 8);
    if (lane_ % 8 < C::kRopeChunks) arch::cp_async_16(dst, row(slot) + C::kValueBytes + lane_ % 8 * kChunkBytes, slot < 0 ? 0 : 16);
  }

  // Into the L2: what this warp will copy of two tiles, one token a lane.
  __device__ void prefetch(int slots) const {
    const int rope_slot = __shfl_sync(~0u, slots, lane_ / 4 * kTileTokens + 4 * warp_ + lane_ % 4);  // lanes 0..7
    if (slots >= 0) {
      const char* src = row(slots) + kSliceBytes * warp_;
      arch::prefetch_l2(src);
      arch::prefetch_l2(src + kSliceBytes - kChunkBytes);
    }
    if (lane_ < 8 && rope_slot >= 0) arch::prefetch_l2(row(rope_slot) + C::kValueBytes);
  }

  // Into the L2: the slot list of one tile, for a later slots_of_two. One lane.
  __device__ void prefetch_list(int tile) const {
    const int position = (segment_.first_tile + tile) * kTileTokens;
    if (position < segment_.list_length) arch::prefetch_l2(list_ + int64_t{position} * index_bytes_);
  }

  __device__ void report() const {
    if (clamped_ && params_.status != nullptr) atomicOr(params_.status, kSlotClamped);
  }

 private:
  static constexpr int kSliceBytes = kDvPerWarp * C::Kv::kElementBytes;  // 256 or 128

  __device__ const char* row(int slot) const { return static_cast<const char*>(params_.kv_cache) + max(slot, 0) * row_bytes_; }

  const MlaTreeVerifyParams& params_;
  const Segment& segment_;
  typename C::SharedMemoryPlan& smem_;
  const int warp_, lane_;
  const char* list_;   // indexed by the token's position in the request
  const char* draft_;  // likewise
  int64_t row_bytes_;
  int index_bytes_;
  bool clamped_ = false;
};

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
