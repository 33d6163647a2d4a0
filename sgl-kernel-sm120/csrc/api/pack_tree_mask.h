// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "api/checks.h"
#include "kernels.h"

namespace sgl_kernel_sm120::api {

inline void pack_tree_mask(const Tensor& visible, const Tensor& words) {
  constexpr const char* kOp = "pack_tree_mask";
  CHECK_ARCH(visible);
  CHECK_NDIM(visible, 3, "[b, N, N]");
  const int64_t b = visible.size(0), n = visible.size(1);
  CHECK_RANGE(n, 1, 128);
  CHECK_DEVICE(words, visible.device());
  CHECK_DTYPE(visible, boolean(), u8());
  CHECK_DTYPE(words, i64());
  CHECK_SHAPE(visible, "[b, N, N]", b, n, n);
  CHECK_SHAPE(words, "[b, N, ceil(N / 64)]", b, n, (n + 63) / 64);
  CHECK_CONTIGUOUS(visible);
  CHECK_CONTIGUOUS(words);
  if (b == 0) return;

  PackTreeMaskParams params{};
  params.visible = pointer<const uint8_t>(visible);
  params.words = pointer<uint64_t>(words);
  params.rows = b * n;
  params.n = static_cast<int32_t>(n);
  DeviceGuard guard(visible.device());
  CHECK_LAUNCH(sgl_kernel_sm120::pack_tree_mask(params, current_stream(visible.device())));
}

}  // namespace sgl_kernel_sm120::api
