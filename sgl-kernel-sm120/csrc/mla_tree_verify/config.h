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
constexpr int kThreads =
    kRoles * kWarpgroup;  // 512 threads of 128 registers each, then redistributed
constexpr int kWarpsPerRole = kWarpgroup / kWarp;
constexpr int kDvPerWarp = kDv / kValueWarps;  // 128
constexpr int kChunkBytes = 16;  // what one cp.async moves and one row of an ldmatrix matrix holds
constexpr int kGroupBytes =
    128;  // 8 chunks: all banks once. Chunk c of row r lies at place c ^ (r % 8) of its group
constexpr int kMaxBatch = 256;
constexpr int kQRowBytes = 2 * kDqk;  // 1152
constexpr int kRowsPerLoadWarp = kTileTokens / kLoadWarps;
constexpr int kLanesPerRow = kWarp / kRowsPerLoadWarp;  // 8: they copy 128 B of a row at once

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

// The part of a column that lies in one request.
struct Segment {
  int request;
  int first_tile, num_tiles;  // of the request
  int num_tokens;             // of the request, draft tokens included
  int prefix;                 // tokens that every row sees
  int list_begin, list_length;
  int ring, tile;  // of its first KV tile: position in the ring of stages; number in the block
  int number;      // in the block
  bool is_whole;   // the request has no other segment
};

// What a warp works on, and the rest of its column. In shared memory: there are no registers to
// spare while a segment is worked on.
struct Work {
  Segment segment;
  int line, line_end;  // tiles on the line of all requests
};

template <class Kv_, int kRowBlocks_>
struct Config {
  using Kv = Kv_;
  static constexpr int kRowBlocks = kRowBlocks_;  // MMA N tiles of 8 rows
  static constexpr int kRows = 8 * kRowBlocks;    // query rows (position x head) of a block
  static constexpr bool kNeedsToMoveRegisters = kRowBlocks > kMaxRowBlocksFixed;
  // Of the roles. At 40 rows Q takes 180 of a score warp's and O 160 of a value warp's.
  static constexpr int kRegisters[kRoles] = {216, 56, 200, 40};
  static_assert(kRegisters[kScore] + kRegisters[kSoftmax] + kRegisters[kValue] +
                    kRegisters[kLoad] <=
                kRoles * 128);
  static constexpr int kStages = Kv::kStages;
  static constexpr int kValueBytes = kDv * Kv::kElementBytes;  // 1024 or 512
  static constexpr int kPitch = kValueBytes + kGroupBytes;     // 1152 or 640
  static constexpr int kStageBytes = kTileTokens * kPitch;     // 18,432 or 10,240
  static constexpr int kRopeChunks = Kv::kRowChunks - kValueBytes / kChunkBytes;  // 8 or 4
  static constexpr int kQRowsPerStage = kStageBytes / kQRowBytes;                 // 16 or 8
  static constexpr int kQStages = (kRows + kQRowsPerStage - 1) / kQRowsPerStage;
  static constexpr int kSteps = 18;  // of 16 columns, a score warp's share of the 36
  // A softmax warp has every fourth row block; with fewer blocks than warps some have none.
  static constexpr int kBusySoftmaxWarps = kRowBlocks < kSoftmaxWarps ? kRowBlocks : kSoftmaxWarps;
  static constexpr int kSoftmaxBlocks = (kRowBlocks + kSoftmaxWarps - 1) / kSoftmaxWarps;
  // A value warp is at most so many segments behind the softmax warps: each takes kQStages + 1
  // stages or more.
  static constexpr int kLiveSegments = 2 + (kStages - 1) / (kQStages + 1);

  struct SharedMemoryPlan {
    alignas(
        128) unsigned char stages[kStages][kStageBytes];  // of a ring of KV tiles and tiles of Q
    float4 scores[kHalves][kRowBlocks]
                 [kWarp];  // of a tile, each half of the columns on its own, as MMA accumulators
    // Of a segment, written with its last tile: what P is relative to in the end, log2, and sums.
    float row_max[kLiveSegments][kRows], row_sum[kLiveSegments][kRows];
    float rescale[kStages][kRows];  // for O before it takes the tile; valid where rescaled says so
    unsigned char rescaled[kStages][kSoftmaxWarps];  // the row blocks of each softmax warp
    alignas(8) uint64_t bar_full[kStages];           // rows have landed
    uint64_t bar_empty[kStages];  // KV: all value warps have used them; Q: all score warps
    // One a waiting warp or pair: who waits for every n-th phase of a barrier would mistake another
    // phase for its own.
    uint64_t bar_scores_full;           // both halves are written
    uint64_t bar_scores_empty[kPairs];  // tile % 2: both halves are read
    uint64_t bar_p_full[kStages];       // P of a tile is written
    Work work[kThreads / kWarp];
    // fp8: Q of a segment is fp16, and the power of two that brought each row into its range. One
    // barrier a live segment: a score warp may come when the next segment's Q is done too.
    static constexpr int kScaledSegments = Kv::kFp8 ? kLiveSegments : 1;
    uint64_t bar_q_scaled[kScaledSegments];
    float q_scale[kScaledSegments][Kv::kFp8 ? kRows : 2];
  };
  static constexpr int kSmemBytes = sizeof(SharedMemoryPlan);
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_120 gives a block 99 KiB");
  static_assert(2 * kRows <= kGroupBytes, "the probabilities of a token fit behind its value");
  static_assert(kQStages < kStages);
  static_assert(kValueWarps == kPairs * kHalves, "who empties a stage, of KV or of Q");
};

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
