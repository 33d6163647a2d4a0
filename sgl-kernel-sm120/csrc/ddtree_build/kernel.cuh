// SPDX-License-Identifier: Apache-2.0
// The n - 1 most probable paths below the root, one block a request; and the weights of the m - 1
// most probable ones, m >= n, which tell what a larger tree would bring.
//
// Paths are ordered by weight, then depth (the shorter first), then rank path: the order of a heap
// of paths. A path is never better than its parent. So the m - 1 best paths of depth d or less are
// among those of depth d - 1 or less and the children of their last depth, and of these children
// only few can be (Pair in config.h). The time goes with the depth, not with the nodes.
//
//   load            a row of log-probabilities a warp; ranks of -inf and NaN are left out
//   a round a depth offer: pairs better than the worst of the best paths so far are listed
//                   merge: each path counts the listed ones before it, which is its place
//   number          each node counts the nodes before it in breadth-first order
//   write           links and ancestors, then all outputs, coalesced
//
// Rounding can make sums equal whose parents differ, and then a pair outside of config.h's bound
// may belong to the best: of two equal weights the path decides, and the bound knows weights only.
// It never weighs more than the worst of the best, so this shows as a tie, and settle_ties lists
// that depth again, without a bound.
//
// All of this needs rows that are best first and not above 0; load makes others so.
//
// Barriers: two a round, one more where a pair outside of the bound beats the worst path of the
// round before.
#pragma once
#include "ddtree_build/config.h"
#include "params.h"

namespace sgl_kernel_sm120 {

namespace ddtree_build_op {

// extern: the compiler names what is internal to a unit after the folder that it is compiled in.
extern __device__ constexpr PairTable kPairTable = list_pairs();

constexpr unsigned kAll = 0xffffffffu;

// Orders as the floats do; weights are never NaN, and sums that start at +0 never -0. 0: nothing.
__device__ __forceinline__ uint32_t to_key(float weight) {
  const uint32_t bits = __float_as_uint(weight);
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return weight > -INFINITY ? key : 0;
}

__device__ __forceinline__ float to_weight(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ __forceinline__ uint32_t weight_key(Item item) {
  return static_cast<uint32_t>(item >> 32);
}

__device__ __forceinline__ Item make_item(uint32_t weight, int depth, int parent, int rank) {
  const uint32_t place = (depth << (kNumberBits + kRankBits)) | (parent << kRankBits) | rank;
  return Item{weight} << 32 | ~place;
}

struct Place {
  int depth, parent, rank;
};

__device__ __forceinline__ Place place_of(Item item) {
  const uint32_t place = ~static_cast<uint32_t>(item);
  return {static_cast<int>(place >> (kNumberBits + kRankBits)),
          static_cast<int>(place >> kRankBits & ((1 << kNumberBits) - 1)),
          static_cast<int>(place & ((1 << kRankBits) - 1))};
}

__device__ __forceinline__ int32_t order_key(int depth, int number) {
  return depth << kNumberBits | number;
}

// Of one warp. No log-probability is above 0 or above that of a better rank afterwards.
__device__ __forceinline__ void put_in_order(float* row, int num_real, int lane) {
  __syncwarp();
  bool is_in_order = true;
  for (int rank = lane; rank < num_real; rank += kLanes)
    is_in_order = is_in_order && row[rank] <= (rank > 0 ? row[rank - 1] : 0.0f);
  if (__ballot_sync(kAll, !is_in_order) == 0 || lane > 0) return;
  float least = 0.0f;
#pragma unroll 1
  for (int rank = 0; rank < num_real; ++rank) row[rank] = least = fminf(least, row[rank]);
}

// Afterwards a row has its real ranks in front: a log-probability of -inf or NaN makes no node.
__device__ __forceinline__ void load(SharedMemory& s, const DdtreeBuildParams& params) {
  constexpr int kIdsPerThread = (kMaxDepth * kMaxTopk + kThreads - 1) / kThreads;
  const int thread = threadIdx.x, lane = thread % kLanes, k = params.k;
  const int num_scores = params.depths * k;
  const int64_t* const ids = params.ids + int64_t{blockIdx.x} * num_scores;
  const float* const log_probs = params.log_probs + int64_t{blockIdx.x} * num_scores;

  int64_t mine[kIdsPerThread];  // in flight while the rows are loaded
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i)
    mine[i] = thread + i * kThreads < num_scores ? ids[thread + i * kThreads] : 0;
  for (int row = thread / kLanes; row < params.depths; row += kThreads / kLanes) {
    int num_real = 0;
#pragma unroll
    for (int first = 0; first < kMaxTopk; first += kLanes) {
      const int rank = first + lane;
      const float log_prob = rank < k ? log_probs[row * k + rank] : -INFINITY;
      const bool is_real = log_prob > -INFINITY;
      const unsigned real = __ballot_sync(kAll, is_real);
      const int at = row * kMaxTopk + num_real + __popc(real & ((1u << lane) - 1));
      if (is_real) {
        s.log_probs[at] = log_prob;
        s.rank_of[at] = static_cast<uint8_t>(rank);
      }
      num_real += __popc(real);
    }
    if (lane == 0) s.num_real[row] = num_real;
    put_in_order(s.log_probs + row * kMaxTopk, num_real, lane);
  }
#pragma unroll
  for (int i = 0; i < kIdsPerThread; ++i)
    if (thread + i * kThreads < num_scores) s.ids[thread + i * kThreads] = mine[i];
}

// The paths of depth 1 are there as they are sorted. Returns how many of them are best.
__device__ __forceinline__ int start(SharedMemory& s, int depths, int limit) {
  const int thread = threadIdx.x, to = 0;
  const int num_best = depths == 0 ? 0 : min(limit, s.num_real[0]);
  if (thread < 2) s.num_fresh[thread] = 0;
  if (thread < kMaxNodes) {
    s.parents[to][thread] = {-INFINITY, 0};
    if (thread < num_best) {
      const float weight = 0.0f + s.log_probs[thread];
      s.best[to][thread] = make_item(to_key(weight), 1, 0, thread);
      s.key[to][thread] = order_key(1, thread);
      s.parents[to][thread] = {weight, thread};
    }
  }
  return num_best;
}

// Lists the pairs that are better than the worst of the best paths.
__device__ __forceinline__ void offer(SharedMemory& s, const Pair (&pairs)[kPairsPerThread],
                                      int depth, int limit, uint32_t worst) {
  const int from = depth % 2, row = (depth - 1) * kMaxTopk, num_real = s.num_real[depth - 1];
  const unsigned lane = threadIdx.x % kLanes;
  Item* const fresh = &s.fresh[0].first;
#pragma unroll
  for (int i = 0; i < kPairsPerThread; ++i) {
    if (i > 0 && limit <= kOnePairLimit) break;
    const Pair pair = pairs[i];
    uint32_t weight = 0;
    int number = 0;
    if ((pair.beam + 1) * (pair.rank + 2) <= limit && pair.rank < num_real) {
      const Parent parent = s.parents[from][pair.beam];
      weight = to_key(parent.weight + s.log_probs[row + pair.rank]);
      number = parent.number;
    }
    const unsigned live = __ballot_sync(kAll, weight > worst);
    if (live == 0) continue;
    int at = lane == 0 ? atomicAdd(&s.num_fresh[from], __popc(live)) : 0;
    at = __shfl_sync(kAll, at, 0) + __popc(live & ((1u << lane) - 1));
    if (weight > worst) fresh[at] = make_item(weight, depth, number, pair.rank);
  }
}

// The best `limit` of what is best and what is fresh, in order. A path's place is the number of
// paths before it; up to kMaxSplit lanes count for one path.
__device__ __forceinline__ void merge(SharedMemory& s, int depth, int limit, int num_best,
                                      int num_fresh) {
  const int from = depth % 2, to = 1 - from, num_paths = num_best + num_fresh;
  const Item* const fresh = &s.fresh[0].first;
  const int log2_split = (2 * num_paths <= kThreads) + (4 * num_paths <= kThreads) +
                         (kMaxSplit * num_paths <= kThreads);
  const int split = 1 << log2_split;
  for (int first = 0; first < num_paths << log2_split; first += kThreads) {
    const int path = (first + static_cast<int>(threadIdx.x)) >> log2_split;
    const int part = threadIdx.x & (split - 1);
    const bool is_fresh = path >= num_best;
    // Of fresh paths: better ones, and those of a smaller path. Of the others: better ones.
    int better = 0, smaller = 0, better_old = 0;
    Item mine = 0;
    if (path < num_paths) {
      mine = is_fresh ? fresh[path - num_best] : s.best[from][path];
      for (int first_pair = part; 2 * first_pair < num_fresh; first_pair += kBatch * split) {
        ItemPair pairs[kBatch];  // loaded together, so that they wait for shared memory once
#pragma unroll
        for (int i = 0; i < kBatch; ++i) pairs[i] = s.fresh[first_pair + i * split];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int at = 2 * (first_pair + i * split);
          better += (at < num_fresh && pairs[i].first > mine) +
                    (at + 1 < num_fresh && pairs[i].second > mine);
          smaller +=
              (at<num_fresh&& static_cast<uint32_t>(pairs[i].first)> static_cast<uint32_t>(mine)) +
              (at + 1 < num_fresh &&
               static_cast<uint32_t>(pairs[i].second) > static_cast<uint32_t>(mine));
        }
      }
      if (is_fresh)
#pragma unroll 4
        for (int at = part; at < num_best; at += split) better_old += s.best[from][at] > mine;
    }
    int counts = better << 20 | smaller << 10 | better_old;
    for (int lanes = 1; lanes < split; lanes *= 2) counts += __shfl_xor_sync(kAll, counts, lanes);
    if (path >= num_paths || part > 0) continue;
    better = counts >> 20;
    const int number = counts >> 10 & 1023;
    const int place = better + (is_fresh ? counts & 1023 : path);
    if (place >= limit) continue;
    s.best[to][place] = mine;
    if (is_fresh) {
      s.key[to][place] = order_key(depth, number);
      s.parents[to][better] = {to_weight(weight_key(mine)), number};
    } else {
      s.key[to][place] = s.key[from][path];
    }
  }
}

// Lists what is fresh again: all children above `worst`, and of those that equal it the first that
// there is room for. `worst` is the weight of the last of the best paths.
__device__ __forceinline__ int settle_ties(SharedMemory& s, int depth, int limit, int num_best,
                                           uint32_t worst) {
  const int from = depth % 2, thread = threadIdx.x;
  const int num_real = s.num_real[depth - 1];
  const float* const log_probs = s.log_probs + (depth - 1) * kMaxTopk;
  Parent parent{-INFINITY, 0};
  int above = 0, tied = 0;
  if (thread < kMaxNodes) {
    parent = s.parents[from][thread];
    while (above < num_real && to_key(parent.weight + log_probs[above]) > worst) ++above;
    while (above + tied < num_real && to_key(parent.weight + log_probs[above + tied]) == worst)
      ++tied;
    s.ties[thread] = {parent.number, static_cast<int16_t>(above), static_cast<int16_t>(tied)};
  }
  if (thread == 0) s.num_fresh[from] = 0;
  int room =
      limit - __syncthreads_count(thread < num_best && weight_key(s.best[from][thread]) >= worst);
  if (thread < kMaxNodes) {
    for (int other = 0; other < kMaxNodes; ++other) {
      const Ties ties = s.ties[other];
      room -= ties.above + (ties.number < parent.number ? ties.tied : 0);
    }
    const int num_listed = above + min(max(room, 0), tied);
    const int first = num_listed ? atomicAdd(&s.num_fresh[from], num_listed) : 0;
    Item* const fresh = &s.fresh[0].first;
    for (int rank = 0; rank < num_listed && first + rank < kMaxPairs; ++rank) {
      const uint32_t weight = to_key(parent.weight + log_probs[rank]);
      fresh[first + rank] = make_item(weight, depth, parent.number, rank);
    }
  }
  __syncthreads();
  return min(s.num_fresh[from], kMaxPairs);
}

struct Best {
  int buffer, num_paths;
};

// All rounds. Ends with a barrier.
__device__ __forceinline__ Best search(SharedMemory& s, const DdtreeBuildParams& params,
                                       const Pair (&pairs)[kPairsPerThread]) {
  const int thread = threadIdx.x, limit = params.m - 1;
  int num_best = start(s, params.depths, limit);
  __syncthreads();
  // The first rank of this thread's parent that is not among the pairs.
  const int outside = max(limit / (thread + 1) - 1, 0);
  uint32_t worst = 0 < limit && num_best == limit ? weight_key(s.best[0][limit - 1]) : 0;
  int depth = 2;
  for (; depth <= params.depths; ++depth) {
    const int from = depth % 2, to = 1 - from;
    uint32_t best_outside = 0;
    if (thread < kMaxNodes) {
      if (outside < s.num_real[depth - 1])
        best_outside =
            to_key(s.parents[from][thread].weight + s.log_probs[(depth - 1) * kMaxTopk + outside]);
      s.parents[to][thread] = {-INFINITY, 0};
    }
    offer(s, pairs, depth, limit, worst);
    const bool may_tie = __syncthreads_or(best_outside > worst);
    int num_fresh = s.num_fresh[from];
    if (num_fresh == 0) break;  // deeper paths are no better
    if (thread == 0) s.num_fresh[to] = 0;
    const int num_paths = min(limit, num_best + num_fresh);
    for (bool is_settled = false;; is_settled = true) {
      merge(s, depth, limit, num_best, num_fresh);
      __syncthreads();
      worst = num_paths == limit ? weight_key(s.best[to][limit - 1]) : 0;
      if (is_settled || !may_tie || worst == 0 || !__syncthreads_or(best_outside == worst)) break;
      num_fresh = settle_ties(s, depth, limit, num_best, worst);
    }
    num_best = num_paths;
  }
  return {depth % 2, num_best};
}

// What every node is, by breadth-first number. Returns the number of nodes. No barrier at its end.
__device__ __forceinline__ int number(SharedMemory& s, const DdtreeBuildParams& params,
                                      const Best& best) {
  const int thread = threadIdx.x;
  const int32_t* const keys = s.key[best.buffer];
  float* const path_log_probs = params.path_log_probs + int64_t{blockIdx.x} * params.m;
  bool is_node = false;
  if (thread < params.m - 1) {
    float weight = -INFINITY;
    if (thread < best.num_paths) {
      weight = to_weight(weight_key(s.best[best.buffer][thread]));
      is_node = thread < params.n - 1 && weight >= params.min_log_prob;
    }
    path_log_probs[1 + thread] = weight;
  }
  if (thread == 0) {
    path_log_probs[0] = 0.0f;
    s.up[0] = kRootParent;
    s.depth[0] = s.source[0] = 0;
  }
  if (thread < kMaxNodes) s.first[thread] = kNoNode;
  const int num_paths = __syncthreads_count(is_node);  // the best ones

  const int path = thread / kNodeSplit;
  Place mine{};
  int before = 0, before_parent = 0;
  if (path < num_paths) {
    mine = place_of(s.best[best.buffer][path]);
    const int key = keys[path], parent_key = order_key(mine.depth - 1, mine.parent);
#pragma unroll 4
    for (int other = thread % kNodeSplit; other < num_paths; other += kNodeSplit) {
      before += keys[other] < key;
      before_parent += keys[other] < parent_key;
    }
  }
  for (int lanes = 1; lanes < kNodeSplit; lanes *= 2) {
    before += __shfl_xor_sync(kAll, before, lanes);
    before_parent += __shfl_xor_sync(kAll, before_parent, lanes);
  }
  if (path < num_paths && thread % kNodeSplit == 0) {
    const int node = before + 1, row = mine.depth - 1;
    const int rank = s.rank_of[row * kMaxTopk + mine.rank];
    s.up[node] = static_cast<int16_t>(mine.depth == 1 ? 0 : before_parent + 1);
    s.depth[node] = static_cast<int16_t>(mine.depth);
    s.source[node] = static_cast<int16_t>(row * params.k + rank);
  }
  return num_paths + 1;
}

// Thread i has node i. An unused one holds the root's token, depth 0, no links, and sees itself
// alone. Siblings are neighbours, best first.
__device__ __forceinline__ void write_nodes(SharedMemory& s, const DdtreeBuildParams& params,
                                            int num_used, int64_t root_token) {
  const int node = threadIdx.x;
  if (node >= params.n) return;
  const int64_t at = int64_t{blockIdx.x} * params.n + node;
  const bool is_used = node < num_used;
  const int parent = is_used ? s.up[node] : kUnusedParent;
  const bool is_below = is_used && node > 0;
  params.tokens[at] = is_below ? s.ids[s.source[node]] : root_token;
  params.parents[at] = parent;
  params.depth[at] = is_used ? s.depth[node] : 0;
  params.next_sibling[at] =
      is_below && node + 1 < num_used && s.up[node + 1] == parent ? node + 1 : kNoNode;
  if (is_below && s.up[node - 1] != parent) s.first[parent] = static_cast<int16_t>(node);

  uint32_t seen[kMaskWords] = {};
  for (int ancestor = node; ancestor >= 0; ancestor = is_used ? s.up[ancestor] : kNoNode) {
#pragma unroll
    for (int word = 0; word < kMaskWords; ++word)
      seen[word] |= ancestor / 32 == word ? 1u << (ancestor % 32) : 0;
  }
#pragma unroll
  for (int word = 0; word < kMaskWords; ++word) s.seen[node][word] = seen[word];
}

// Four bits to the lowest bits of four bytes.
__device__ __forceinline__ uint32_t to_bytes(uint32_t bits) {
  return (bits & 15) * 0x00204081u & 0x01010101u;
}

__device__ __forceinline__ void write_visible(const SharedMemory& s,
                                              const DdtreeBuildParams& params) {
  const int n = params.n, thread = threadIdx.x;
  uint8_t* const visible = params.visible + int64_t{blockIdx.x} * n * n;
  if (n % 16 == 0 && reinterpret_cast<uintptr_t>(visible) % sizeof(uint4) == 0) {
    const int chunks = n / 16;  // of a row
    for (int at = thread; at < n * chunks; at += kThreads) {
      const int i = at / chunks, j = at % chunks * 16;
      const uint32_t bits = s.seen[i][j / 32] >> (j % 32);
      reinterpret_cast<uint4*>(visible)[at] = {to_bytes(bits), to_bytes(bits >> 4),
                                               to_bytes(bits >> 8), to_bytes(bits >> 12)};
    }
    return;
  }
  for (int i = thread / kLanes; i < n; i += kThreads / kLanes)
    for (int j = thread % kLanes; j < n; j += kLanes)
      visible[i * n + j] = s.seen[i][j / 32] >> (j % 32) & 1;
}

}  // namespace ddtree_build_op

// The 1 allows ptxas more registers: without it, merge waits for each of its loads.
__global__ void __launch_bounds__(ddtree_build_op::kThreads, 1)
    ddtree_build_kernel(const DdtreeBuildParams params) {
  using namespace ddtree_build_op;
  __shared__ SharedMemory s;
  const int thread = threadIdx.x;
  const int64_t root_token = params.root[blockIdx.x];
  Pair pairs[kPairsPerThread];
#pragma unroll
  for (int i = 0; i < kPairsPerThread; ++i) pairs[i] = kPairTable.pairs[i * kThreads + thread];

  load(s, params);
  __syncthreads();
  const Best best = search(s, params, pairs);
  const int num_used = number(s, params, best);
  __syncthreads();
  write_nodes(s, params, num_used, root_token);
  if (thread == 0) params.used[blockIdx.x] = num_used;
  __syncthreads();
  if (thread < params.n)
    params.first_child[int64_t{blockIdx.x} * params.n + thread] = s.first[thread];
  write_visible(s, params);
}

}  // namespace sgl_kernel_sm120
