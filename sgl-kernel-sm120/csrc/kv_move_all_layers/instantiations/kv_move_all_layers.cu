// SPDX-License-Identifier: Apache-2.0
#include "kv_move_all_layers/launch.cuh"

namespace sgl_kernel_sm120 {

int64_t kv_move_max_rows(int granule) { return kv_move_config::max_rows(granule); }

// The widest granule that divides all addresses. The kernel narrows it where too many rows move.
cudaError_t kv_move_all_layers(const KvMoveParams& params, cudaStream_t stream) {
  if (all_multiples_of(params, 16)) return launch_kv_move<16>(params, stream);
  if (all_multiples_of(params, 4)) return launch_kv_move<4>(params, stream);
  return launch_kv_move<1>(params, stream);
}

}  // namespace sgl_kernel_sm120
