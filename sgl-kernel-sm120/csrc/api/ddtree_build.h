// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "api/checks.h"
#include "kernels.h"

namespace sgl_kernel_sm120::api {

inline void ddtree_build(const Tensor& root, const Tensor& ids, const Tensor& log_probs,
                         const Tensor& tokens, const Tensor& parents, const Tensor& depth,
                         const Tensor& first_child, const Tensor& next_sibling,
                         const Tensor& visible, const Tensor& used, const Tensor& path_log_probs,
                         double min_log_prob) {
  constexpr const char* kOp = "ddtree_build";
  CHECK_ARCH(root);
  CHECK_NDIM(ids, 3, "[b, D, K]");
  CHECK_NDIM(tokens, 2, "[b, N]");
  CHECK_NDIM(path_log_probs, 2, "[b, M]");
  const int64_t b = ids.size(0), depths = ids.size(1), k = ids.size(2), n = tokens.size(1);
  const int64_t m = path_log_probs.size(1);
  CHECK_RANGE(b, 1, 256);
  CHECK_RANGE(depths, 0, 31);
  CHECK_RANGE(k, 1, 64);
  CHECK_RANGE(n, 1, 128);
  CHECK_RANGE(m, n, 128);
  const int32_t device = root.device();
  CHECK_DEVICE(ids, device);
  CHECK_DEVICE(log_probs, device);
  CHECK_DEVICE(tokens, device);
  CHECK_DEVICE(parents, device);
  CHECK_DEVICE(depth, device);
  CHECK_DEVICE(first_child, device);
  CHECK_DEVICE(next_sibling, device);
  CHECK_DEVICE(visible, device);
  CHECK_DEVICE(used, device);
  CHECK_DEVICE(path_log_probs, device);
  CHECK_DTYPE(root, i64());
  CHECK_DTYPE(ids, i64());
  CHECK_DTYPE(log_probs, fp32());
  CHECK_DTYPE(tokens, i64());
  CHECK_DTYPE(parents, i32());
  CHECK_DTYPE(depth, i32());
  CHECK_DTYPE(first_child, i32());
  CHECK_DTYPE(next_sibling, i32());
  CHECK_DTYPE(visible, boolean());
  CHECK_DTYPE(used, i32());
  CHECK_DTYPE(path_log_probs, fp32());
  CHECK_SHAPE(root, "[b]", b);
  CHECK_SHAPE(log_probs, "[b, D, K]", b, depths, k);
  CHECK_SHAPE(tokens, "[b, N]", b, n);
  CHECK_SHAPE(parents, "[b, N]", b, n);
  CHECK_SHAPE(depth, "[b, N]", b, n);
  CHECK_SHAPE(first_child, "[b, N]", b, n);
  CHECK_SHAPE(next_sibling, "[b, N]", b, n);
  CHECK_SHAPE(visible, "[b, N, N]", b, n, n);
  CHECK_SHAPE(used, "[b]", b);
  CHECK_SHAPE(path_log_probs, "[b, M]", b, m);
  CHECK_CONTIGUOUS(root);
  CHECK_CONTIGUOUS(ids);
  CHECK_CONTIGUOUS(log_probs);
  CHECK_CONTIGUOUS(tokens);
  CHECK_CONTIGUOUS(parents);
  CHECK_CONTIGUOUS(depth);
  CHECK_CONTIGUOUS(first_child);
  CHECK_CONTIGUOUS(next_sibling);
  CHECK_CONTIGUOUS(visible);
  CHECK_CONTIGUOUS(used);
  CHECK_CONTIGUOUS(path_log_probs);

  DdtreeBuildParams params{};
  params.root = pointer<const int64_t>(root);
  params.ids = pointer<const int64_t>(ids);
  params.log_probs = pointer<const float>(log_probs);
  params.tokens = pointer<int64_t>(tokens);
  params.parents = pointer<int32_t>(parents);
  params.depth = pointer<int32_t>(depth);
  params.first_child = pointer<int32_t>(first_child);
  params.next_sibling = pointer<int32_t>(next_sibling);
  params.visible = pointer<uint8_t>(visible);
  params.used = pointer<int32_t>(used);
  params.path_log_probs = pointer<float>(path_log_probs);
  params.min_log_prob = static_cast<float>(min_log_prob);
  params.b = static_cast<int32_t>(b);
  params.depths = static_cast<int32_t>(depths);
  params.k = static_cast<int32_t>(k);
  params.n = static_cast<int32_t>(n);
  params.m = static_cast<int32_t>(m);
  DeviceGuard guard(device);
  CHECK_LAUNCH(sgl_kernel_sm120::ddtree_build(params, current_stream(device)));
}

}  // namespace sgl_kernel_sm120::api
