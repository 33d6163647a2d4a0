// SPDX-License-Identifier: Apache-2.0
// FlashInfer's FA2 paged MLA attention behind a C ABI, for the benchmark. The headers come from the
// flashinfer-python wheel at build time and are not changed; SMEM_LIMIT (bytes a multiprocessor, 0
// = what the card has) makes them pick the configuration of a card with less shared memory: the two
// CUDA calls by which they ask and reserve are routed through the functions below.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#ifndef SMEM_LIMIT
#define SMEM_LIMIT 0
#endif

namespace limited {

constexpr int kReservedPerBlock = 1024;  // what the driver keeps of each block's share

inline cudaError_t device_attribute(int* value, cudaDeviceAttr attribute, int device) {
  const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device);
  if (SMEM_LIMIT > 0 && attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor &&
      *value > SMEM_LIMIT)
    *value = SMEM_LIMIT;
  return error;
}

template <typename Kernel>
cudaError_t function_attribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
  if (SMEM_LIMIT > 0 && attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
      value > SMEM_LIMIT - kReservedPerBlock) {
    // This card has room for it, the one that is stood in for has not.
    throw std::runtime_error("the configuration needs " + std::to_string(value) +
                             " B of shared memory, a block of the limited card has " +
                             std::to_string(SMEM_LIMIT - kReservedPerBlock));
  }
  return cudaFuncSetAttribute(kernel, attribute, value);
}

}  // namespace limited

#define cudaDeviceGetAttribute(value, attribute, device) \
  ::limited::device_attribute(value, attribute, device)
#define cudaFuncSetAttribute(kernel, attribute, value) \
  ::limited::function_attribute(kernel, attribute, value)
#include <flashinfer/attention/mla.cuh>
#include <flashinfer/attention/scheduler.cuh>
#undef cudaDeviceGetAttribute
#undef cudaFuncSetAttribute

namespace {

constexpr int kDimCkv = 512, kDimKpe = 64, kPlanWords = 18;
thread_local std::string g_error;

template <typename F>
int guarded(F&& body) {
  try {
    const cudaError_t error = body();
    g_error = error == cudaSuccess ? "" : cudaGetErrorString(error);
    return error;
  } catch (const std::exception& e) {
    g_error = e.what();
    return -1;
  }
}

template <typename KV>
cudaError_t run(const flashinfer::MLAPlanInfo& plan, void* float_workspace, void* int_workspace,
                const void* q, const void* kv, const int32_t* kv_indices, void* out, int h_q,
                float sm_scale, float kv_scale, cudaStream_t stream) {
  using Bf16 = __nv_bfloat16;
  using flashinfer::GetPtrFromBaseOffset;
  flashinfer::MLAParams<Bf16, KV, Bf16, int32_t> p;
  p.q_nope = static_cast<Bf16*>(const_cast<void*>(q));
  p.q_pe = p.q_nope + kDimCkv;
  p.ckv = static_cast<KV*>(const_cast<void*>(kv));
  p.kpe = p.ckv + kDimCkv;
  auto ints = [&](int64_t offset) { return GetPtrFromBaseOffset<int32_t>(int_workspace, offset); };
  p.q_indptr = ints(plan.q_indptr_offset);
  p.kv_indptr = ints(plan.kv_indptr_offset);
  p.partial_indptr = ints(plan.partial_indptr_offset);
  p.kv_indices = const_cast<int32_t*>(kv_indices);
  p.q_len = ints(plan.q_len_offset);
  p.kv_len = ints(plan.kv_len_offset);
  p.q_start = ints(plan.q_start_offset);
  p.kv_start = ints(plan.kv_start_offset);
  p.kv_end = ints(plan.kv_end_offset);
  p.work_indptr = ints(plan.work_indptr_offset);
  p.merge_packed_offset_start = ints(plan.merge_packed_offset_start_offset);
  p.merge_packed_offset_end = ints(plan.merge_packed_offset_end_offset);
  p.merge_partial_packed_offset_start = ints(plan.merge_partial_packed_offset_start_offset);
  p.merge_partial_packed_offset_end = ints(plan.merge_partial_packed_offset_end_offset);
  p.merge_partial_stride = ints(plan.merge_partial_stride_offset);
  p.final_o = static_cast<Bf16*>(out);
  p.final_lse = nullptr;
  p.partial_o = GetPtrFromBaseOffset<Bf16>(float_workspace, plan.partial_o_offset);
  p.partial_lse = GetPtrFromBaseOffset<float>(float_workspace, plan.partial_lse_offset);
  p.num_heads = flashinfer::uint_fastdiv(h_q);
  p.block_size = flashinfer::uint_fastdiv(1);
  p.q_nope_stride_n = p.q_pe_stride_n = h_q * (kDimCkv + kDimKpe);
  p.q_nope_stride_h = p.q_pe_stride_h = kDimCkv + kDimKpe;
  p.ckv_stride_page = p.ckv_stride_n = p.kpe_stride_page = p.kpe_stride_n = kDimCkv + kDimKpe;
  p.o_stride_n = h_q * kDimCkv;
  p.o_stride_h = kDimCkv;
  p.sm_scale = sm_scale;
  p.ckv_scale = p.kpe_scale = kv_scale;
  p.return_lse_base_on_e = false;
  return flashinfer::mla::BatchMLAPagedAttention<flashinfer::MaskMode::kNone, kDimCkv, kDimKpe>(
      p, plan.num_blks_x, plan.num_blks_y, stream);
}

}  // namespace

extern "C" const char* flashinfer_mla_error() { return g_error.c_str(); }

// Host planning, as FlashInfer's wrapper does before a step; plan_out has 18 words. All *_h arrays
// are on the host.
extern "C" int flashinfer_mla_plan(int32_t* qo_indptr_h, int32_t* kv_indptr_h, int32_t* kv_len_h,
                                   int b, int h_q, void* float_workspace, int64_t float_bytes,
                                   void* int_workspace, void* int_pinned, int64_t int_bytes,
                                   int64_t* plan_out, void* stream) {
  return guarded([&]() -> cudaError_t {
    flashinfer::MLAPlanInfo plan;
    size_t staged = 0;
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    const cudaError_t error = flashinfer::MLAPlan<int32_t>(
        float_workspace, float_bytes, int_workspace, int_pinned, int_bytes, plan, staged,
        qo_indptr_h, kv_indptr_h, kv_len_h, b, h_q, kDimCkv, /*causal=*/false, s);
    if (error != cudaSuccess) return error;
    const std::vector<int64_t> words = plan.ToVector();
    for (int i = 0; i < kPlanWords; ++i) plan_out[i] = words[i];
    return cudaMemcpyAsync(int_workspace, int_pinned, staged, cudaMemcpyHostToDevice, s);
  });
}

extern "C" int flashinfer_mla_run(int kv_is_fp8, const int64_t* plan_words, void* float_workspace,
                                  void* int_workspace, const void* q, const void* kv,
                                  const int32_t* kv_indices, void* out, int h_q, float sm_scale,
                                  float kv_scale, void* stream) {
  return guarded([&]() -> cudaError_t {
    flashinfer::MLAPlanInfo plan;
    plan.FromVector(std::vector<int64_t>(plan_words, plan_words + kPlanWords));
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    return kv_is_fp8 ? run<__nv_fp8_e4m3>(plan, float_workspace, int_workspace, q, kv, kv_indices,
                                          out, h_q, sm_scale, kv_scale, s)
                     : run<__nv_bfloat16>(plan, float_workspace, int_workspace, q, kv, kv_indices,
                                          out, h_q, sm_scale, kv_scale, s);
  });
}
