// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run the verify kernel's source on the CPU: warps of fibers, mbarriers,
// copies that land when their barrier says so, matrix fragments. Warps run in an order
// drawn anew each round, so that a missing barrier shows up as a wrong result; a barrier that is
// never completed is reported as a deadlock.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local  // one block at a time, and one definition serves `extern` too

struct dim3 {
  unsigned x, y = 1, z = 1;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline dim3 threadIdx{0}, blockIdx{0}, blockDim{0}, gridDim{0};
using std::max;
using std::min;

namespace on_host {

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 * 1024, kSmemBytes = 101376;
constexpr uint32_t kSmemStart = 1024;  // so that address 0 is nobody's

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  std::function<bool()> ready;                // empty: runnable
  std::vector<std::function<void()>> copies;  // issued and not landed
  bool done;
};

struct Barrier {
  unsigned arrived, phase, votes, last_votes;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline unsigned current = 0, threads = 0;
inline const std::function<void()>* body = nullptr;
inline uint64_t exchange[1024][6];  // what a lane shows the others
inline Barrier warp_barriers[32], block_barrier;
inline char* smem = nullptr;
inline std::mt19937 order;

inline void enter() {
  (*body)();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

template <class Ready>
void wait_until(const Ready& ready) {
  if (ready()) return;
  fibers[current].ready = ready;
  swapcontext(&fibers[current].context, &scheduler);
}

// Counts this thread; true once `expected` have.
inline unsigned arrive(Barrier& barrier, unsigned expected, bool vote = false) {
  const unsigned phase = barrier.phase;
  barrier.votes += vote;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0, barrier.phase++;
    barrier.last_votes = barrier.votes, barrier.votes = 0;
  }
  return phase;
}

inline unsigned meet(Barrier& barrier, unsigned expected, bool vote = false) {
  const unsigned phase = arrive(barrier, expected, vote);
  wait_until([&barrier, phase] { return barrier.phase != phase; });
  return barrier.last_votes;
}

// Warps that run only when no other can: whoever may run ahead of them does so as far as the
// barriers let it. None, or a warpgroup, half of one, or a warp.
inline uint32_t draw_slow_warps(size_t warps) {
  const unsigned count = order() % 4 == 0 ? 0 : 4u >> order() % 3;
  if (count == 0) return 0;
  const unsigned first = order() % (warps / count) * count;
  return ((1u << count) - 1) << first;
}

inline void run_block(unsigned count, const std::function<void()>& kernel) {
  if (fibers.size() < count) fibers = std::vector<Fiber>(count);
  threads = count;
  body = &kernel;
  std::memset(warp_barriers, 0, sizeof warp_barriers);
  block_barrier = {};
  for (unsigned i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    fiber.ready = nullptr, fiber.copies.clear(), fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  std::vector<unsigned> warps((count + kWarp - 1) / kWarp);
  for (unsigned i = 0; i < warps.size(); ++i) warps[i] = i;
  const uint32_t slow = draw_slow_warps(warps.size());
  bool others_ran = false;
  while (true) {
    bool ran = false, alive = false;
    std::shuffle(warps.begin(), warps.end(), order);
    for (unsigned warp : warps) {
      if ((slow >> warp & 1) && others_ran) {
        alive = true;
        continue;
      }
      // A warp runs until it waits for others; now and then less.
      for (int turn = order() % 64; turn >= 0; --turn) {
        bool warp_ran = false;
        for (unsigned i = warp * kWarp; i < std::min(count, warp * kWarp + kWarp); ++i) {
          Fiber& fiber = fibers[i];
          if (fiber.done) continue;
          alive = true;
          if (fiber.ready && !fiber.ready()) continue;
          fiber.ready = nullptr;
          current = threadIdx.x = i;
          swapcontext(&scheduler, &fiber.context);
          warp_ran = true;
        }
        if (!warp_ran) break;
        ran = true;
      }
    }
    if (!alive) return;
    if (!ran && others_ran) {  // now it is the slow ones' turn
      others_ran = false;
      continue;
    }
    others_ran = ran;
    if (!ran) {
      std::fprintf(stderr, "deadlock in block (%u, %u): waiting warps", blockIdx.x, blockIdx.y);
      for (unsigned i = 0; i < count; ++i)
        if (!fibers[i].done && i % kWarp == 0) std::fprintf(stderr, " %u", i / kWarp);
      std::fprintf(stderr, "\n");
      std::abort();
    }
  }
}

template <class Kernel>
void launch(dim3 grid, unsigned count, const Kernel& kernel) {
  gridDim = grid, blockDim = {count};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(count, kernel);
  blockIdx = {0};
}

// What every lane of the warp passed; valid until its next collective.
inline uint64_t (*share(std::initializer_list<uint64_t> mine))[6] {
  std::copy(mine.begin(), mine.end(), exchange[current]);
  meet(warp_barriers[current / kWarp], kWarp);
  return &exchange[current / kWarp * kWarp];
}
inline void shared_is_read() { meet(warp_barriers[current / kWarp], kWarp); }

template <class T>
uint64_t bits(T value) {
  uint64_t b = 0;
  std::memcpy(&b, &value, sizeof value);
  return b;
}
template <class T>
T from_bits(uint64_t b) {
  T value;
  std::memcpy(&value, &b, sizeof value);
  return value;
}

}  // namespace on_host

inline void __syncthreads() { on_host::meet(on_host::block_barrier, on_host::threads); }
inline int __syncthreads_or(int condition) {
  return on_host::meet(on_host::block_barrier, on_host::threads, condition != 0) != 0;
}
inline void __syncwarp() { on_host::shared_is_read(); }

template <class T>
T shuffle(T value, int from, bool exists = true) {
  auto* all = on_host::share({on_host::bits(value)});
  const T other =
      on_host::from_bits<T>(all[exists ? from : int(on_host::current % on_host::kWarp)][0]);
  on_host::shared_is_read();
  return other;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return shuffle(value, (on_host::current % on_host::kWarp) ^ lanes);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return shuffle(value, lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int from = int(on_host::current % on_host::kWarp) - distance;
  return shuffle(value, from, from >= 0);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  auto* all = on_host::share({uint64_t{vote}});
  unsigned votes = 0;
  for (unsigned lane = 0; lane < on_host::kWarp; ++lane) votes |= unsigned(all[lane][0]) << lane;
  on_host::shared_is_read();
  return votes;
}
inline bool __any_sync(unsigned, bool vote) { return __ballot_sync(~0u, vote) != 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  auto* all = on_host::share({uint64_t{value}});
  unsigned largest = 0;
  for (unsigned lane = 0; lane < on_host::kWarp; ++lane)
    largest = std::max(largest, unsigned(all[lane][0]));
  on_host::shared_is_read();
  return largest;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline int atomicOr(int* p, int bits) {
  const int old = *p;
  *p |= bits;
  return old;
}
inline void __threadfence() {}
inline float __int_as_float(int v) { return on_host::from_bits<float>(uint32_t(v)); }
inline float __uint_as_float(uint32_t v) { return on_host::from_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return unsigned(on_host::bits(v)); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
