// SPDX-License-Identifier: Apache-2.0
// What a verify step tells the host of a request: how far the walk came, how far a chain would have
// come on the same candidates, where it stopped, and what other widths promise.
#pragma once
#include "params.h"
#include "tree_count/config.h"

namespace sgl_kernel_sm120 {

namespace tree_count_op {

constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float sum_up_to_lane(float value, int lane) {
  for (int step = 1; step < kThreads; step *= 2) {
    const float below = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Place of `token` among the k candidates, or k.
__device__ __forceinline__ int rank_of(const int64_t* gIds, int k, int64_t token, int lane) {
  for (int first = 0; first < k; first += kThreads) {
    const int rank = first + lane;
    const unsigned matches = __ballot_sync(kAll, rank < k && gIds[rank] == token);
    if (matches) return first + __ffs(matches) - 1;
  }
  return k;
}

}  // namespace tree_count_op

__global__ void __launch_bounds__(tree_count_op::kThreads)
    tree_count_kernel(const TreeCountParams params) {
  using namespace tree_count_op;
  __shared__ float sChain[kThreads], sTree[kMaxPaths];
  const int request = blockIdx.x, lane = threadIdx.x, depths = params.depths, k = params.k;
  const int64_t candidates = int64_t{request} * depths * k;
  const int64_t* gIds = params.ids + candidates;
  const int64_t* gOut = params.out_tokens + int64_t{request} * params.max_len;
  const int length = params.accept_len[request];
  const int columns = min(depths, params.max_len);

  // Every committed token is one of the target's: a chain commits the leading ones that are best
  // candidates. No lane beyond the depths follows, so some lane always stops it.
  const bool follows = lane < min(columns, length) && gIds[lane * k] == gOut[lane];
  const int spine = __ffs(~__ballot_sync(kAll, follows)) - 1;
  const int last = max(min(length, columns) - 1, 0);
  const int rank = rank_of(gIds + last * k, k, gOut[last], lane);
  int32_t* gCounts = params.counts + int64_t{request} * (kCounts + params.num_options);
  if (lane == 0) {
    gCounts[0] = params.used[request];
    gCounts[1] = params.num_nodes;
    gCounts[2] = length;
    gCounts[3] = spine + 1;
    gCounts[4] = spine == length && spine < depths;
    gCounts[5] = length - 1 < depths ? rank : -1;
  }
  if (params.num_options == 0) return;

  // Sums of path probabilities: along the chain, and over the best paths without the root.
  float weight = lane < depths ? params.log_probs[candidates + lane * k] : 0.0f;
  weight = sum_up_to_lane(weight, lane);
  sChain[lane] = sum_up_to_lane(lane < depths ? expf(weight) : 0.0f, lane);
  const float* gPaths = params.path_log_probs + int64_t{request} * params.m;
  float before = 0.0f;
  for (int first = 0; first < params.m; first += kThreads) {
    const int path = first + lane;
    const bool counts = path > 0 && path < params.m;
    const float sum = before + sum_up_to_lane(counts ? expf(gPaths[path]) : 0.0f, lane);
    if (path < params.m) sTree[path] = sum;
    before = __shfl_sync(kAll, sum, kThreads - 1);
  }
  __syncwarp();
  for (int option = lane; option < params.num_options; option += kThreads) {
    const int width = params.options[option];
    const int drafts = width < 0 ? min(-width - 1, depths) : min(width, params.m) - 1;
    const float promised = drafts <= 0 ? 0.0f : width < 0 ? sChain[drafts - 1] : sTree[drafts];
    gCounts[kCounts + option] = __float_as_int(promised);
  }
}

}  // namespace sgl_kernel_sm120
