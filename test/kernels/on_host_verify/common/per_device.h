// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/common/per_device.h, which is about CUDA contexts.
#pragma once

namespace sgl_kernel_sm120 {
constexpr int kMaxSmemBytes = 101376;
}
