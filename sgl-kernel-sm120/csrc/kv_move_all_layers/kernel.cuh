// SPDX-License-Identifier: Apache-2.0
// buffer[tgt[i]] = old buffer[src[i]] for all i at once, in every buffer (one a layer).
//
// Columns of a row never mix, so a block owns a chunk of columns of one buffer for all n rows: it
// reads every source into shared memory, waits, then writes every target. No other block touches
// those columns, so any overlap of tgt and src is safe in one launch, without a scratch buffer or a
// grid-wide barrier.
//
//   grid  (ceil(longest row / chunk), num_buffers)
//   smem  [n][chunk] bytes, at most 96 KiB: the chunk narrows as n grows, down to one granule
#pragma once
#include "common/dynamic_smem.cuh"
#include "kv_move_all_layers/config.h"
#include "params.h"

namespace sgl_kernel_sm120 {

namespace kv_move_config {

template <int Granule>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<1> {
  using Type = uint8_t;
};

struct Pair {
  int64_t src, tgt;
  __device__ bool moves(int32_t num_slots) const {
    return src >= 0 && tgt >= 0 && src < num_slots && tgt < num_slots;
  }
};

__device__ __forceinline__ Pair load_pair(const KvMoveParams& params, int i) {
  return {params.src[i], params.tgt[i]};
}

}  // namespace kv_move_config

// A pair with a negative index is padding. One beyond the buffer is skipped too: a wrong index may
// never become a wrong access.
template <int Granule>
__global__ void __launch_bounds__(kv_move_config::kThreads)
    kv_move_kernel(const __grid_constant__ KvMoveParams params, int log2_words) {
  using namespace kv_move_config;
  using Word = typename kv_move_config::Word<Granule>::Type;
  Word* sRows = reinterpret_cast<Word*>(dynamic_smem());  // [n][1 << log2_words]

  const KvMoveParams::Buffer& buffer = params.buffers[blockIdx.y];
  const int words = 1 << log2_words;
  const int64_t first_byte = int64_t{blockIdx.x} * words * Granule;
  if (first_byte >= buffer.row_bytes) return;
  const int total = params.n << log2_words;

  // Read every source.
  for (int at = threadIdx.x; at < total; at += kThreads) {
    const int64_t byte = first_byte + (at & (words - 1)) * Granule;
    const Pair pair = load_pair(params, at >> log2_words);
    if (byte < buffer.row_bytes && pair.moves(buffer.num_slots))
      sRows[at] = *reinterpret_cast<const Word*>(buffer.base + pair.src * buffer.row_stride + byte);
  }
  __syncthreads();

  // Write every target.
  for (int at = threadIdx.x; at < total; at += kThreads) {
    const int64_t byte = first_byte + (at & (words - 1)) * Granule;
    const Pair pair = load_pair(params, at >> log2_words);
    if (byte < buffer.row_bytes && pair.moves(buffer.num_slots))
      *reinterpret_cast<Word*>(buffer.base + pair.tgt * buffer.row_stride + byte) = sRows[at];
  }
}

}  // namespace sgl_kernel_sm120
