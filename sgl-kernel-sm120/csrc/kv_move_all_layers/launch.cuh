// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <algorithm>

#include "common/per_device.h"
#include "kernels.h"
#include "kv_move_all_layers/kernel.cuh"

namespace sgl_kernel_sm120 {

// True when every address, stride and row of every buffer is a multiple of `granule` bytes.
inline bool all_multiples_of(const KvMoveParams& params, int granule) {
  for (int i = 0; i < params.num_buffers; ++i) {
    const KvMoveParams::Buffer& b = params.buffers[i];
    if ((reinterpret_cast<uintptr_t>(b.base) | b.row_stride | b.row_bytes) % granule) return false;
  }
  return true;
}

template <int Granule>
cudaError_t launch_kv_move(const KvMoveParams& params, cudaStream_t stream) {
  using namespace kv_move_config;
  int row_bytes = 0;
  for (int i = 0; i < params.num_buffers; ++i)
    row_bytes = std::max(row_bytes, params.buffers[i].row_bytes);
  if (row_bytes == 0) return cudaSuccess;
  const int chunk = chunk_bytes(params.n, Granule);
  int log2_words = 0;
  while ((Granule << log2_words) < chunk) ++log2_words;
  if (cudaError_t error = allow_dynamic_smem<kv_move_kernel<Granule>, kSmemBytes>();
      error != cudaSuccess)
    return error;
  const dim3 grid((row_bytes + chunk - 1) / chunk, params.num_buffers);
  kv_move_kernel<Granule>
      <<<grid, kThreads, static_cast<size_t>(params.n) * chunk, stream>>>(params, log2_words);
  return cudaGetLastError();
}

}  // namespace sgl_kernel_sm120
