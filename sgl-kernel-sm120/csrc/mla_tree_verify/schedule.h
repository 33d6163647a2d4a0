// SPDX-License-Identifier: Apache-2.0
// Who computes what: plain arithmetic, the same on the host and on the device. See NOTES.md, "Work
// distribution".
//
// The 16-token tiles of all requests lie on one line, request after request. The line is cut into
// equal parts, one a column of blocks; the blocks of a column share its tokens and have one row
// tile each. The part of a column that lies in one request is a segment. A segment leaves its
// partial result in slot column + request of the workspace: along the line either number grows from
// one segment to the next, so no two segments share a slot.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kTileTokens = 16;
constexpr int kDv = 512;
constexpr int kValueWarps = 4;
constexpr int kMinTilesPerColumn =
    3;  // below it a column's fixed cost outweighs the tokens it takes over
// Row tiles are 1 to this many blocks of 8 rows. What stops the next bigger one: the registers of a
// score warp (bf16: Q takes 36 a block; fp8: and the conversion of K) and, where registers cannot
// move between warps, 128 of them a thread.
constexpr int kMaxRowBlocksBf16 = 5, kMaxRowBlocksFp8 = 4, kMaxRowBlocksFixed = 2;

// A tile of n blocks costs about n + 3: loads and V do not depend on its rows (NOTES.md).
MLA_HOST_DEVICE constexpr int row_blocks_per_tile(int rows, int max_row_blocks) {
  const int blocks = (rows + 7) / 8;
  int best = max_row_blocks, best_cost = (blocks + best - 1) / best * (best + 3);
  for (int n = max_row_blocks - 1; n >= 1; --n) {
    const int cost = (blocks + n - 1) / n * (n + 3);
    if (cost < best_cost) best = n, best_cost = cost;
  }
  return best;
}

MLA_HOST_DEVICE constexpr int num_row_tiles(int rows, int row_blocks) {
  return (rows + 8 * row_blocks - 1) / (8 * row_blocks);
}

// One block an SM.
MLA_HOST_DEVICE constexpr int max_columns(int row_tiles, int num_sms) {
  return num_sms > row_tiles ? num_sms / row_tiles : 1;
}

// The columns that get work when the line is num_tiles long. Tiles times columns must stay under
// 2^32: 2^28 tokens in all.
MLA_HOST_DEVICE constexpr int num_columns(int num_tiles, int max_columns) {
  const int wanted = num_tiles / kMinTilesPerColumn;
  return wanted < 1 ? 1 : wanted < max_columns ? wanted : max_columns;
}

MLA_HOST_DEVICE constexpr int column_begin(int column, int num_tiles, int columns) {
  return static_cast<int>(static_cast<uint32_t>(column) * static_cast<uint32_t>(num_tiles) /
                          static_cast<uint32_t>(columns));
}

// The column that holds a tile: the last one that begins at or before it.
MLA_HOST_DEVICE constexpr int column_of_tile(int tile, int num_tiles, int columns) {
  return static_cast<int>((static_cast<uint32_t>(tile + 1) * static_cast<uint32_t>(columns) - 1) /
                          static_cast<uint32_t>(num_tiles));
}

// One entry a request and a last one whose first_tile is the length of the line. int4 on the
// device.
struct PlanEntry {
  int32_t first_tile;   // on the line
  int32_t list_begin;   // in kv_indices, clamped
  int32_t list_length;  // clamped; of the last entry: StatusBit mask
  int32_t num_tokens;   // list and, when they are apart from it, draft slots
};
constexpr int kPlanEntryInts = sizeof(PlanEntry) / sizeof(int32_t);

MLA_HOST_DEVICE constexpr int64_t partial_slots(int b, int row_tiles, int num_sms) {
  return int64_t{max_columns(row_tiles, num_sms)} + b - 1;
}

// One partial result: O of all row tiles in fp16, in the order of the MMA accumulators, then of
// each value warp and row fp32 (what O is relative to, log2; sum).
MLA_HOST_DEVICE constexpr int64_t partial_bytes(int row_tiles, int row_blocks) {
  return int64_t{row_tiles} * 8 * row_blocks * (kDv * 2 + 8 * kValueWarps);
}

// Enough for every cache format and GPU.
constexpr int64_t workspace_bytes(int b, int s_q, int h_q, int num_sms) {
  int64_t most = 0;
  for (int max_row_blocks : {kMaxRowBlocksBf16, kMaxRowBlocksFp8, kMaxRowBlocksFixed}) {
    const int row_blocks = row_blocks_per_tile(s_q * h_q, max_row_blocks),
              row_tiles = num_row_tiles(s_q * h_q, row_blocks);
    const int64_t bytes =
        partial_slots(b, row_tiles, num_sms) * partial_bytes(row_tiles, row_blocks);
    most = bytes > most ? bytes : most;
  }
  return most;
}

MLA_HOST_DEVICE constexpr int64_t plan_ints(int b) { return int64_t{b + 1} * kPlanEntryInts; }

static_assert(row_blocks_per_tile(72, kMaxRowBlocksBf16) == 5,
              "9 rows of 8 heads: two tiles of 40");

static_assert(row_blocks_per_tile(8, 5) == 1 && row_blocks_per_tile(64, 5) == 4 &&
              row_blocks_per_tile(576, 5) == 5);

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
