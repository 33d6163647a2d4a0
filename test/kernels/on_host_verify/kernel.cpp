// SPDX-License-Identifier: Apache-2.0
// Plan, main and merge kernel of mla_tree_verify, compiled for the CPU, with the grids of
// launch.cuh.
#include "block.h"
//
#include "mla_tree_verify/kernel.cuh"
#include "mla_tree_verify/merge.cuh"
#include "mla_tree_verify/plan.cuh"

namespace sgl_kernel_sm120::mla_tree_verify_op {
alignas(128) thread_local unsigned char raw_smem[on_host::kSmemBytes];

template <class Kv, int kRowBlocks>
void run(const MlaTreeVerifyParams& params) {
  using C = Config<Kv, kRowBlocks>;
  const int row_tiles = num_row_tiles(params.s_q * params.h_q, kRowBlocks),
            columns = max_columns(row_tiles, params.num_sms);
  std::memset(raw_smem, 0xff, sizeof raw_smem);
  on_host::launch({unsigned(row_tiles), unsigned(columns)}, kThreads,
                  [&] { mla_tree_verify_kernel<C>(params); });
  on_host::launch({7}, kMergeWarps * kWarp,
                  [&] { mla_tree_verify_merge_kernel<C>(params, columns); });
}
}  // namespace sgl_kernel_sm120::mla_tree_verify_op

using namespace sgl_kernel_sm120;
using namespace sgl_kernel_sm120::mla_tree_verify_op;

extern "C" {
void host_verify(const MlaTreeVerifyParams* params, unsigned seed) {
  on_host::smem = reinterpret_cast<char*>(raw_smem);
  on_host::order.seed(seed);
  const auto dispatch = [&](auto kv, int most) {
    using Kv = decltype(kv);
    switch (row_blocks_per_tile(params->s_q * params->h_q, most)) {
      case 1:
        return run<Kv, 1>(*params);
      case 2:
        return run<Kv, 2>(*params);
      case 3:
        return run<Kv, 3>(*params);
      case 4:
        return run<Kv, 4>(*params);
      default:
        return run<Kv, 5>(*params);
    }
  };
  if (params->kv_is_fp8)
    dispatch(Fp8Kv{}, kMaxRowBlocksFp8);
  else
    dispatch(Bf16Kv{}, kMaxRowBlocksBf16);
}
void host_plan(const MlaTreeVerifyPlanParams* params) {
  on_host::launch({1}, kMaxBatch, [&] { mla_tree_verify_plan_kernel(*params); });
}
int64_t host_workspace_bytes(int b, int s_q, int h_q, int num_sms) {
  return workspace_bytes(b, s_q, h_q, num_sms);
}
int64_t host_plan_ints(int b) { return plan_ints(b); }
void host_sizes(int* sizes) {
  sizes[0] = sizeof(MlaTreeVerifyParams), sizes[1] = sizeof(MlaTreeVerifyPlanParams);
}
}
