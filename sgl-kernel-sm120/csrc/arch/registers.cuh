// SPDX-License-Identifier: Apache-2.0
// Registers move between the warpgroups of a block (4 warps each, aligned). Only the "a" targets
// can; the others keep what
// __launch_bounds__ gave each thread, and kCanMoveRegisters says so to the code that sizes its
// fragments.
#pragma once

namespace sgl_kernel_sm120::arch {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
inline constexpr bool kCanMoveRegisters = true;
#define SGL_KERNEL_CAN_MOVE_REGISTERS
#else
inline constexpr bool kCanMoveRegisters = false;
#endif

// threadIdx.x, read where it is written: what the compiler derives from threadIdx.x itself it may
// hold in registers from the start of the kernel to its end.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index & 1023;  // not negative, so that division by a power of two is a shift
}

// The same pointer, as one value: addresses made from it become immediate offsets, where the
// compiler would add up the parts of each anew.
__device__ __forceinline__ const char* as_one_value(const char* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// To at most kCount registers a thread from now on; the whole warpgroup.
template <int kCount>
__device__ __forceinline__ void give_up_registers() {
#ifdef SGL_KERNEL_CAN_MOVE_REGISTERS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Waits until kCount registers a thread are there.
template <int kCount>
__device__ __forceinline__ void take_registers() {
#ifdef SGL_KERNEL_CAN_MOVE_REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace sgl_kernel_sm120::arch
