// SPDX-License-Identifier: Apache-2.0
// Walk from the root while the target's token after the current node is one of its children. One
// warp a request: its lanes look at all nodes for the child.
#pragma once
#include "params.h"
#include "tree_accept/config.h"

namespace sgl_kernel_sm120 {

namespace tree_accept_op {

// The first child of `at` that holds `token`, or -1.
__device__ __forceinline__ int find_child(const int64_t* gTokens, const int32_t* gParents, int n,
                                          int at, int64_t token, int lane) {
  for (int first = 0; first < n; first += 32) {
    const int node = first + lane;
    const bool match = node < n && gParents[node] == at && gTokens[node] == token;
    const unsigned matches = __ballot_sync(0xffffffffu, match);
    if (matches) return first + __ffs(matches) - 1;
  }
  return -1;
}

}  // namespace tree_accept_op

__global__ void __launch_bounds__(tree_accept_op::kThreads)
    tree_accept_kernel(const TreeAcceptParams params) {
  const int request = blockIdx.x, lane = threadIdx.x;
  const int64_t nodes = int64_t{request} * params.n, columns = int64_t{request} * params.max_len;
  int at = 0, column = 0;
  int64_t wanted = 0;
  while (true) {
    wanted = params.target_tokens[nodes + at];
    if (lane == 0) {
      params.path[columns + column] = at;
      params.out_tokens[columns + column] = wanted;
    }
    ++column;
    if (column == params.max_len) break;
    const int child = tree_accept_op::find_child(params.tokens + nodes, params.parents + nodes,
                                                 params.n, at, wanted, lane);
    if (child < 0) break;
    at = child;
  }
  if (lane == 0) {
    params.accept_len[request] = column;
    params.bonus[request] = wanted;
  }
  // Padding: a move along the path is a no-op there.
  for (int rest = column + lane; rest < params.max_len; rest += tree_accept_op::kThreads) {
    params.path[columns + rest] = rest;
    params.out_tokens[columns + rest] = 0;
  }
}

}  // namespace sgl_kernel_sm120
