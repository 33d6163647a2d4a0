// SPDX-License-Identifier: Apache-2.0
// The piece of work between two reloads of Q, and the mask of its draft keys.
#pragma once
#include "arch/barrier.cuh"
#include "arch/registers.cuh"
#include "mla_tree_verify/config.h"
#include "params.h"

namespace sgl_kernel_sm120::mla_tree_verify_op {

__device__ __forceinline__ PlanEntry load_plan_entry(const MlaTreeVerifyParams& params,
                                                     int request) {
  const int4 v = __ldg(reinterpret_cast<const int4*>(params.plan) + request);
  return {v.x, v.y, v.z, v.w};
}

// The position of a query row; its head is what remains. Exact: rows are fewer than 2^15, heads
// than 2^8.
__device__ __forceinline__ int position_of_row(int row, float heads_inverse) {
  return static_cast<int>((static_cast<float>(row) + 0.5f) * heads_inverse);
}

__device__ __forceinline__ bool draft_key_visible(const MlaTreeVerifyParams& params,
                                                  const Segment& segment, int position, int key) {
  const int64_t row = int64_t{segment.request} * params.s_q + position;
  const auto* bytes = static_cast<const uint8_t*>(params.tree_mask);
  switch (params.mask_layout) {
    case MaskLayout::kCausal:
      return key <= position;
    case MaskLayout::kQlen:
      return bytes[row * params.s_q + key] != 0;
    case MaskLayout::kBits:
      return static_cast<const uint64_t*>(
                 params.tree_mask)[row * ((params.s_q + 63) / 64) + key / 64] >>
                 (key % 64) &
             1;
    case MaskLayout::kFull:
      const int64_t at = params.mask_indptr[segment.request] +
                         int64_t{position} * (segment.prefix + params.s_q) + segment.prefix + key;
      return at >= 0 && at < params.mask_bytes && bytes[at] != 0;
  }
  return false;
}

__device__ __forceinline__ bool mask_block_is_complete(const MlaTreeVerifyParams& params,
                                                       const Segment& segment) {
  if (params.mask_layout != MaskLayout::kFull) return true;
  const int64_t begin = params.mask_indptr[segment.request];
  return begin >= 0 &&
         begin + int64_t{params.s_q} * (segment.prefix + params.s_q) <= params.mask_bytes;
}

// What the plan kernel found.
__device__ __forceinline__ void report_plan_status(const MlaTreeVerifyParams& params) {
  const int flags = load_plan_entry(params, params.b).list_length;
  if (flags != 0 && params.status != nullptr && arch::thread_index() % kWarp == 0)
    atomicOr(params.status, flags);
}

// The segments of a column, one after the other. Every warp finds them on its own; where it is lies
// in shared memory, since registers are short between one segment and the next.
__device__ __forceinline__ void find_first_segment(const MlaTreeVerifyParams& params, Work& work) {
  const int num_tiles = load_plan_entry(params, params.b).first_tile,
            columns = num_columns(num_tiles, gridDim.y);
  int line = 0, line_end = 0;
  if (blockIdx.y < static_cast<unsigned>(columns))
    line = column_begin(blockIdx.y, num_tiles, columns),
    line_end = column_begin(blockIdx.y + 1, num_tiles, columns);
  // How many requests end at or before the line? Lanes look at every eighth end, then at those
  // between.
  const int lane = arch::thread_index() % kWarp;
  const auto ends_before = [&](int i) {
    return i <= params.b && load_plan_entry(params, i).first_tile <= line;
  };
  int request = 0;
  if (params.b <= kWarp) {
    request = __popc(__ballot_sync(~0u, ends_before(lane + 1)));
  } else {
    constexpr int kStep = kMaxBatch / kWarp;
    request = kStep * __popc(__ballot_sync(~0u, ends_before(kStep * (lane + 1))));
    request += __popc(__ballot_sync(~0u, lane < kStep - 1 && ends_before(request + lane + 1)));
  }
  if (lane == 0) {
    work.line = line, work.line_end = line_end;
    work.segment = {};
    work.segment.request = request;
    work.segment.number = -1;
  }
  __syncwarp();
}

// False: there is none left.
template <class C>
__device__ __forceinline__ bool next_segment(const MlaTreeVerifyParams& params, Work& work) {
  const int line = work.line, line_end = work.line_end;
  if (line >= line_end) return false;
  Segment s = work.segment;
  s.ring += s.num_tiles + C::kQStages;
  s.tile += s.num_tiles;
  s.number += 1;
  int end;
  while ((end = load_plan_entry(params, s.request + 1).first_tile) <= line) ++s.request;
  const PlanEntry entry = load_plan_entry(params, s.request);
  s.first_tile = line - entry.first_tile;
  s.num_tiles = min(line_end, end) - line;
  s.is_whole = s.num_tiles == end - entry.first_tile;
  // A plan made for other lengths must not lead out of kv_indices.
  s.list_begin = static_cast<int>(min(int64_t{max(entry.list_begin, 0)}, params.num_indices));
  s.list_length =
      static_cast<int>(min(int64_t{max(entry.list_length, 0)}, params.num_indices - s.list_begin));
  s.num_tokens =
      params.draft_slots == nullptr ? min(entry.num_tokens, s.list_length) : entry.num_tokens;
  s.prefix = max(s.num_tokens - params.s_q, 0);
  __syncwarp();
  if (arch::thread_index() % kWarp == 0) work.line = line + s.num_tiles, work.segment = s;
  __syncwarp();
  return true;
}

// Where position `ring` of the ring is, and the parity of its round.
template <class C>
struct Stage {
  int index;
  uint32_t parity;

  __device__ explicit Stage(int ring) : index(ring % C::kStages), parity(ring / C::kStages & 1) {}
  template <int kSteps>
  __device__ void advance() {
    index += kSteps;
    if (index >= C::kStages) index -= C::kStages, parity ^= 1;
  }
};

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
