// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::kv_move_config {

constexpr int kThreads = 256;
constexpr int kSmemBytes = 98304;  // 96 KiB of the 99 KiB that a block may have on sm_120
constexpr int kMaxChunkBytes =
    512;  // measured nowhere yet: a 1152-byte row gives 3 blocks a layer, 183 for 61 layers

// The columns that one block moves for all n rows: the widest power of two that fits in shared
// memory, at most kMaxChunkBytes.
constexpr int chunk_bytes(int64_t n, int granule) {
  int chunk = granule;
  while (chunk * 2 <= kMaxChunkBytes && n * chunk * 2 <= kSmemBytes) chunk *= 2;
  return chunk;
}

constexpr int64_t max_rows(int granule) { return kSmemBytes / granule; }

static_assert(max_rows(16) == 6144);
static_assert(chunk_bytes(9, 16) == 512 && chunk_bytes(192, 16) == 512 &&
              chunk_bytes(193, 16) == 256);
static_assert(chunk_bytes(6144, 16) == 16 && chunk_bytes(24576, 4) == 4);

}  // namespace sgl_kernel_sm120::kv_move_config
