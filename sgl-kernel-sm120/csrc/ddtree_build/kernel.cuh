// SPDX-License-Identifier: Apache-2.0
// The n - 1 most probable paths below the root, one block a request.
//
// The tree grows by one node at a time. Every node offers its best child that is not in the tree
// yet; the best of all offers is the next node. Offers are ordered by weight, then depth (the
// shorter path first), then rank path. That is the order of a heap of paths, and an offer is never
// better than the node that makes it, so parents come before children.
//
//   grow            warp 0: n - 1 rounds of an argmax over at most n offers, 4 a lane
//   number          thread i counts the nodes before node i in breadth-first order
//   write           tokens, parents, depth, links; ancestors as bits, then as bytes
#pragma once
#include "ddtree_build/config.h"
#include "params.h"

namespace sgl_kernel_sm120 {

namespace ddtree_build_op {

// What node `node` offers: its child of rank next_rank.
struct Offer {
  float weight;  // -inf: nothing
  int depth;     // of the child
  int node;
};

__device__ __forceinline__ bool is_before(const Path& a, const Path& b) {
  for (int word = 0; word < kPathWords; ++word)
    if (a.words[word] != b.words[word]) return a.words[word] < b.words[word];
  return false;
}

// Two offers of one depth come from different nodes of one depth, whose paths decide.
__device__ __forceinline__ bool is_better(const SharedMemory& s, const Offer& a, const Offer& b) {
  if (a.weight != b.weight) return a.weight > b.weight;
  if (a.depth != b.depth) return a.depth < b.depth;
  return is_before(s.path[a.node], s.path[b.node]);
}

__device__ __forceinline__ Offer offer_of(const SharedMemory& s, int node, int k) {
  const int depth = s.depth[node] + 1, rank = s.next_rank[node];
  if (rank >= k) return {-INFINITY, depth, node};
  return {s.weight[node] + s.log_probs[(depth - 1) * k + rank], depth, node};
}

// The first rank at or after `rank` that can be a node: a log-probability of -inf or NaN cannot.
__device__ __forceinline__ int next_real_rank(const SharedMemory& s, int depth, int rank,
                                              int depths, int k) {
  if (depth > depths) return k;
  while (rank < k && !(s.log_probs[(depth - 1) * k + rank] > -INFINITY)) ++rank;
  return rank;
}

__device__ __forceinline__ Offer best_offer(const SharedMemory& s, int num_used, int k, int lane) {
  Offer best = offer_of(s, 0, k);
  for (int i = 0; i < kNodesPerLane; ++i) {
    const int node = lane + 32 * i;
    if (node >= num_used) break;
    const Offer offer = offer_of(s, node, k);
    if (is_better(s, offer, best)) best = offer;
  }
  for (int step = 16; step > 0; step /= 2) {
    const Offer other{__shfl_xor_sync(0xffffffffu, best.weight, step),
                      __shfl_xor_sync(0xffffffffu, best.depth, step),
                      __shfl_xor_sync(0xffffffffu, best.node, step)};
    if (is_better(s, other, best)) best = other;
  }
  return best;
}

__device__ __forceinline__ void add_node(SharedMemory& s, int node, const Offer& offer, int depths,
                                         int k) {
  const int parent = offer.node, rank = s.next_rank[parent];
  s.parent[node] = static_cast<int16_t>(parent);
  s.rank[node] = static_cast<int16_t>(rank);
  s.depth[node] = static_cast<int16_t>(offer.depth);
  s.weight[node] = offer.weight;
  s.path[node] = s.path[parent];
  const int at = offer.depth - 1;
  s.path[node].words[at / kRanksPerWord] |=
      uint64_t(rank) << (kRankBits * (kRanksPerWord - 1 - at % kRanksPerWord));
  s.next_rank[node] = static_cast<int16_t>(next_real_rank(s, offer.depth + 1, 0, depths, k));
  s.next_rank[parent] = static_cast<int16_t>(next_real_rank(s, offer.depth, rank + 1, depths, k));
}

__device__ __forceinline__ void add_root(SharedMemory& s, int depths, int k) {
  s.path[0] = {};
  s.weight[0] = 0.0f;
  s.parent[0] = -1;
  s.rank[0] = 0;
  s.depth[0] = 0;
  s.next_rank[0] = static_cast<int16_t>(next_real_rank(s, 1, 0, depths, k));
}

// Warp 0. Leaves the number of nodes in num_used.
__device__ __forceinline__ void grow(SharedMemory& s, const DdtreeBuildParams& params, int lane) {
  int num_used = 1;
  if (lane == 0) add_root(s, params.depths, params.k);
  __syncwarp();
  while (num_used < params.n) {
    const Offer best = best_offer(s, num_used, params.k, lane);
    if (best.weight == -INFINITY) break;
    __syncwarp();
    if (lane == 0) add_node(s, num_used, best, params.depths, params.k);
    __syncwarp();
    ++num_used;
  }
  if (lane == 0) s.num_used = num_used;
}

// Breadth-first: by depth, then by path. Siblings become neighbours, best first.
__device__ __forceinline__ int count_before(const SharedMemory& s, int node) {
  int before = 0;
  for (int other = 0; other < s.num_used; ++other) {
    const bool same_depth = s.depth[other] == s.depth[node];
    before += same_depth ? is_before(s.path[other], s.path[node]) : s.depth[other] < s.depth[node];
  }
  return before;
}

// What an unused node holds: the root's token, depth 0, no links, itself alone.
__device__ __forceinline__ void write_unused(const DdtreeBuildParams& params, int64_t row,
                                             int place, int64_t root_token) {
  params.tokens[row + place] = root_token;
  params.parents[row + place] = kUnusedParent;
  params.depth[row + place] = 0;
  params.first_child[row + place] = kNoNode;
  params.next_sibling[row + place] = kNoNode;
}

__device__ __forceinline__ void write_node(SharedMemory& s, const DdtreeBuildParams& params,
                                           int request, int node, int64_t root_token) {
  const int64_t row = int64_t{request} * params.n;
  const int place = s.place[node], depth = s.depth[node];
  const int64_t id = (int64_t{request} * params.depths + depth - 1) * params.k + s.rank[node];
  params.tokens[row + place] = node == 0 ? root_token : params.ids[id];
  params.depth[row + place] = depth;
  const int parent = node == 0 ? kRootParent : s.place[s.parent[node]];
  params.parents[row + place] = parent;
  s.up[place] = static_cast<int16_t>(parent);
}

// After every `up` is written: siblings are neighbours.
__device__ __forceinline__ void write_links(const SharedMemory& s, const DdtreeBuildParams& params,
                                            int64_t row, int place) {
  const int parent = s.up[place];
  const bool is_last = place + 1 >= s.num_used || s.up[place + 1] != parent;
  params.next_sibling[row + place] = is_last ? kNoNode : place + 1;
  if (place > 0 && s.up[place - 1] != parent) params.first_child[row + parent] = place;
}

__device__ __forceinline__ void mark_ancestors(SharedMemory& s, int place) {
  for (int word = 0; word < kMaskWords; ++word) s.seen[place][word] = 0;
  int at = place;
  while (at >= 0) {
    s.seen[place][at / 32] |= 1u << (at % 32);
    at = place < s.num_used ? s.up[at] : kNoNode;
  }
}

}  // namespace ddtree_build_op

__global__ void __launch_bounds__(ddtree_build_op::kThreads)
    ddtree_build_kernel(const DdtreeBuildParams params) {
  using namespace ddtree_build_op;
  __shared__ SharedMemory s;
  const int request = blockIdx.x, thread = threadIdx.x, n = params.n;
  const int64_t row = int64_t{request} * n;
  const int64_t root_token = params.root[request];

  const int num_scores = params.depths * params.k;
  for (int at = thread; at < num_scores; at += kThreads)
    s.log_probs[at] = params.log_probs[int64_t{request} * num_scores + at];
  __syncthreads();

  if (thread < 32) grow(s, params, thread);
  __syncthreads();

  if (thread < s.num_used) s.place[thread] = static_cast<int16_t>(count_before(s, thread));
  __syncthreads();

  if (thread < s.num_used)
    write_node(s, params, request, thread, root_token);
  else if (thread < n)
    write_unused(params, row, thread, root_token);
  if (thread < s.num_used) params.first_child[row + thread] = kNoNode;
  __syncthreads();

  if (thread < s.num_used) write_links(s, params, row, thread);
  if (thread < n) mark_ancestors(s, thread);
  if (thread == 0) params.used[request] = s.num_used;
  __syncthreads();

  for (int at = thread; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n;
    params.visible[row * n + at] = s.seen[i][j / 32] >> (j % 32) & 1;
  }
}

}  // namespace sgl_kernel_sm120
