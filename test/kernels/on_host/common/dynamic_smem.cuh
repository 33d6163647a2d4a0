// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/common/dynamic_smem.cuh: one buffer, since one block runs at a time.
#pragma once

namespace sgl_kernel_sm120 {

inline unsigned char* dynamic_smem() {
  alignas(16) static unsigned char smem[101376];
  return smem;
}

}  // namespace sgl_kernel_sm120
