// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "block.h"

namespace sgl_kernel_sm120::arch {

inline constexpr bool kCanMoveRegisters = true;
inline int thread_index() { return int(threadIdx.x); }
inline const char* as_one_value(const char* pointer) { return pointer; }
template <int kCount>
void give_up_registers() {}
template <int kCount>
void take_registers() {}

}  // namespace sgl_kernel_sm120::arch
