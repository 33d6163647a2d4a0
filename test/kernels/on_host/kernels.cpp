// SPDX-License-Identifier: Apache-2.0
// The helper kernels, compiled for the CPU, with the grids of their launch.cuh.
#include "cuda_on_host.h"
//
#include "ddtree_build/kernel.cuh"
#include "kv_move_all_layers/kernel.cuh"
#include "pack_tree_mask/kernel.cuh"
#include "tree_accept/kernel.cuh"
#include "tree_count/kernel.cuh"

using namespace sgl_kernel_sm120;

extern "C" void host_ddtree_build(const int64_t* root, const int64_t* ids, const float* log_probs,
                                  int64_t* tokens, int32_t* parents, int32_t* depth,
                                  int32_t* first_child, int32_t* next_sibling, uint8_t* visible,
                                  int32_t* used, float* path_log_probs, float min_log_prob, int b,
                                  int depths, int k, int n, int m) {
  const DdtreeBuildParams params{
      root,    ids,  log_probs,      tokens,       parents, depth,  first_child, next_sibling,
      visible, used, path_log_probs, min_log_prob, b,       depths, k,           n,
      m};
  on_host::launch({unsigned(b)}, ddtree_build_op::kThreads, [&] { ddtree_build_kernel(params); });
}

extern "C" void host_tree_accept(const int64_t* tokens, const int32_t* parents,
                                 const int64_t* targets, int64_t* path, int32_t* accept_len,
                                 int64_t* out_tokens, int64_t* bonus, int b, int n, int max_len) {
  const TreeAcceptParams params{tokens,     parents, targets, path, accept_len,
                                out_tokens, bonus,   b,       n,    max_len};
  on_host::launch({unsigned(b)}, tree_accept_op::kThreads, [&] { tree_accept_kernel(params); });
}

extern "C" void host_tree_count(const int64_t* ids, const float* log_probs,
                                const float* path_log_probs, const int32_t* used,
                                const int32_t* accept_len, const int64_t* out_tokens,
                                const int32_t* options, int32_t* counts, int num_nodes, int b,
                                int depths, int k, int m, int max_len, int num_options) {
  const TreeCountParams params{ids,        log_probs, path_log_probs, used,        accept_len,
                               out_tokens, options,   counts,         b,           depths,
                               k,          m,         max_len,        num_options, num_nodes};
  on_host::launch({unsigned(b)}, tree_count_op::kThreads, [&] { tree_count_kernel(params); });
}

extern "C" void host_pack_tree_mask(const uint8_t* visible, uint64_t* words, int64_t rows, int n) {
  using namespace pack_tree_mask_config;
  const PackTreeMaskParams params{visible, words, rows, n};
  const auto blocks = unsigned((rows + kRowsPerBlock - 1) / kRowsPerBlock);
  on_host::launch({blocks}, kThreads, [&] { pack_tree_mask_kernel(params); });
}

// Five blocks, so that each has several pieces: any number is right.
template <int Granule>
void move(const KvMoveParams& params, int longest_row) {
  using namespace kv_move_config;
  on_host::launch({5}, is_small(params.n) ? kFewThreads : kMaxThreads,
                  [&] { kv_move_kernel<Granule>(params, longest_row); });
}

// bases, strides, rows, slots: one entry a buffer.
extern "C" void host_kv_move(int granule, int num_buffers, char* const* bases,
                             const int64_t* strides, const int32_t* row_bytes, const int32_t* slots,
                             const int64_t* tgt, const int64_t* src, int n) {
  KvMoveParams params{};
  int longest = 0;
  for (int i = 0; i < num_buffers; ++i) {
    params.buffers[i] = {bases[i], strides[i], row_bytes[i], slots[i]};
    longest = max(longest, row_bytes[i]);
  }
  params.tgt = tgt;
  params.src = src;
  params.n = n;
  params.num_buffers = num_buffers;
  if (granule == 16)
    move<16>(params, longest);
  else if (granule == 4)
    move<4>(params, longest);
  else
    move<1>(params, longest);
}
