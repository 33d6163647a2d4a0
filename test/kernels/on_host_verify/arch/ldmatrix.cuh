// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "block.h"

namespace sgl_kernel_sm120::arch {

inline uint32_t smem_address(const void* p) {
  const auto offset = static_cast<const char*>(p) - on_host::smem;
  if (offset < 0 || offset >= int64_t(on_host::kSmemBytes)) {
    std::fprintf(stderr, "an address outside of shared memory\n");
    std::abort();
  }
  return uint32_t(offset) + on_host::kSmemStart;
}
inline void* smem_pointer(uint32_t address) {
  if (address < on_host::kSmemStart || address >= on_host::kSmemStart + on_host::kSmemBytes) {
    std::fprintf(stderr, "shared address %u is out of range\n", address);
    std::abort();
  }
  return on_host::smem + (address - on_host::kSmemStart);
}

inline void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed) {
  const auto* all = on_host::share({address});
  const int lane = on_host::current % on_host::kWarp, g = lane / 4, t = lane % 4;
  for (int m = 0; m < 4; ++m) {
    const auto element = [&](int row, int column) {
      return static_cast<const uint16_t*>(smem_pointer(uint32_t(all[8 * m + row][0])))[column];
    };
    r[m] = transposed ? element(2 * t, g) | uint32_t{element(2 * t + 1, g)} << 16
                      : element(g, 2 * t) | uint32_t{element(g, 2 * t + 1)} << 16;
  }
  on_host::shared_is_read();
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) { load_matrices(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  load_matrices(r, address, true);
}
inline void ldmatrix_x4_if(uint32_t (&r)[4], uint32_t address, int condition) {
  if (condition) load_matrices(r, address, false);
}
inline void ldmatrix_x4_trans_if(uint32_t (&r)[4], uint32_t address, int condition) {
  if (condition) load_matrices(r, address, true);
}
inline void store_shared(uint32_t address, uint32_t value) {
  std::memcpy(smem_pointer(address), &value, sizeof value);
}

}  // namespace sgl_kernel_sm120::arch
