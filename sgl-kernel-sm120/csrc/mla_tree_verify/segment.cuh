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

// A plan made for other lengths must not lead out of kv_indices.
__device__ __forceinline__ Segment make_segment(const MlaTreeVerifyParams& params, int request,
                                                int line, int line_end) {
  const PlanEntry entry = load_plan_entry(params, request);
  const int next = load_plan_entry(params, request + 1).first_tile;
  Segment s;
  s.request = request;
  s.first_tile = line - entry.first_tile;
  s.num_tiles = min(line_end, next) - line;
  s.list_begin = static_cast<int>(min(int64_t{max(entry.list_begin, 0)}, params.num_indices));
  s.list_length =
      static_cast<int>(min(int64_t{max(entry.list_length, 0)}, params.num_indices - s.list_begin));
  s.num_tokens =
      params.draft_slots == nullptr ? min(entry.num_tokens, s.list_length) : entry.num_tokens;
  s.prefix = max(s.num_tokens - params.s_q, 0);
  s.slot = blockIdx.y + request;
  return s;
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

// Softmax warps: a bit a draft key and row. Rows past the end see none.
template <class C>
__device__ __forceinline__ void build_tree_mask(const MlaTreeVerifyParams& params,
                                                const Segment& segment,
                                                typename C::SharedMemoryPlan& smem, int first_row) {
  const int thread = arch::thread_index() % kWarpgroup, lane = thread % kWarp;
  for (int r = thread / kWarp; r < C::kRows; r += kSoftmaxWarps) {
    const int position = (first_row + r) / params.h_q;
    for (int word = 0; word * 32 < params.s_q; ++word) {
      const int key = word * 32 + lane;
      const bool visible = position < params.s_q && key < params.s_q &&
                           draft_key_visible(params, segment, position, key);
      const uint32_t bits = __ballot_sync(~0u, visible);
      if (lane == 0) smem.tree_mask[r][word] = bits;
    }
  }
  if (thread == 0 && params.status != nullptr && !mask_block_is_complete(params, segment))
    atomicOr(params.status, kMaskClamped);
}

// What the plan kernel found.
__device__ __forceinline__ void report_plan_status(const MlaTreeVerifyParams& params) {
  const int flags = load_plan_entry(params, params.b).list_length;
  if (flags != 0 && params.status != nullptr) atomicOr(params.status, flags);
}

// The segments of a column, one after the other. Load warps step together and tell the others
// through shared memory.
class Segments {
 public:
  __device__ explicit Segments(const MlaTreeVerifyParams& params)
      : params_(params), line_(0), line_end_(0) {
    num_tiles_ = load_plan_entry(params, params.b).first_tile;
    const int columns = num_columns(num_tiles_, gridDim.y);
    if (blockIdx.y < columns)
      line_ = column_begin(blockIdx.y, num_tiles_, columns),
      line_end_ = column_begin(blockIdx.y + 1, num_tiles_, columns);
  }

  // num_tiles is 0 at the end. A thread looks at every 128th request: how many end before this
  // segment?
  __device__ Segment next() {
    if (line_ >= line_end_) return {};
    int request = 0;
    for (int first = 0; first < params_.b; first += kWarpgroup) {
      const int mine = first + arch::thread_index() % kWarpgroup;
      const bool over = mine < params_.b && load_plan_entry(params_, mine + 1).first_tile <= line_;
      request += arch::named_barrier_count(kBarLoadWarps, kWarpgroup, over);
    }
    const Segment segment = make_segment(params_, request, line_, line_end_);
    line_ += segment.num_tiles;
    return segment;
  }

 private:
  const MlaTreeVerifyParams& params_;
  int num_tiles_, line_, line_end_;
};

// How many segments share the request.
__device__ __forceinline__ int count_parts(const MlaTreeVerifyParams& params, int request) {
  const int begin = load_plan_entry(params, request).first_tile,
            end = load_plan_entry(params, request + 1).first_tile;
  const int num_tiles = load_plan_entry(params, params.b).first_tile,
            columns = num_columns(num_tiles, gridDim.y);
  return column_of_tile(end - 1, num_tiles, columns) - column_of_tile(begin, num_tiles, columns) +
         1;
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
