// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace sgl_kernel_sm120::tree_accept_op {

constexpr int kThreads = 32;  // one warp a request

}  // namespace sgl_kernel_sm120::tree_accept_op
