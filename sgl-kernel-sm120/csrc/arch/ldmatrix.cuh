// SPDX-License-Identifier: Apache-2.0
// Four 8 x 8 matrices of 16-bit elements from shared memory. Lane i gives the address of row i % 8
// of matrix i / 8.
#pragma once
#include <cstdint>

namespace sgl_kernel_sm120::arch {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Lane 4 g + t receives elements (g, 2 t) and (g, 2 t + 1) of each matrix.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Lane 4 g + t receives elements (2 t, g) and (2 t + 1, g) of each matrix.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same two if `condition`, else r keeps its value. Pass what is always true but not known to
// the compiler: r is then in use before the load as well as after it, so that loading early costs
// no register, and the compiler, which otherwise puts each load right before its use when registers
// are short, leaves it early.
__device__ __forceinline__ void ldmatrix_x4_if(uint32_t (&r)[4], uint32_t address, int condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
      "{%0,%1,%2,%3}, [%4];\n}"
      : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
      : "r"(address), "r"(condition)
      : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans_if(uint32_t (&r)[4], uint32_t address,
                                                     int condition) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n@p ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
      "{%0,%1,%2,%3}, [%4];\n}"
      : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
      : "r"(address), "r"(condition)
      : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace sgl_kernel_sm120::arch
