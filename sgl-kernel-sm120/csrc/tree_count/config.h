// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sgl_kernel_sm120::tree_count_op {

constexpr int kThreads = 32;  // one warp a request, and a lane a depth
constexpr int kMaxDepth = 31;
constexpr int kMaxPaths = 128;
constexpr int kCounts = 6;

}  // namespace sgl_kernel_sm120::tree_count_op
