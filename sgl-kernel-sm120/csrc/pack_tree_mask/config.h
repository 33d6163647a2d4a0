// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sgl_kernel_sm120::pack_tree_mask_config {

constexpr int kThreads = 256;
constexpr int kRowsPerBlock = kThreads / 32;  // 8: one warp a row
constexpr int kBitsPerWord = 64;

}  // namespace sgl_kernel_sm120::pack_tree_mask_config
