// SPDX-License-Identifier: Apache-2.0
// words[row][w] bit j = visible[row][64 w + j] != 0. One warp packs one row: two ballots of 32
// bytes make a word.
#pragma once
#include "pack_tree_mask/config.h"
#include "params.h"

namespace sgl_kernel_sm120 {

namespace pack_tree_mask_config {

// Bit `lane` of the result: column first + lane is visible. Columns at or beyond n count as not
// visible.
__device__ __forceinline__ uint32_t ballot_columns(const uint8_t* gRow, int first, int n,
                                                   int lane) {
  const int column = first + lane;
  return __ballot_sync(0xffffffffu, column < n && gRow[column] != 0);
}

}  // namespace pack_tree_mask_config

__global__ void __launch_bounds__(pack_tree_mask_config::kThreads)
    pack_tree_mask_kernel(const PackTreeMaskParams params) {
  using namespace pack_tree_mask_config;
  const int lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / 32;
  if (row >= params.rows) return;
  const int num_words = (params.n + kBitsPerWord - 1) / kBitsPerWord;
  const uint8_t* gRow = params.visible + row * params.n;
  for (int word = 0; word < num_words; ++word) {
    const uint32_t low = ballot_columns(gRow, word * kBitsPerWord, params.n, lane);
    const uint32_t high = ballot_columns(gRow, word * kBitsPerWord + 32, params.n, lane);
    if (lane == 0) params.words[row * num_words + word] = uint64_t{high} << 32 | low;
  }
}

}  // namespace sgl_kernel_sm120
