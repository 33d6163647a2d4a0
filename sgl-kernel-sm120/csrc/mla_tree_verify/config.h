// SPDX-License-Identifier: Apache-2.0
// Shapes, the shared-memory plan and the barriers of the main kernel.
#pragma once
#include <cstdint>

#include "common/per_device.h"
#include "mla_tree_verify/schedule.h"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kDqk = 576;
constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;  // what registers move between
constexpr int kPairs = 2;        // pairs of score warps: they take tiles in turn
constexpr int kHalves = 2;       // warps of a pair: each has half of the 576 columns
constexpr int kSoftmaxWarps = 4;
constexpr int kLoadWarps = 4;
enum Role : int { kScore, kSoftmax, kValue, kLoad, kRoles };  // of a warpgroup
constexpr int kMathThreads = kLoad * kWarpgroup;
constexpr int kThreads =
    kRoles * kWarpgroup;  // 512 threads of 128 registers each, then redistributed
constexpr int kDvPerWarp = kDv / kValueWarps;  // 128
constexpr int kChunkBytes = 16;  // what one cp.async moves and one row of an ldmatrix matrix holds
constexpr int kGroupBytes =
    128;  // 8 chunks: all banks once. Chunk c of row r lies at place c ^ (r % 8) of its group
constexpr int kMaxBatch = 256;
constexpr int kMaxDraft = 128;
constexpr int kMaskWords = kMaxDraft / 32;
constexpr int kQRowBytes = 2 * kDqk;  // 1152
constexpr int kBatch = 4;             // tiles whose slots a load warp reads at once

// The cache row and how a tile of it lies in shared memory. A row has its value (a multiple of 128
// B), then a group of 128 B that first holds the rotary part and, once the scores of the tile are
// known, one row of P: kRows probabilities.
struct Bf16Kv {
  static constexpr bool kFp8 = false;
  static constexpr int kElementBytes = 2;
  static constexpr int kRowChunks = 72;  // 1152 B
  static constexpr int kStages = 5;      // x 18,432 B
  static constexpr float kRescaleAt =
      32.f;  // P may grow to 2^32 before O is rescaled: bf16 has the exponents of fp32
};
struct Fp8Kv {
  static constexpr bool kFp8 = true;
  static constexpr int kElementBytes = 1;
  static constexpr int kRowChunks = 36;     // 576 B
  static constexpr int kStages = 9;         // x 10,240 B
  static constexpr float kRescaleAt = 8.f;  // P is fp16, at most 65504
};

struct Segment {
  int request;
  int first_tile, num_tiles;  // of the request
  int num_tokens;             // of the request, draft tokens included
  int prefix;                 // tokens that every row sees
  int list_begin, list_length;
  int slot;  // of the workspace
};

template <class Kv_, int kRowBlocks_>
struct Config {
  using Kv = Kv_;
  static constexpr int kRowBlocks = kRowBlocks_;  // MMA N tiles of 8 rows
  static constexpr int kRows = 8 * kRowBlocks;    // query rows (position x head) of a block
  static constexpr bool kNeedsToMoveRegisters = kRowBlocks > kMaxRowBlocksFixed;
  // Of the roles. At 40 rows Q takes 180 of a score warp's and O 160 of a value warp's. What the
  // others need differs between sm_120 and sm_90 by what the compiler makes of the same code.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr int kRegisters[kRoles] = {kRowBlocks == 5   ? 216
                                             : kRowBlocks == 4 ? 208
                                                               : 184,
                                             kRowBlocks == 5 ? 48 : 64, kRowBlocks == 5 ? 200 : 192,
                                             kRowBlocks >= 4 ? 48 : 72};
#else
  static constexpr int kRegisters[kRoles] = {kRowBlocks == 5 ? 216 : 208, kRowBlocks == 5 ? 56 : 64,
                                             192, 48};
#endif
  static_assert(kRegisters[kScore] + kRegisters[kSoftmax] + kRegisters[kValue] +
                    kRegisters[kLoad] <=
                kRoles * 128);
  static constexpr int kStages = Kv::kStages;
  static constexpr int kValueBytes = kDv * Kv::kElementBytes;  // 1024 or 512
  static constexpr int kPitch = kValueBytes + kGroupBytes;     // 1152 or 640
  static constexpr int kStageBytes = kTileTokens * kPitch;     // 18,432 or 10,240
  static constexpr int kRopeChunks = Kv::kRowChunks - kValueBytes / kChunkBytes;  // 8 or 4
  static constexpr int kQStages =
      (kRows * kQRowBytes + kStageBytes - 1) / kStageBytes;  // stages that Q passes through
  static constexpr int kEarlyTiles = kStages - kQStages;     // tiles loaded beside it
  static constexpr int kSteps = 18;  // of 16 columns, a score warp's share of the 36

  struct SharedMemoryPlan {
    alignas(128) unsigned char kv[kStages][kStageBytes];  // also Q on its way into registers
    float4 scores[kHalves][kRowBlocks]
                 [kWarp];  // of a tile, each half of the columns on its own, as MMA accumulators
    uint32_t tree_mask[kRows][kMaskWords];  // bit j: the row sees draft key j
    float row_max[kRows];  // what P is relative to, log2; lags behind the true maximum
    float row_sum[kRows];
    float rescale[kStages][kRows];  // for O before it takes the tile; valid where rescaled says so
    int rescaled[kStages];
    Segment segment;
    int num_parts;                             // segments that share its request
    alignas(8) uint64_t bar_kv_full[kStages];  // rows of a tile have landed
    uint64_t bar_kv_empty[kStages];            // all value warps have used them
    // One a waiting warp or pair: who waits for every n-th phase of a barrier would mistake another
    // phase for its own.
    uint64_t bar_scores_full[kSoftmaxWarps];  // tile % 4: both halves are written
    uint64_t bar_scores_empty[kPairs];        // tile % 2: both halves are read
    uint64_t bar_row_max[kSoftmaxWarps];      // tile % 4: row_max is settled
    uint64_t bar_p_full[kStages];             // P of a tile is written
    float q_scale[Kv::kFp8 ? kRows
                           : 1];  // the power of two that brings a row of Q into the range of fp16
  };
  static constexpr int kSmemBytes = sizeof(SharedMemoryPlan);
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_120 gives a block 99 KiB");
  static_assert(2 * kRows <= kGroupBytes, "the probabilities of a token fit behind its value");
  static_assert(kEarlyTiles >= 1);
};

// Named barriers; 0 is the whole block.
enum Barrier : int {
  kBarValueWarps = 1,
  kBarLoadWarps,
  kBarMathWarps,
  kBarSegmentDone,  // all but the load warps are done with the last segment
  kBarQRead,        // score warps have Q in registers, load warps may overwrite its copy
};

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
