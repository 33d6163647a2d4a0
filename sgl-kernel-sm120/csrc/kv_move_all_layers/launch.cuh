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

// Blocks of all shared memory that the current device holds at once.
inline cudaError_t resident_blocks(int* blocks) {
  int device = 0, sms = 0, smem = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
      error != cudaSuccess)
    return error;
  *blocks = sms * std::max(smem / kv_move_config::kBlockSmemBytes, 1);
  return cudaSuccess;
}

template <int Granule>
cudaError_t launch_kv_move(const KvMoveParams& params, cudaStream_t stream) {
  using namespace kv_move_config;
  int longest_row = 0;
  for (int i = 0; i < params.num_buffers; ++i)
    longest_row = std::max(longest_row, params.buffers[i].row_bytes);
  if (longest_row == 0) return cudaSuccess;
  if (cudaError_t error = allow_dynamic_smem<kv_move_kernel<Granule>, kSmemBytes>();
      error != cudaSuccess)
    return error;
  const bool small = is_small(params.n);
  const int64_t narrowest = small ? kMaxPieceBytes : Granule;
  int64_t blocks = (longest_row + narrowest - 1) / narrowest * params.num_buffers;
  if (!small) {
    int resident = 0;
    if (cudaError_t error = resident_blocks(&resident); error != cudaSuccess) return error;
    blocks = std::min<int64_t>(blocks, resident);
  }
  kv_move_kernel<Granule><<<static_cast<unsigned>(blocks), small ? kFewThreads : kMaxThreads,
                            smem_bytes(params.n), stream>>>(params, longest_row);
  return cudaGetLastError();
}

}  // namespace sgl_kernel_sm120
