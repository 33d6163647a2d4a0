// SPDX-License-Identifier: Apache-2.0
// Host side: main kernel, then the merge kernel as its dependent.
#pragma once
#include <algorithm>

#include "common/per_device.h"
#include "kernels.h"
#include "mla_tree_verify/kernel.cuh"
#include "mla_tree_verify/merge.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {

constexpr int kMergeBlocksPerSm = 4;

template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(void (*kernel)(Parameters...), dim3 grid, int threads, int smem_bytes,
                             cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// Defined once for each row tile and cache format, in instantiations/.
template <class Kv, int kRowBlocks>
cudaError_t launch(const MlaTreeVerifyParams& params, cudaStream_t stream) {
  using C = Config<Kv, kRowBlocks>;
  const int rows = params.s_q * params.h_q, row_tiles = num_row_tiles(rows, kRowBlocks),
            columns = max_columns(row_tiles, params.num_sms);
  if (cudaError_t error = allow_dynamic_smem<mla_tree_verify_kernel<C>, C::kSmemBytes>();
      error != cudaSuccess)
    return error;
  if (cudaError_t error = launch_dependent(mla_tree_verify_kernel<C>, dim3(row_tiles, columns),
                                           kThreads, C::kSmemBytes, stream, params);
      error != cudaSuccess)
    return error;
  const int64_t units = int64_t{params.b} * row_tiles * kValueWarps * kColumnPairs * kRowBlocks;
  const int blocks =
      static_cast<int>(std::min<int64_t>(units, int64_t{params.num_sms} * kMergeBlocksPerSm));
  return launch_dependent(mla_tree_verify_merge_kernel<C>, dim3(blocks), kMergeWarps * kWarp, 0,
                          stream, params, columns);
}

}  // namespace sgl_kernel_sm120::mla_tree_verify_op
