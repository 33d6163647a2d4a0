// SPDX-License-Identifier: Apache-2.0
// buffer[tgt[i]] = old buffer[src[i]] for all i at once, in every buffer (one a layer).
//
// Columns of a row never mix, so a block takes a piece of the columns of one buffer for all rows:
// it reads every source into shared memory, waits, then writes every target. No other block touches
// those columns, so any overlap of tgt and src is safe in one launch, without a scratch buffer or a
// grid-wide barrier.
//
// Most pairs of accepted paths stay where they are, so a block first lists those that move, and its
// pieces are as wide as the list leaves room for. A list that does not fit is not used: then all n
// pairs take room, and a piece is narrow.
//
//   grid  blocks take pieces in turns: as many blocks as a GPU holds at once, or one a piece
//   smem  [listed] pairs of slots, then [listed][piece] bytes; or [n][piece] bytes
#pragma once
#include "common/dynamic_smem.cuh"
#include "kv_move_all_layers/config.h"
#include "params.h"

namespace sgl_kernel_sm120 {

namespace kv_move_config {

template <int Granule>
struct Word;
template <>
struct Word<16> {
  using Type = uint4;
  static constexpr int kLog2 = 4;
};
template <>
struct Word<4> {
  using Type = uint32_t;
  static constexpr int kLog2 = 2;
};
template <>
struct Word<1> {
  using Type = uint8_t;
  static constexpr int kLog2 = 0;
};

// A pair with a negative index is padding. One beyond the buffer is skipped too: a wrong index may
// never become a wrong access.
struct Pair {
  int32_t src, tgt;

  __device__ __forceinline__ bool moves(int32_t num_slots) const {
    return src >= 0 && max(src, tgt) < num_slots;
  }
};

struct AllPairs {
  const int64_t *src, *tgt;

  __device__ __forceinline__ Pair operator()(int i) const {
    const int64_t from = src[i], to = tgt[i];
    const bool moves = from != to && from >= 0 && to >= 0 && from <= INT32_MAX && to <= INT32_MAX;
    return moves ? Pair{int32_t(from), int32_t(to)} : Pair{-1, -1};
  }
};

struct ListedPairs {
  const Pair* sPairs;

  __device__ __forceinline__ Pair operator()(int i) const { return sPairs[i]; }
};

// Lists the pairs that move, as many as fit, and returns how many there are. Their order is the one
// that warps arrive in: it decides where in shared memory a row waits, not what is written.
__device__ __forceinline__ int list_pairs(const AllPairs& all, int n, Pair* sPairs, int capacity) {
  constexpr unsigned kAll = 0xffffffffu;
  __shared__ int sCount;
  if (threadIdx.x == 0) sCount = 0;
  __syncthreads();
  const int threads = blockDim.x, lane = threadIdx.x % 32;
  for (int first = 0; first < n; first += threads * kLoads) {
    Pair pairs[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = first + u * threads + int(threadIdx.x);
      pairs[u] = {-1, -1};
      if (i < n) pairs[u] = all(i);
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (first + u * threads >= n) break;
      const unsigned moving = __ballot_sync(kAll, pairs[u].src >= 0);
      int at = lane == 0 && moving ? atomicAdd(&sCount, __popc(moving)) : 0;
      at = __shfl_sync(kAll, at, 0) + __popc(moving & ((1u << lane) - 1));
      if (pairs[u].src >= 0 && at < capacity) sPairs[at] = pairs[u];
    }
  }
  __syncthreads();
  return sCount;
}

// Moves this block's pieces. `smem` has room for `rows` pieces of a granule at least.
template <int Granule, class Pairs>
__device__ __forceinline__ void move_pieces(const KvMoveParams& params, int longest_row,
                                            const Pairs& pairs, int rows, unsigned char* smem,
                                            int bytes) {
  using Word = typename kv_move_config::Word<Granule>::Type;
  constexpr int kLog2 = kv_move_config::Word<Granule>::kLog2;
  Word* sRows = reinterpret_cast<Word*>(smem);
  const int log2 = log2_piece(rows, bytes, kLog2), log2_words = log2 - kLog2;
  const int words = 1 << log2_words, total = rows << log2_words;
  const int threads = blockDim.x, pieces = ((longest_row - 1) >> log2) + 1;

  for (int64_t unit = blockIdx.x; unit < int64_t{pieces} * params.num_buffers; unit += gridDim.x) {
    const KvMoveParams::Buffer& buffer = params.buffers[unit / pieces];
    const uint32_t column = uint32_t(unit % pieces) << log2, row_bytes = buffer.row_bytes;
    if (column >= row_bytes) continue;

    // Read every source.
    for (int first = 0; first < total; first += threads * kLoads) {
      Word read[kLoads] = {};
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int at = first + u * threads + int(threadIdx.x);
        const uint32_t byte = column + (at & (words - 1)) * Granule;
        if (at < total && byte < row_bytes) {
          const Pair pair = pairs(at >> log2_words);
          if (pair.moves(buffer.num_slots))
            read[u] =
                *reinterpret_cast<const Word*>(buffer.base + pair.src * buffer.row_stride + byte);
        }
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int at = first + u * threads + int(threadIdx.x);
        if (at < total) sRows[at] = read[u];
      }
    }
    __syncthreads();

    // Write every target.
#pragma unroll 4
    for (int at = threadIdx.x; at < total; at += threads) {
      const uint32_t byte = column + (at & (words - 1)) * Granule;
      if (byte < row_bytes) {
        const Pair pair = pairs(at >> log2_words);
        if (pair.moves(buffer.num_slots))
          *reinterpret_cast<Word*>(buffer.base + pair.tgt * buffer.row_stride + byte) = sRows[at];
      }
    }
    __syncthreads();
  }
}

}  // namespace kv_move_config

template <int Granule>
__global__ void __launch_bounds__(kv_move_config::kMaxThreads, 2)
    kv_move_kernel(const __grid_constant__ KvMoveParams params, int longest_row) {
  using namespace kv_move_config;
  const AllPairs all{params.src, params.tgt};
  unsigned char* smem = dynamic_smem();
  Pair* sPairs = reinterpret_cast<Pair*>(smem);

  const int count = list_pairs(all, params.n, sPairs, max_listed(Granule));
  if (count == 0) return;
  const int bytes = smem_bytes(params.n);
  if (count <= max_listed(Granule)) {
    const int listed = (count * kPairBytes + 15) / 16 * 16;
    move_pieces<Granule>(params, longest_row, ListedPairs{sPairs}, count, smem + listed,
                         bytes - listed);
    return;
  }
  __syncthreads();  // all have seen the count
  if (Granule >= 16 && params.n <= max_rows(16))
    move_pieces<Granule>(params, longest_row, all, params.n, smem, bytes);
  else if (Granule >= 4 && params.n <= max_rows(4))
    move_pieces<(Granule < 4 ? Granule : 4)>(params, longest_row, all, params.n, smem, bytes);
  else
    move_pieces<1>(params, longest_row, all, params.n, smem, bytes);
}

}  // namespace sgl_kernel_sm120
