// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::ddtree_build_op {

constexpr int kMaxNodes = 128;
constexpr int kMaxDepth = 31;
constexpr int kMaxTopk = 64;
constexpr int kMaxPaths = kMaxNodes - 1;  // below the root
constexpr int kThreads = 256;
constexpr int kLanes = 32;
constexpr int kMaxSplit = 8;  // lanes that share one path's counting: 1, 2, 4 or 8
constexpr int kNodeSplit = kThreads / kMaxNodes;  // threads that number one node
constexpr int kBatch = 4;                         // pairs of paths in flight
constexpr int kMaskWords = kMaxNodes / 32;

constexpr int32_t kRootParent = -1;
constexpr int32_t kUnusedParent = -2;
constexpr int32_t kNoNode = -1;

// A path that may be among the `limit` best: child `rank` of the `beam`-th best path one depth up.
// Its beam + 1 better parents and their (beam + 1) * (rank + 1) - 1 other children weigh as much or
// more, so limit >= (beam + 1) * (rank + 2).
struct Pair {
  uint8_t beam, rank;
};

constexpr int count_pairs(int limit) {
  int count = 0;
  for (int beam = 0; 2 * (beam + 1) <= limit; ++beam)
    for (int rank = 0; rank < kMaxTopk && (beam + 1) * (rank + 2) <= limit; ++rank) ++count;
  return count;
}

constexpr int kMaxPairs = count_pairs(kMaxPaths);
constexpr int kPairsPerThread = (kMaxPairs + kThreads - 1) / kThreads;
static_assert(kPairsPerThread == 2);

constexpr int one_pair_limit() {
  int limit = 0;
  while (count_pairs(limit + 1) <= kThreads) ++limit;
  return limit;
}
constexpr int kOnePairLimit = one_pair_limit();  // up to it the second pair of a thread is none

struct PairTable {
  Pair pairs[kPairsPerThread * kThreads];  // those of a limit come before those of a larger one
};

constexpr PairTable list_pairs() {
  PairTable table{};
  int count = 0;
  for (int limit = 2; limit <= kMaxPaths; ++limit)
    for (int rows = 1; 2 * rows <= limit; ++rows)
      if (limit % rows == 0 && limit / rows - 2 < kMaxTopk)
        table.pairs[count++] = {static_cast<uint8_t>(rows - 1),
                                static_cast<uint8_t>(limit / rows - 2)};
  for (; count < kPairsPerThread * kThreads; ++count) table.pairs[count] = {255, 255};  // never
  return table;
}

// A path in one word: its weight, then its place among paths of equal weight. A larger item is a
// better path. The place is depth, parent's number, rank; a path's number orders the paths of its
// depth.
using Item = uint64_t;
constexpr int kRankBits = 6;
constexpr int kNumberBits = 9;
static_assert(kMaxTopk <= 1 << kRankBits && kMaxPairs <= 1 << kNumberBits);

struct alignas(16) ItemPair {
  Item first, second;
};

// A path of the last depth, by weight. Without one: weight -inf, which no child can exceed.
struct alignas(8) Parent {
  float weight;
  int32_t number;
};

struct Ties {  // children of one parent
  int32_t number;
  int16_t above, tied;  // weigh more than the last of the best paths, or the same
};

struct SharedMemory {
  int64_t ids[kMaxDepth * kMaxTopk];      // as in global memory; 15,872 B
  float log_probs[kMaxDepth * kMaxTopk];  // a row a depth, its real ranks only; 7,936 B
  uint8_t rank_of[kMaxDepth * kMaxTopk];  // of a real rank
  int32_t num_real[kMaxDepth];

  // What a depth reads has index depth % 2, what it writes the other one.
  Item best[2][kMaxNodes];    // the best paths so far, best first
  int32_t key[2][kMaxNodes];  // of the same: breadth-first order
  Parent parents[2][kMaxNodes];
  // Paths of the depth at hand that may be among the best; a batch may read beyond the last.
  ItemPair fresh[(kMaxPairs + 1) / 2 + kBatch * kMaxSplit];
  int32_t num_fresh[2];
  Ties ties[kMaxNodes];

  // By breadth-first number.
  int16_t up[kMaxNodes];
  int16_t first[kMaxNodes];
  int16_t source[kMaxNodes];  // index into ids
  int16_t depth[kMaxNodes];
  uint32_t seen[kMaxNodes][kMaskWords];
};
static_assert(sizeof(SharedMemory) <= 49152, "static shared memory is limited to 48 KiB");

}  // namespace sgl_kernel_sm120::ddtree_build_op
