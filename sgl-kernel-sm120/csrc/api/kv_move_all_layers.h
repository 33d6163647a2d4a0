// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>
#include <climits>

#include "api/checks.h"
#include "kernels.h"

namespace sgl_kernel_sm120::api {

// The row geometry of one [slots, ...] buffer whose rows are contiguous inside.
inline KvMoveParams::Buffer describe_rows(const char* op, const std::string& name,
                                          const Tensor& buffer) {
  if (buffer.dim() < 2) reject(op, name, "at least 2 dimensions [slots, ...]", describe(buffer));
  int64_t columns = 1;
  for (int64_t d = buffer.dim() - 1; d > 0; --d) {
    if (buffer.size(d) > 1 && buffer.stride(d) != columns)
      reject(op, name, "rows that are contiguous inside", "strides " + strides(buffer));
    columns *= buffer.size(d);
  }
  const int64_t size = buffer.element_size(), slots = buffer.size(0);
  if (columns * size > INT_MAX || slots > INT_MAX)
    reject(op, name, "rows and slots below 2^31", describe(buffer));
  return {pointer<char>(buffer), buffer.stride(0) * size, static_cast<int32_t>(columns * size),
          static_cast<int32_t>(slots)};
}

inline void kv_move_all_layers(const TensorList& kv_buffers, const Tensor& tgt, const Tensor& src) {
  constexpr const char* kOp = "kv_move_all_layers";
  CHECK_ARCH(tgt);
  CHECK_NDIM(tgt, 1, "[n]");
  const int64_t n = tgt.size(0);
  CHECK_RANGE(n, 0, kv_move_max_rows(1));
  CHECK_DEVICE(src, tgt.device());
  for (size_t i = 0; i < kv_buffers.size(); ++i)
    check_device(kOp, ("kv_buffers[" + std::to_string(i) + "]").c_str(), kv_buffers[i],
                 tgt.device());
  CHECK_DTYPE(tgt, i64());
  CHECK_DTYPE(src, i64());
  CHECK_SHAPE(src, "[n]", n);
  CHECK_CONTIGUOUS(tgt);
  CHECK_CONTIGUOUS(src);
  if (n == 0) return;

  KvMoveParams params{};
  params.tgt = pointer<const int64_t>(tgt);
  params.src = pointer<const int64_t>(src);
  params.n = static_cast<int32_t>(n);
  DeviceGuard guard(tgt.device());
  const cudaStream_t stream = current_stream(tgt.device());
  // One launch moves kMaxBuffers buffers; a model has fewer. Buffers do not depend on each other.
  for (size_t first = 0; first < kv_buffers.size(); first += KvMoveParams::kMaxBuffers) {
    params.num_buffers = static_cast<int32_t>(
        std::min<size_t>(kv_buffers.size() - first, KvMoveParams::kMaxBuffers));
    for (int i = 0; i < params.num_buffers; ++i)
      params.buffers[i] = describe_rows(kOp, "kv_buffers[" + std::to_string(first + i) + "]",
                                        kv_buffers[first + i]);
    CHECK_LAUNCH(sgl_kernel_sm120::kv_move_all_layers(params, stream));
  }
}

}  // namespace sgl_kernel_sm120::api
