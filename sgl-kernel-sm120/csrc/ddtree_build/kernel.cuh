// SPDX-License-Identifier: Apache-2.0
// The n - 1 most probable paths below the root, one block a request; and the weights of the m - 1
// most probable ones, m >= n, which tell what a larger tree would bring.
//
// The tree grows by one node at a time. Every node offers its best child that is not in the tree
// yet; the best of all offers is the next node. Offers are ordered by weight, then depth (the
// shorter path first), then rank path. That is the order of a heap of paths, and an offer is never
// better than the node that makes it, so parents come before children.
//
//   grow            warp 0: m - 1 rounds of an argmax over at most m offers, which stay in
//   registers number          thread i counts the nodes before node i in breadth-first order write
//   tokens, parents, depth, links; ancestors as bits, then as bytes
//
// A round is one dependent chain, so its length is the kernel's time: compare the lane's offers,
// redux, ballot, four shuffles, one shared-memory load for each of the two new offers.
#pragma once
#include "ddtree_build/config.h"
#include "params.h"

namespace sgl_kernel_sm120 {

namespace ddtree_build_op {

__device__ __forceinline__ bool is_before(const Path& a, const Path& b) {
  for (int word = 0; word < kPathWords; ++word)
    if (a.words[word] != b.words[word]) return a.words[word] < b.words[word];
  return false;
}

// Whether node `a` goes before node `b` when their offers weigh the same: the offer of less depth,
// then of the smaller path. Two offers of one depth come from different nodes of one depth, whose
// paths decide.
__device__ __forceinline__ bool is_preferred(const SharedMemory& s, int a, int b) {
  if (s.depth[a] != s.depth[b]) return s.depth[a] < s.depth[b];
  return is_before(s.path[a], s.path[b]);
}

// Orders as the floats do; weights are never NaN, and sums that start at +0 never -0. 0: nothing.
__device__ __forceinline__ uint32_t to_key(float weight) {
  const uint32_t bits = __float_as_uint(weight);
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return weight > -INFINITY ? key : 0;
}

// Node 32 * slot + lane belongs to this lane. What it offers, its best child that is not in the
// tree yet, is in these registers.
template <int kSlots>
struct Offers {
  float parent_weight[kSlots];  // of the node itself
  float weight[kSlots];         // of the child
  int rank[kSlots];             // of the child
  int depth[kSlots];            // of the child
  uint32_t key[kSlots];         // of the weight; 0: no child is left
};

// The first rank at or after `rank` that can be a node: a log-probability of -inf or NaN cannot.
__device__ __forceinline__ int next_real_rank(const SharedMemory& s, int depth, int rank,
                                              int depths, int k) {
  if (depth > depths) return k;
  while (rank < k && !(s.log_probs[(depth - 1) * k + rank] > -INFINITY)) ++rank;
  return rank;
}

// Slot `slot` now offers its best child of rank `rank` or more.
template <int kSlots>
__device__ __forceinline__ void offer(const SharedMemory& s, Offers<kSlots>& mine, int slot,
                                      float parent_weight, int depth, int rank, int depths, int k) {
  rank = next_real_rank(s, depth, rank, depths, k);
  const float weight = rank < k ? parent_weight + s.log_probs[(depth - 1) * k + rank] : -INFINITY;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (i != slot) continue;  // an index that is not constant would put the registers in memory
    mine.parent_weight[i] = parent_weight;
    mine.weight[i] = weight;
    mine.rank[i] = rank;
    mine.depth[i] = depth;
    mine.key[i] = to_key(weight);
  }
}

struct Choice {
  uint32_t key;
  int node;  // that makes the offer
};

template <int kSlots>
__device__ __forceinline__ Choice best_of_lane(const SharedMemory& s, const Offers<kSlots>& mine,
                                               int lane) {
  Choice best{mine.key[0], lane};
#pragma unroll
  for (int i = 1; i < kSlots; ++i) {
    const int node = lane + kLanes * i;
    const bool ties = mine.key[i] == best.key && best.key != 0;
    if (mine.key[i] > best.key || (ties && is_preferred(s, node, best.node)))
      best = {mine.key[i], node};
  }
  return best;
}

// The node with the best offer of all lanes, or -1.
__device__ __forceinline__ int best_of_warp(const SharedMemory& s, const Choice& mine) {
  constexpr unsigned kAll = 0xffffffffu;
  const uint32_t key = __reduce_max_sync(kAll, mine.key);
  if (key == 0) return kNoNode;
  unsigned tied = __ballot_sync(kAll, mine.key == key);
  int best = __shfl_sync(kAll, mine.node, __ffs(tied) - 1);
  for (tied &= tied - 1; tied; tied &= tied - 1) {
    const int other = __shfl_sync(kAll, mine.node, __ffs(tied) - 1);
    if (is_preferred(s, other, best)) best = other;
  }
  return best;
}

template <int kSlots>
__device__ __forceinline__ Offers<kSlots> of_slot(const Offers<kSlots>& mine, int slot) {
  Offers<kSlots> found = mine;  // entry 0 is what is asked for
#pragma unroll
  for (int i = 1; i < kSlots; ++i) {
    if (i != slot) continue;
    found.parent_weight[0] = mine.parent_weight[i];
    found.weight[0] = mine.weight[i];
    found.rank[0] = mine.rank[i];
    found.depth[0] = mine.depth[i];
  }
  return found;
}

// Warp 0. Leaves the number of nodes in num_used.
template <int kSlots>
__device__ __forceinline__ void grow(SharedMemory& s, const DdtreeBuildParams& params, int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  const int depths = params.depths, k = params.k;
  float* const path_log_probs = params.path_log_probs + int64_t{blockIdx.x} * params.m;
  Offers<kSlots> mine{};  // key 0: nothing
  if (lane < kPathWords) s.path[0].words[lane] = 0;
  if (lane == 0) {
    s.parent[0] = s.rank[0] = s.depth[0] = 0;
    path_log_probs[0] = 0.0f;
    offer(s, mine, 0, 0.0f, 1, 0, depths, k);
  }
  __syncwarp();

  int num_nodes = 1, num_used = 1;
  for (; num_nodes < params.m; ++num_nodes) {
    const int parent = best_of_warp(s, best_of_lane(s, mine, lane));
    if (parent < 0) break;
    // Tell every lane what was chosen.
    const int giver = parent % kLanes, owner = num_nodes % kLanes;
    const Offers<kSlots> found = of_slot(mine, parent / kLanes);
    const float weight = __shfl_sync(kAll, found.weight[0], giver);
    const int rank = __shfl_sync(kAll, found.rank[0], giver);
    const int depth = __shfl_sync(kAll, found.depth[0], giver);
    if (num_nodes < params.n && weight >= params.min_log_prob) num_used = num_nodes + 1;

    if (lane < kPathWords) {
      const int at = depth - 1;
      const uint64_t step = uint64_t(rank)
                            << (kRankBits * (kRanksPerWord - 1 - at % kRanksPerWord));
      s.path[num_nodes].words[lane] =
          s.path[parent].words[lane] | (lane == at / kRanksPerWord ? step : 0);
    }
    if (lane == owner) {
      s.parent[num_nodes] = static_cast<int16_t>(parent);
      s.rank[num_nodes] = static_cast<int16_t>(rank);
      s.depth[num_nodes] = static_cast<int16_t>(depth);
      path_log_probs[num_nodes] = weight;
      offer(s, mine, num_nodes / kLanes, weight, depth + 1, 0, depths, k);
    }
    if (lane == giver)
      offer(s, mine, parent / kLanes, found.parent_weight[0], depth, rank + 1, depths, k);
    __syncwarp();
  }
  for (int rest = num_nodes + lane; rest < params.m; rest += kLanes)
    path_log_probs[rest] = -INFINITY;
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

  if (thread < kLanes) {
    if (params.m <= kLanes)
      grow<1>(s, params, thread);
    else if (params.m <= 2 * kLanes)
      grow<2>(s, params, thread);
    else
      grow<kMaxNodes / kLanes>(s, params, thread);
  }
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
