// SPDX-License-Identifier: Apache-2.0
// Every CUDA registration. Schemas, CPU and fake kernels are in python/sgl_kernel_sm120.
#include "api/ddtree_build.h"
#include "api/kv_move_all_layers.h"
#include "api/mla_tree_verify.h"
#include "api/pack_tree_mask.h"
#include "api/tree_accept.h"
#include "api/tree_count.h"

namespace sgl_kernel_sm120 {
namespace {

template <auto Function>
void implement(TorchLibraryHandle library, const char* name) {
  if (torch_library_impl(library, name, torch_abi::Boxed<Function>::call, torch_abi::kTorch_2_11))
    torch_abi::fail(std::string("cannot register the CUDA kernel of ") + name);
}

// The handle is never freed: that would unregister the ops, at exit from a torch that may be gone
// already.
[[maybe_unused]] const bool registered = [] {
  const auto library = TORCH_ABI_GET(TorchLibraryHandle, aoti_torch_library_init_impl,
                                     "sgl_kernel_sm120", "CUDA", "ops.cpp", uint32_t{__LINE__});
  implement<api::mla_tree_verify>(library, "mla_tree_verify");
  implement<api::mla_tree_verify_plan>(library, "mla_tree_verify_plan");
  implement<api::ddtree_build>(library, "ddtree_build");
  implement<api::tree_accept>(library, "tree_accept");
  implement<api::tree_count>(library, "tree_count");
  implement<api::pack_tree_mask>(library, "pack_tree_mask");
  implement<api::kv_move_all_layers>(library, "kv_move_all_layers");
  return true;
}();

}  // namespace
}  // namespace sgl_kernel_sm120

// Plain C for Python's ctypes: _library.py, attention.py.
#define SGL_KERNEL_SM120_EXPORT extern "C" __attribute__((visibility("default")))
SGL_KERNEL_SM120_EXPORT const char* sgl_kernel_sm120_archs() { return SGL_KERNEL_SM120_ARCHS; }
SGL_KERNEL_SM120_EXPORT const char* sgl_kernel_sm120_nvcc_version() {
  return SGL_KERNEL_SM120_NVCC;
}
SGL_KERNEL_SM120_EXPORT int64_t sgl_kernel_sm120_mla_tree_verify_workspace_bytes(int32_t b,
                                                                                 int32_t s_q,
                                                                                 int32_t h_q,
                                                                                 int32_t num_sms) {
  return sgl_kernel_sm120::mla_tree_verify_workspace_bytes(b, s_q, h_q, num_sms);
}
SGL_KERNEL_SM120_EXPORT int64_t sgl_kernel_sm120_mla_tree_verify_plan_ints(int32_t b, int32_t s_q,
                                                                           int32_t h_q,
                                                                           int32_t num_sms) {
  return sgl_kernel_sm120::mla_tree_verify_plan_ints(b, s_q, h_q, num_sms);
}
