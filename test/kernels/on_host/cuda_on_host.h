// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run a kernel's source on the CPU: every thread of a block is a fiber, blocks
// run one after another. A barrier that some threads never reach is reported as a deadlock. It
// shows wrong results, not races or speed.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time

struct dim3 {
  unsigned x, y = 1, z = 1;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline dim3 threadIdx{0}, blockIdx{0}, gridDim{0}, blockDim{0};

namespace on_host {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 32 * 1024;
enum class State { kRunnable, kAtWarpBarrier, kAtBlockBarrier, kDone };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStackBytes);
  State state;
};

inline std::vector<Fiber>* fibers = nullptr;
inline ucontext_t scheduler;
inline unsigned current = 0;
inline const std::function<void()>* body = nullptr;
inline uint64_t exchange[1024];  // one slot a thread, for shuffles and ballots

inline void enter() {
  (*body)();
  (*fibers)[current].state = State::kDone;
  swapcontext(&(*fibers)[current].context, &scheduler);
}

inline void wait(State state) {
  (*fibers)[current].state = state;
  swapcontext(&(*fibers)[current].context, &scheduler);
}

// Lets [begin, end) go on if all of its living threads wait at `barrier`.
inline bool release(size_t begin, size_t end, State barrier) {
  bool any = false;
  for (size_t i = begin; i < end; ++i) {
    if ((*fibers)[i].state == State::kDone) continue;
    if ((*fibers)[i].state != barrier) return false;
    any = true;
  }
  for (size_t i = begin; i < end; ++i)
    if ((*fibers)[i].state == barrier) (*fibers)[i].state = State::kRunnable;
  return any;
}

inline void run_block(unsigned threads, const std::function<void()>& kernel) {
  static std::vector<Fiber> all;  // the stacks serve block after block
  all.resize(threads);
  fibers = &all;
  body = &kernel;
  for (Fiber& fiber : all) {
    fiber.state = State::kRunnable;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (true) {
    bool ran = false, alive = false;
    for (current = 0; current < threads; ++current) {
      if (all[current].state != State::kRunnable) continue;
      threadIdx.x = current;
      swapcontext(&scheduler, &all[current].context);
      ran = true;
    }
    for (const Fiber& fiber : all) alive = alive || fiber.state != State::kDone;
    if (!alive) return;
    if (ran) continue;
    bool released = false;
    for (size_t warp = 0; warp < threads; warp += kWarp)
      released =
          release(warp, std::min<size_t>(warp + kWarp, threads), State::kAtWarpBarrier) || released;
    if (!released) released = release(0, threads, State::kAtBlockBarrier);
    if (!released) {
      std::fprintf(stderr, "deadlock: some threads wait at a barrier that others never reach\n");
      std::abort();
    }
  }
}

template <class Kernel>
void launch(dim3 grid, unsigned threads, const Kernel& kernel) {
  gridDim = grid, blockDim = {threads};
  for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(threads, kernel);
  blockIdx = {0};
}

}  // namespace on_host

inline void __syncthreads() { on_host::wait(on_host::State::kAtBlockBarrier); }
inline int __syncthreads_count(bool vote) {
  on_host::exchange[on_host::current] = vote;
  __syncthreads();
  int count = 0;
  for (size_t thread = 0; thread < on_host::fibers->size(); ++thread)
    count += int(on_host::exchange[thread]);
  __syncthreads();
  return count;
}
inline int __syncthreads_or(bool vote) { return __syncthreads_count(vote) != 0; }
inline void __syncwarp() { on_host::wait(on_host::State::kAtWarpBarrier); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  const unsigned me = on_host::current;
  std::memcpy(&on_host::exchange[me], &value, sizeof value);
  __syncwarp();
  T other;
  std::memcpy(&other, &on_host::exchange[me ^ lanes], sizeof other);
  __syncwarp();
  return other;
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  const unsigned me = on_host::current, first = me / on_host::kWarp * on_host::kWarp;
  std::memcpy(&on_host::exchange[me], &value, sizeof value);
  __syncwarp();
  T other;
  std::memcpy(&other, &on_host::exchange[first + lane], sizeof other);
  __syncwarp();
  return other;
}

template <class T>
T __shfl_up_sync(unsigned, T value, int lanes) {
  const unsigned me = on_host::current, lane = me % on_host::kWarp;
  std::memcpy(&on_host::exchange[me], &value, sizeof value);
  __syncwarp();
  T other;
  std::memcpy(&other, &on_host::exchange[lane < unsigned(lanes) ? me : me - lanes], sizeof other);
  __syncwarp();
  return other;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const unsigned me = on_host::current, first = me / on_host::kWarp * on_host::kWarp;
  on_host::exchange[me] = value;
  __syncwarp();
  unsigned largest = 0;
  for (int lane = 0; lane < on_host::kWarp; ++lane)
    largest = std::max(largest, unsigned(on_host::exchange[first + lane]));
  __syncwarp();
  return largest;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline int __float_as_int(float value) { return int(__float_as_uint(value)); }

inline unsigned __ballot_sync(unsigned, bool vote) {
  const unsigned me = on_host::current, first = me / on_host::kWarp * on_host::kWarp;
  on_host::exchange[me] = vote;
  __syncwarp();
  unsigned votes = 0;
  for (int lane = 0; lane < on_host::kWarp; ++lane)
    votes |= unsigned(on_host::exchange[first + lane]) << lane;
  __syncwarp();
  return votes;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int atomicAdd(int* to, int value) {  // a fiber stops only at barriers
  const int before = *to;
  *to += value;
  return before;
}
using std::max;
using std::min;
