// SPDX-License-Identifier: Apache-2.0
// A plain kernel as three rungs of a ladder: one block per (query row, KV
// split, request), no tensor cores, the latent row read again by every query head. It is here to be
// measured against, so it stays as simple as the idea:
//
//   partial  grid (s_q * h_q, num_splits, b), four warps: warp w takes tokens w, w + 4, ...
//            score = q . k by a shuffle sum, online softmax, value columns held per lane
//   merge    grid (s_q * h_q, b): one pass over the splits' fp32 partials
//
// VEC is the load width of the 512 latent columns in bf16 elements: 2 gives 32-bit loads, 8 gives
// 128-bit loads; the 64 rope columns are one 32-bit load a lane. Nothing else differs between the
// rungs but num_splits (16 or 64), which the caller passes.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kDimQk = 576;
constexpr int kDimV = 512;
constexpr int kWarps = 4;
constexpr float kLog2e = 1.4426950408889634f;

struct Params {
  const __nv_bfloat16* q;      // [b, s_q, h_q, 576]
  const __nv_bfloat16* kv;     // [slots, 576]
  const int* kv_indptr;        // [b + 1]
  const int64_t* kv_indices;   // prefix slots, then the s_q draft slots of each request
  const uint64_t* mask_words;  // [b, s_q, words]: bit j % 64 of word j / 64: draft key j is seen
  float* partial_out;          // [b, num_splits, s_q * h_q, 512], not normalised
  float2* partial_max_sum;     // [b, num_splits, s_q * h_q]: running max (log2 domain), sum
  __nv_bfloat16* out;          // [b, s_q, h_q, 512]
  int s_q, h_q, words, num_splits;
  float scale_log2;
};

__device__ __forceinline__ void load_pair(const __nv_bfloat16* src, float* dst) {
  const float2 f = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(src));
  dst[0] = f.x;
  dst[1] = f.y;
}

// The 18 columns of one row that a lane holds: 512 / 32 of the latent in loads of VEC, then its
// pair of the rope part.
template <int VEC>
struct LaneRow {
  static constexpr int kLoads = kDimV / VEC / 32;  // 8 or 2
  float latent[kLoads][VEC];
  float rope[2];

  static __device__ __forceinline__ int column(int lane, int j) { return (lane + 32 * j) * VEC; }

  __device__ __forceinline__ void load(const __nv_bfloat16* row, int lane) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if constexpr (VEC == 2) {
        load_pair(row + column(lane, j), latent[j]);
      } else {
        const uint4 raw = *reinterpret_cast<const uint4*>(row + column(lane, j));
        const __nv_bfloat16* elements = reinterpret_cast<const __nv_bfloat16*>(&raw);
#pragma unroll
        for (int i = 0; i < VEC; i += 2) load_pair(elements + i, latent[j] + i);
      }
    }
    load_pair(row + kDimV + 2 * lane, rope);
  }
};

template <int VEC>
__global__ void __launch_bounds__(32 * kWarps) partial_kernel(const __grid_constant__ Params p) {
  using Row = LaneRow<VEC>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row = blockIdx.x, split = blockIdx.y, b = blockIdx.z;
  const int rows = p.s_q * p.h_q, query = row / p.h_q;
  const int begin = p.kv_indptr[b], length = p.kv_indptr[b + 1] - begin, prefix = length - p.s_q;
  const int per_split = (length + p.num_splits - 1) / p.num_splits;
  const int first = split * per_split, last = min(length, first + per_split);

  Row q;
  q.load(p.q + (static_cast<int64_t>(b) * rows + row) * kDimQk, lane);
  float acc[Row::kLoads][VEC];
#pragma unroll
  for (int j = 0; j < Row::kLoads; ++j)
#pragma unroll
    for (int e = 0; e < VEC; ++e) acc[j][e] = 0.f;

  float running_max = -INFINITY, sum = 0.f;
  const uint64_t* mask_row = p.mask_words + (static_cast<int64_t>(b) * p.s_q + query) * p.words;
  for (int t = first + warp; t < last; t += kWarps) {
    if (t >= prefix && !((mask_row[(t - prefix) >> 6] >> ((t - prefix) & 63)) & 1)) continue;
    Row kv;
    kv.load(p.kv + p.kv_indices[begin + t] * kDimQk, lane);
    float dot = fmaf(q.rope[0], kv.rope[0], q.rope[1] * kv.rope[1]);
#pragma unroll
    for (int j = 0; j < Row::kLoads; ++j)
#pragma unroll
      for (int e = 0; e < VEC; ++e) dot = fmaf(q.latent[j][e], kv.latent[j][e], dot);
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, d);
    const float score = dot * p.scale_log2;
    const float new_max = fmaxf(running_max, score);
    const float rescale = exp2f(running_max - new_max), weight = exp2f(score - new_max);
    running_max = new_max;
    sum = sum * rescale + weight;
#pragma unroll
    for (int j = 0; j < Row::kLoads; ++j)
#pragma unroll
      for (int e = 0; e < VEC; ++e) acc[j][e] = fmaf(weight, kv.latent[j][e], acc[j][e] * rescale);
  }

  // Merge the four warps, then write this split's partial.
  __shared__ float warp_max[kWarps], warp_sum[kWarps], merged[kDimV];
  if (lane == 0) warp_max[warp] = running_max;
  for (int c = threadIdx.x; c < kDimV; c += 32 * kWarps) merged[c] = 0.f;
  __syncthreads();
  float block_max = warp_max[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) block_max = fmaxf(block_max, warp_max[w]);
  const float factor = running_max == -INFINITY ? 0.f : exp2f(running_max - block_max);
  if (lane == 0) warp_sum[warp] = sum * factor;
  for (int w = 0; w < kWarps; ++w) {  // one warp after the other: the sum's order is fixed
    if (warp == w) {
#pragma unroll
      for (int j = 0; j < Row::kLoads; ++j)
#pragma unroll
        for (int e = 0; e < VEC; ++e) merged[Row::column(lane, j) + e] += acc[j][e] * factor;
    }
    __syncthreads();
  }
  const int64_t slot = (static_cast<int64_t>(b) * p.num_splits + split) * rows + row;
  for (int c = threadIdx.x; c < kDimV; c += 32 * kWarps)
    p.partial_out[slot * kDimV + c] = merged[c];
  if (threadIdx.x == 0) {
    p.partial_max_sum[slot] =
        make_float2(block_max, warp_sum[0] + warp_sum[1] + warp_sum[2] + warp_sum[3]);
  }
}

__global__ void __launch_bounds__(128) merge_kernel(const __grid_constant__ Params p) {
  const int row = blockIdx.x, b = blockIdx.y, rows = p.s_q * p.h_q;
  const int64_t base = static_cast<int64_t>(b) * p.num_splits * rows + row;
  float global_max = -INFINITY;
  for (int s = 0; s < p.num_splits; ++s)
    global_max = fmaxf(global_max, p.partial_max_sum[base + static_cast<int64_t>(s) * rows].x);
  float acc[4] = {0.f, 0.f, 0.f, 0.f}, sum = 0.f;
  for (int s = 0; s < p.num_splits; ++s) {
    const int64_t slot = base + static_cast<int64_t>(s) * rows;
    const float2 max_sum = p.partial_max_sum[slot];
    if (max_sum.x == -INFINITY) continue;
    const float weight = exp2f(max_sum.x - global_max);
    sum += weight * max_sum.y;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      acc[i] = fmaf(weight, p.partial_out[slot * kDimV + threadIdx.x + 128 * i], acc[i]);
  }
  __nv_bfloat16* out = p.out + (static_cast<int64_t>(b) * rows + row) * kDimV;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[threadIdx.x + 128 * i] = __float2bfloat16(sum > 0.f ? acc[i] / sum : 0.f);
}

}  // namespace

// Returns a cudaError_t, or -1 for a load width that does not exist.
extern "C" int ladder_run(int vec, int num_splits, const void* q, const void* kv,
                          const int* kv_indptr, const int64_t* kv_indices,
                          const uint64_t* mask_words, float* partial_out, float* partial_max_sum,
                          void* out, int b, int s_q, int h_q, float sm_scale, void* stream) {
  const Params p{static_cast<const __nv_bfloat16*>(q),
                 static_cast<const __nv_bfloat16*>(kv),
                 kv_indptr,
                 kv_indices,
                 mask_words,
                 partial_out,
                 reinterpret_cast<float2*>(partial_max_sum),
                 static_cast<__nv_bfloat16*>(out),
                 s_q,
                 h_q,
                 (s_q + 63) / 64,
                 num_splits,
                 sm_scale * kLog2e};
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const dim3 grid(s_q * h_q, num_splits, b);
  if (vec == 2) {
    partial_kernel<2><<<grid, 32 * kWarps, 0, s>>>(p);
  } else if (vec == 8) {
    partial_kernel<8><<<grid, 32 * kWarps, 0, s>>>(p);
  } else {
    return -1;
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  merge_kernel<<<dim3(s_q * h_q, b), 128, 0, s>>>(p);
  return cudaGetLastError();
}
