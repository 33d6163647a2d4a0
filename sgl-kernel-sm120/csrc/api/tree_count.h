// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "api/checks.h"
#include "kernels.h"

namespace sgl_kernel_sm120::api {

inline void tree_count(const Tensor& ids, const Tensor& log_probs, const Tensor& path_log_probs,
                       const Tensor& used, const Tensor& accept_len, const Tensor& out_tokens,
                       const Tensor& options, const Tensor& counts, int64_t num_nodes) {
  constexpr const char* kOp = "tree_count";
  CHECK_ARCH(ids);
  CHECK_NDIM(ids, 3, "[b, D, K]");
  CHECK_NDIM(path_log_probs, 2, "[b, M]");
  CHECK_NDIM(out_tokens, 2, "[b, max_len]");
  CHECK_NDIM(options, 1, "[O]");
  const int64_t b = ids.size(0), depths = ids.size(1), k = ids.size(2);
  const int64_t m = path_log_probs.size(1), max_len = out_tokens.size(1);
  const int64_t num_options = options.size(0);
  CHECK_RANGE(depths, 1, 31);
  CHECK_RANGE(k, 1, 64);
  CHECK_RANGE(m, 1, 128);
  CHECK_RANGE(max_len, 1, 128);
  CHECK_RANGE(num_nodes, 1, 128);
  const int32_t device = ids.device();
  CHECK_DEVICE(log_probs, device);
  CHECK_DEVICE(path_log_probs, device);
  CHECK_DEVICE(used, device);
  CHECK_DEVICE(accept_len, device);
  CHECK_DEVICE(out_tokens, device);
  CHECK_DEVICE(options, device);
  CHECK_DEVICE(counts, device);
  CHECK_DTYPE(ids, i64());
  CHECK_DTYPE(log_probs, fp32());
  CHECK_DTYPE(path_log_probs, fp32());
  CHECK_DTYPE(used, i32());
  CHECK_DTYPE(accept_len, i32());
  CHECK_DTYPE(out_tokens, i64());
  CHECK_DTYPE(options, i32());
  CHECK_DTYPE(counts, i32());
  CHECK_SHAPE(log_probs, "[b, D, K]", b, depths, k);
  CHECK_SHAPE(path_log_probs, "[b, M]", b, m);
  CHECK_SHAPE(used, "[b]", b);
  CHECK_SHAPE(accept_len, "[b]", b);
  CHECK_SHAPE(out_tokens, "[b, max_len]", b, max_len);
  CHECK_SHAPE(counts, "[b, 6 + O]", b, 6 + num_options);
  CHECK_CONTIGUOUS(ids);
  CHECK_CONTIGUOUS(log_probs);
  CHECK_CONTIGUOUS(path_log_probs);
  CHECK_CONTIGUOUS(used);
  CHECK_CONTIGUOUS(accept_len);
  CHECK_CONTIGUOUS(out_tokens);
  CHECK_CONTIGUOUS(options);
  CHECK_CONTIGUOUS(counts);
  if (b == 0) return;

  TreeCountParams params{};
  params.ids = pointer<const int64_t>(ids);
  params.log_probs = pointer<const float>(log_probs);
  params.path_log_probs = pointer<const float>(path_log_probs);
  params.used = pointer<const int32_t>(used);
  params.accept_len = pointer<const int32_t>(accept_len);
  params.out_tokens = pointer<const int64_t>(out_tokens);
  params.options = pointer<const int32_t>(options);
  params.counts = pointer<int32_t>(counts);
  params.b = static_cast<int32_t>(b);
  params.depths = static_cast<int32_t>(depths);
  params.k = static_cast<int32_t>(k);
  params.m = static_cast<int32_t>(m);
  params.max_len = static_cast<int32_t>(max_len);
  params.num_options = static_cast<int32_t>(num_options);
  params.num_nodes = static_cast<int32_t>(num_nodes);
  DeviceGuard guard(device);
  CHECK_LAUNCH(sgl_kernel_sm120::tree_count(params, current_stream(device)));
}

}  // namespace sgl_kernel_sm120::api
