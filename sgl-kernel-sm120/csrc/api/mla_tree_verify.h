// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "api/checks.h"
#include "kernels.h"

namespace sgl_kernel_sm120::api {

constexpr int64_t kMaxB = 256, kMaxSq = 128, kMaxHq = 128;
constexpr int64_t kMaxKvRowBytes = 0xffffffff, kMaxIndices = int64_t{1} << 28;
constexpr int64_t kDqk = 576, kDv = 512;

inline void check_tree_mask(const char* kOp, const Tensor& tree_mask, const Tensor& mask_indptr,
                            MaskLayout layout, int64_t b, int64_t s_q) {
  switch (layout) {
    case MaskLayout::kCausal:
      if (!tree_mask.absent())
        reject(kOp, "tree_mask", "None for MaskLayout.CAUSAL", describe(tree_mask),
               "pass the mask_layout of the mask");
      break;
    case MaskLayout::kQlen:
      CHECK_DTYPE(tree_mask, boolean(), u8());
      CHECK_SHAPE(tree_mask, "[b, s_q, s_q]", b, s_q, s_q);
      break;
    case MaskLayout::kBits:
      CHECK_DTYPE(tree_mask, i64());
      CHECK_SHAPE(tree_mask, "[b, s_q, ceil(s_q / 64)]", b, s_q, (s_q + 63) / 64);
      break;
    case MaskLayout::kFull:
      CHECK_DTYPE(tree_mask, boolean(), u8());
      CHECK_NDIM(tree_mask, 1, "[sum of s_q * (prefix + s_q)]");
      if (mask_indptr.dim() != 1 || (mask_indptr.size(0) != b && mask_indptr.size(0) != b + 1))
        reject(kOp, "mask_indptr", "[b] or [b + 1] with b = " + std::to_string(b),
               describe(mask_indptr), "slice it to the batch");
      break;
  }
  if (layout != MaskLayout::kFull && !mask_indptr.absent())
    reject(kOp, "mask_indptr", "None unless MaskLayout.FULL", describe(mask_indptr));
}

inline void mla_tree_verify(const Tensor& q, const Tensor& kv_cache, const Tensor& kv_indptr,
                            const Tensor& kv_indices, const Tensor& draft_slots,
                            const Tensor& tree_mask, const Tensor& mask_indptr, const Tensor& plan,
                            const Tensor& out, const Tensor& lse, const Tensor& workspace,
                            const Tensor& status, int64_t mask_layout, int64_t page_size,
                            double sm_scale, double logit_cap, double k_scale, double v_scale) {
  constexpr const char* kOp = "mla_tree_verify";
  CHECK_ARCH(q);

  CHECK_NDIM(q, 4, "[b, s_q, h_q, 576]");
  const int64_t b = q.size(0), s_q = q.size(1), h_q = q.size(2);
  CHECK_SHAPE(q, "[b, s_q, h_q, 576]", b, s_q, h_q, kDqk);
  if (kv_cache.dim() != 3) CHECK_NDIM(kv_cache, 2, "[num_slots, 576] (or [num_slots, 1, 576])");
  const int64_t num_slots = kv_cache.size(0);
  if (kv_cache.dim() == 3)
    CHECK_SHAPE(kv_cache, "[num_slots, 1, 576]", num_slots, 1, kDqk);
  else
    CHECK_SHAPE(kv_cache, "[num_slots, 576]", num_slots, kDqk);

  CHECK_RANGE(b, 1, kMaxB);
  CHECK_RANGE(s_q, 1, kMaxSq);
  CHECK_RANGE(h_q, 1, kMaxHq);
  CHECK_RANGE(num_slots, 1, int64_t{1} << 31);
  CHECK_RANGE(mask_layout, 0, 3);
  CHECK_RANGE(page_size, 1, 64);
  if (page_size & (page_size - 1))
    reject(kOp, "page_size", "a power of two in 1..64", std::to_string(page_size));
  if (logit_cap < 0)
    reject(kOp, "logit_cap", "0 (none) or a positive number", std::to_string(logit_cap));

  const int32_t device = q.device();
  CHECK_DEVICE(kv_cache, device);
  CHECK_DEVICE(kv_indptr, device);
  CHECK_DEVICE(kv_indices, device);
  CHECK_DEVICE(draft_slots, device);
  CHECK_DEVICE(tree_mask, device);
  CHECK_DEVICE(mask_indptr, device);
  CHECK_DEVICE(plan, device);
  CHECK_DEVICE(out, device);
  CHECK_DEVICE(lse, device);
  CHECK_DEVICE(workspace, device);
  CHECK_DEVICE(status, device);

  CHECK_DTYPE(q, bf16());
  CHECK_DTYPE(kv_cache, bf16(), fp8_e4m3fn());
  CHECK_DTYPE(kv_indptr, i32(), i64());
  CHECK_DTYPE(kv_indices, i32(), i64());
  if (draft_slots.dtype() != kv_indices.dtype())
    reject(kOp, "draft_slots", "the dtype of kv_indices, " + describe(kv_indices),
           describe(draft_slots), "kv_indices and draft_slots share one dtype");
  CHECK_DTYPE(mask_indptr, i64());
  CHECK_DTYPE(plan, i32());
  CHECK_DTYPE(lse, fp32());
  CHECK_DTYPE(workspace, u8());
  CHECK_DTYPE(status, i32());
  CHECK_DTYPE(out, bf16());

  CHECK_SHAPE(kv_indptr, "[b + 1]", b + 1);
  CHECK_NDIM(kv_indices, 1, "[any]");
  if (!draft_slots.absent()) CHECK_SHAPE(draft_slots, "[b, s_q]", b, s_q);
  CHECK_SHAPE(out, "[b, s_q, h_q, 512]", b, s_q, h_q, kDv);
  if (!lse.absent()) CHECK_SHAPE(lse, "[b, s_q, h_q]", b, s_q, h_q);
  if (!status.absent()) CHECK_SHAPE(status, "[1]", 1);
  const auto layout = static_cast<MaskLayout>(mask_layout);
  check_tree_mask(kOp, tree_mask, mask_indptr, layout, b, s_q);

  CHECK_ROW_MAJOR(q);
  CHECK_ROW_MAJOR(kv_cache);
  CHECK_CONTIGUOUS(kv_indptr);
  CHECK_CONTIGUOUS(kv_indices);
  CHECK_CONTIGUOUS(draft_slots);
  CHECK_CONTIGUOUS(tree_mask);
  CHECK_CONTIGUOUS(mask_indptr);
  CHECK_CONTIGUOUS(out);
  CHECK_CONTIGUOUS(lse);
  CHECK_CONTIGUOUS(workspace);
  CHECK_CONTIGUOUS(plan);
  CHECK_CONTIGUOUS(status);
  CHECK_ALIGNED(q, 16);
  CHECK_ALIGNED(kv_cache, 16);
  CHECK_ALIGNED(out, 16);
  CHECK_ALIGNED(workspace, 16);
  for (int64_t d = 0; d < 3; ++d)
    if (q.size(d) > 1 && q.stride(d) % 8)
      reject(kOp, "q", "strides that are multiples of 8", "strides " + strides(q),
             "call .contiguous()");
  if (num_slots > 1 && kv_cache.stride(0) * kv_cache.element_size() % 16)
    reject(kOp, "kv_cache", "a row stride that is a multiple of 16 bytes",
           "strides " + strides(kv_cache));
  // The kernel multiplies a 32-bit slot by a 32-bit row stride, and counts list positions in 32
  // bits.
  if (kv_cache.stride(0) * kv_cache.element_size() > kMaxKvRowBytes)
    reject(kOp, "kv_cache", "a row stride below 4 GiB", "strides " + strides(kv_cache));
  if (kv_indices.numel() > kMaxIndices)
    reject(kOp, "kv_indices", "at most 268435456 entries", std::to_string(kv_indices.numel()),
           "split the batch");

  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, device);
  CHECK_BYTES(workspace, mla_tree_verify_workspace_bytes(b, s_q, h_q, num_sms),
              "ask mla_tree_verify_workspace_bytes");
  CHECK_BYTES(plan, 4 * mla_tree_verify_plan_ints(b, s_q, h_q, num_sms),
              "make it with mla_tree_verify_plan");

  MlaTreeVerifyParams params{};
  params.q = q.data();
  params.kv_cache = kv_cache.data();
  params.kv_indptr = kv_indptr.data();
  params.kv_indices = kv_indices.data();
  params.draft_slots = pointer_or_null<const void>(draft_slots);
  params.tree_mask = pointer_or_null<const void>(tree_mask);
  params.mask_indptr = pointer_or_null<const int64_t>(mask_indptr);
  params.plan = pointer<const int32_t>(plan);
  params.out = out.data();
  params.lse = pointer_or_null<float>(lse);
  params.workspace = workspace.data();
  params.status = pointer_or_null<int32_t>(status);
  params.q_stride_b = q.stride(0);
  params.q_stride_s = q.stride(1);
  params.q_stride_h = q.stride(2);
  params.kv_stride = kv_cache.stride(0);
  params.num_slots = num_slots;
  params.num_indices = kv_indices.numel();
  params.mask_bytes = layout == MaskLayout::kFull ? tree_mask.numel() : 0;
  params.workspace_bytes = workspace.numel();
  params.plan_ints = plan.numel();
  params.b = static_cast<int32_t>(b);
  params.s_q = static_cast<int32_t>(s_q);
  params.h_q = static_cast<int32_t>(h_q);
  params.page_size = static_cast<int32_t>(page_size);
  params.num_sms = num_sms;
  params.mask_layout = layout;
  params.kv_is_fp8 = kv_cache.dtype() == fp8_e4m3fn().code;
  params.indptr_is_64 = kv_indptr.dtype() == i64().code;
  params.indices_are_64 = kv_indices.dtype() == i64().code;
  params.score_scale = static_cast<float>(sm_scale * k_scale);
  params.logit_cap = static_cast<float>(logit_cap);
  params.v_scale = static_cast<float>(v_scale);

  DeviceGuard guard(device);
  CHECK_LAUNCH(sgl_kernel_sm120::mla_tree_verify(params, current_stream(device)));
}

inline void mla_tree_verify_plan(const Tensor& kv_indptr, const Tensor& plan, int64_t num_indices,
                                 int64_t s_q, int64_t h_q, bool has_draft_slots) {
  constexpr const char* kOp = "mla_tree_verify_plan";
  CHECK_ARCH(kv_indptr);
  CHECK_NDIM(kv_indptr, 1, "[b + 1]");
  const int64_t b = kv_indptr.size(0) - 1;
  CHECK_RANGE(b, 1, kMaxB);
  CHECK_RANGE(s_q, 1, kMaxSq);
  CHECK_RANGE(h_q, 1, kMaxHq);
  const int32_t device = kv_indptr.device();
  CHECK_DEVICE(plan, device);
  CHECK_DTYPE(kv_indptr, i32(), i64());
  CHECK_DTYPE(plan, i32());
  CHECK_CONTIGUOUS(kv_indptr);
  CHECK_CONTIGUOUS(plan);
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, device);
  CHECK_BYTES(plan, 4 * mla_tree_verify_plan_ints(b, s_q, h_q, num_sms),
              "let mla_tree_verify_plan allocate it");

  MlaTreeVerifyPlanParams params{};
  params.kv_indptr = kv_indptr.data();
  params.plan = pointer<int32_t>(plan);
  params.num_indices = num_indices;
  params.plan_ints = plan.numel();
  params.b = static_cast<int32_t>(b);
  params.s_q = static_cast<int32_t>(s_q);
  params.h_q = static_cast<int32_t>(h_q);
  params.num_sms = num_sms;
  params.indptr_is_64 = kv_indptr.dtype() == i64().code;
  params.has_draft_slots = has_draft_slots;
  DeviceGuard guard(device);
  CHECK_LAUNCH(sgl_kernel_sm120::mla_tree_verify_plan(params, current_stream(device)));
}

}  // namespace sgl_kernel_sm120::api
