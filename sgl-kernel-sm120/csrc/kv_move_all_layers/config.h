// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::kv_move_config {

constexpr int kFewThreads = 256, kMaxThreads = 512;  // for a call of few pairs, and else
constexpr int kLoads = 8;                            // loads that a thread has in flight
constexpr int kSmemBytes = 98304;       // 96 KiB of the 99 KiB that a block may have on sm_120
constexpr int kBlockSmemBytes = 99344;  // what a block takes of a multiprocessor's: and 1 KiB and
                                        // the kernel's own 16 bytes
constexpr int kPairBytes = 8;           // of a listed pair: two slots
constexpr int kMaxPieceBytes = 512;

// Rows that fit in shared memory, a granule of each.
__host__ __device__ constexpr int64_t max_rows(int granule) { return kSmemBytes / granule; }

// Pairs that fit with a granule of their rows.
__host__ __device__ constexpr int max_listed(int granule) {
  return kSmemBytes / (kPairBytes + granule);
}

// log2 of the widest piece, a power of two of bytes and a granule at least, of which all `rows` fit
// in `bytes`.
__host__ __device__ constexpr int log2_piece(int rows, int bytes, int log2_granule) {
  int log2 = log2_granule;
  while ((2 << log2) <= kMaxPieceBytes && int64_t{rows} * (2 << log2) <= bytes) ++log2;
  return log2;
}

// Shared memory of a call of n pairs: all of them listed, and their widest pieces; or what there
// is.
__host__ __device__ constexpr int smem_bytes(int64_t n) {
  const int64_t wanted = n * (kPairBytes + kMaxPieceBytes) + 16;
  return static_cast<int>(wanted < kSmemBytes ? wanted : kSmemBytes);
}

// Whether pieces are the widest, however many of n pairs move.
constexpr bool is_small(int64_t n) { return smem_bytes(n) < kSmemBytes; }

static_assert(max_rows(16) == 6144 && max_rows(1) == 98304);
static_assert(max_listed(16) == 4096 && max_listed(4) == 8192 && max_listed(1) == 10922);
static_assert(smem_bytes(1) == 536 && is_small(189) && !is_small(190));
static_assert(log2_piece(1, 512, 4) == 9 && log2_piece(1200, kSmemBytes - 9600, 4) == 6);
static_assert(log2_piece(4096, kSmemBytes - 32768, 4) == 4 &&
              log2_piece(98304, kSmemBytes, 0) == 0);

}  // namespace sgl_kernel_sm120::kv_move_config
