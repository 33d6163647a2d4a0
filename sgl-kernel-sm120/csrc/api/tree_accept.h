// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "api/checks.h"
#include "kernels.h"

namespace sgl_kernel_sm120::api {

inline void tree_accept(const Tensor& tokens, const Tensor& parents, const Tensor& target_tokens,
                        const Tensor& path, const Tensor& accept_len, const Tensor& out_tokens,
                        const Tensor& bonus) {
  constexpr const char* kOp = "tree_accept";
  CHECK_ARCH(tokens);
  CHECK_NDIM(tokens, 2, "[b, N]");
  CHECK_NDIM(path, 2, "[b, max_len]");
  const int64_t b = tokens.size(0), n = tokens.size(1), max_len = path.size(1);
  CHECK_RANGE(n, 1, 128);
  CHECK_RANGE(max_len, 1, 128);
  const int32_t device = tokens.device();
  CHECK_DEVICE(parents, device);
  CHECK_DEVICE(target_tokens, device);
  CHECK_DEVICE(path, device);
  CHECK_DEVICE(accept_len, device);
  CHECK_DEVICE(out_tokens, device);
  CHECK_DEVICE(bonus, device);
  CHECK_DTYPE(tokens, i64());
  CHECK_DTYPE(parents, i32());
  CHECK_DTYPE(target_tokens, i64());
  CHECK_DTYPE(path, i64());
  CHECK_DTYPE(accept_len, i32());
  CHECK_DTYPE(out_tokens, i64());
  CHECK_DTYPE(bonus, i64());
  CHECK_SHAPE(parents, "[b, N]", b, n);
  CHECK_SHAPE(target_tokens, "[b, N]", b, n);
  CHECK_SHAPE(path, "[b, max_len]", b, max_len);
  CHECK_SHAPE(accept_len, "[b]", b);
  CHECK_SHAPE(out_tokens, "[b, max_len]", b, max_len);
  CHECK_SHAPE(bonus, "[b]", b);
  CHECK_CONTIGUOUS(tokens);
  CHECK_CONTIGUOUS(parents);
  CHECK_CONTIGUOUS(target_tokens);
  CHECK_CONTIGUOUS(path);
  CHECK_CONTIGUOUS(accept_len);
  CHECK_CONTIGUOUS(out_tokens);
  CHECK_CONTIGUOUS(bonus);
  if (b == 0) return;

  TreeAcceptParams params{};
  params.tokens = pointer<const int64_t>(tokens);
  params.parents = pointer<const int32_t>(parents);
  params.target_tokens = pointer<const int64_t>(target_tokens);
  params.path = pointer<int64_t>(path);
  params.accept_len = pointer<int32_t>(accept_len);
  params.out_tokens = pointer<int64_t>(out_tokens);
  params.bonus = pointer<int64_t>(bonus);
  params.b = static_cast<int32_t>(b);
  params.n = static_cast<int32_t>(n);
  params.max_len = static_cast<int32_t>(max_len);
  DeviceGuard guard(device);
  CHECK_LAUNCH(sgl_kernel_sm120::tree_accept(params, current_stream(device)));
}

}  // namespace sgl_kernel_sm120::api
