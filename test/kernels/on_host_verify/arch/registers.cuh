// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "block.h"

namespace sgl_kernel_sm120::arch {

inline constexpr bool kCanMoveRegisters = true;
inline int thread_index() { return int(threadIdx.x); }
template <int kCount>
void give_up_registers() {}
template <int kCount>
void take_registers() {}

}  // namespace sgl_kernel_sm120::arch
