// SPDX-License-Identifier: Apache-2.0
// One struct per op: what the host hands to a launch function, and a kernel may take by value. No
// torch here.
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120 {

// The values are those of MaskLayout in python/sgl_kernel_sm120/reference.py; test_api.py compares
// them.
enum class MaskLayout : int32_t { kCausal = 0, kQlen = 1, kBits = 2, kFull = 3 };

// Bits that a kernel ORs into params.status; Status in reference.py.
enum StatusBit : int32_t { kListClamped = 1, kSlotClamped = 2, kMaskClamped = 4 };

struct MlaTreeVerifyParams {
  // Inputs. Strides are in elements; a pointer marked "or null" is null when the caller passed no
  // tensor.
  const void* q;           // [b, s_q, h_q, 576] bf16, strides q_stride_*, last dimension contiguous
  const void* kv_cache;    // [num_slots, 576] bf16 or fp8_e4m3, row stride kv_stride
  const void* kv_indptr;   // [b + 1] int32 or int64 (indptr_is_64)
  const void* kv_indices;  // [num_indices] int32 or int64 (indices_are_64)
  const void* draft_slots;  // [b, s_q] like kv_indices, or null: the last s_q entries of each list
                            // are the draft slots
  const void* tree_mask;  // by mask_layout: null | u8 [b, s_q, s_q] | u64 [b, s_q, ceil(s_q / 64)]
                          // | u8 [mask_bytes]
  const int64_t*
      mask_indptr;  // [b] (or [b + 1]) byte offsets of the requests' blocks in a full mask, or null
  const int32_t* plan;  // [plan_ints] what the plan kernel wrote

  // Outputs and scratch.
  void* out;        // [b, s_q, h_q, 512] bf16, contiguous
  float* lse;       // [b, s_q, h_q], contiguous, natural logarithm, or null
  void* workspace;  // [workspace_bytes], 16-byte aligned, contents arbitrary on entry
  int32_t* status;  // [1] StatusBit mask, or null

  int64_t q_stride_b, q_stride_s, q_stride_h;
  int64_t kv_stride;
  int64_t num_slots, num_indices, mask_bytes, workspace_bytes, plan_ints;
  int32_t b, s_q, h_q;
  int32_t page_size;  // 1, 2, 4, ... 64
  int32_t num_sms;
  MaskLayout mask_layout;
  bool kv_is_fp8, indptr_is_64, indices_are_64;
  float score_scale;  // sm_scale * k_scale
  float logit_cap;    // 0 = none
  float v_scale;
};

struct MlaTreeVerifyPlanParams {
  const void* kv_indptr;  // [b + 1] int32 or int64 (indptr_is_64)
  int32_t* plan;          // [plan_ints]
  int64_t num_indices, plan_ints;
  int32_t b, s_q, h_q;
  int32_t num_sms;
  bool indptr_is_64;
  bool has_draft_slots;
};

struct DdtreeBuildParams {
  const int64_t* root;     // [b]
  const int64_t* ids;      // [b, depths, k]
  const float* log_probs;  // [b, depths, k], best first
  int64_t* tokens;         // [b, n]
  int32_t* parents;        // [b, n]
  int32_t* depth;          // [b, n]
  int32_t* first_child;    // [b, n]
  int32_t* next_sibling;   // [b, n]
  uint8_t* visible;        // [b, n, n]
  int32_t* used;           // [b]
  float* path_log_probs;   // [b, m]
  float min_log_prob;      // no node below it, but the root
  int32_t b, depths, k, n, m;
};

struct TreeAcceptParams {
  const int64_t* tokens;         // [b, n]
  const int32_t* parents;        // [b, n]
  const int64_t* target_tokens;  // [b, n]
  int64_t* path;                 // [b, max_len]
  int32_t* accept_len;           // [b]
  int64_t* out_tokens;           // [b, max_len]
  int64_t* bonus;                // [b]
  int32_t b, n, max_len;
};

struct TreeCountParams {
  const int64_t* ids;           // [b, depths, k], best first
  const float* log_probs;       // [b, depths, k]
  const float* path_log_probs;  // [b, m], best first; the root is the first
  const int32_t* used;          // [b]
  const int32_t* accept_len;    // [b]
  const int64_t* out_tokens;    // [b, max_len]
  const int32_t* options;       // [num_options], a tree's nodes, or minus a chain's
  int32_t* counts;              // [b, 6 + num_options]; bits of fp32 behind the sixth
  int32_t b, depths, k, m, max_len, num_options;
  int32_t num_nodes;  // rows that were verified
};

struct PackTreeMaskParams {
  const uint8_t* visible;  // [rows, n], nonzero = visible; rows = b * n
  uint64_t* words;         // [rows, ceil(n / 64)]
  int64_t rows;
  int32_t n;
};

struct KvMoveParams {
  static constexpr int kMaxBuffers = 128;
  struct Buffer {
    char* base;  // [num_slots] rows of row_bytes, row_stride bytes apart
    int64_t row_stride;
    int32_t row_bytes;
    int32_t num_slots;
  };
  Buffer buffers[kMaxBuffers];
  const int64_t* tgt;  // [n]
  const int64_t* src;  // [n]
  int32_t n;
  int32_t num_buffers;
};
static_assert(sizeof(KvMoveParams) <= 4096, "kernel parameters are limited to 4 KiB");

}  // namespace sgl_kernel_sm120
