// SPDX-License-Identifier: Apache-2.0
// Registers move between the warpgroups of a block (4 warps each, aligned). Only the "a" targets can; the others keep what
// __launch_bounds__ gave each thread, and kCanMoveRegisters says so to the code that sizes its fragments.
#pragma once

namespace sgl_kernel_sm120::arch {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define SGL_KERNEL_CAN_MOVE_REGISTERS 1
#else
#define SGL_KERNEL_CAN_MOVE_REGISTERS 0
#endif

// To at most kCount registers a thread from now on; the whole warpgroup.
template <int kCount>
__device__ __forceinline__ void give_up_registers() {
#if SGL_KERNEL_CAN_MOVE_REGISTERS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Waits until kCount registers a thread are there.
template <int kCount>
__device__ __forceinline__ void take_registers() {
#if SGL_KERNEL_CAN_MOVE_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace sgl_kernel_sm120::arch
