// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::ddtree_build_op {

constexpr int kMaxNodes = 128;
constexpr int kMaxDepth = 31;
constexpr int kMaxTopk = 64;
constexpr int kThreads = kMaxNodes;  // one thread a node; warp 0 grows the tree
constexpr int kLanes = 32;
constexpr int kRankBits = 6;                               // a rank is below 64
constexpr int kRanksPerWord = 64 / kRankBits;              // 10
constexpr int kPathWords = kMaxDepth / kRanksPerWord + 1;  // 4
constexpr int kMaskWords = kMaxNodes / 32;                 // 4

constexpr int32_t kRootParent = -1;
constexpr int32_t kUnusedParent = -2;
constexpr int32_t kNoNode = -1;

// The rank path of a node, first rank in the highest bits: paths of one depth compare as their
// words do.
struct Path {
  uint64_t words[kPathWords];
};

struct SharedMemory {
  float log_probs[kMaxDepth * kMaxTopk];  // 7,936 B
  // Nodes in the order in which they were chosen; node 0 is the root.
  Path path[kMaxNodes];  // 4,096 B
  int16_t parent[kMaxNodes];
  int16_t rank[kMaxNodes];  // rank of the node's own token
  int16_t depth[kMaxNodes];
  // The same nodes in breadth-first order.
  int16_t place[kMaxNodes];  // breadth-first number of a chosen node
  int16_t up[kMaxNodes];     // parent of a breadth-first number
  uint32_t seen[kMaxNodes][kMaskWords];
  int num_used;
};
static_assert(sizeof(SharedMemory) <= 49152, "static shared memory is limited to 48 KiB");

}  // namespace sgl_kernel_sm120::ddtree_build_op
