// SPDX-License-Identifier: Apache-2.0
// mla_tree_verify without torch, for tools that torch slows down or confuses: its results against
// double precision on the host (`check`), and CUDA-graph replays over many KV pools (`time`).
// verify_alone.py builds it and runs it under compute-sanitizer; verify_experiments.py reads what
// it prints.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"

namespace {
using namespace sgl_kernel_sm120;

constexpr int kDqk = 576, kDv = 512;
constexpr float kScale = 1.f / 24;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

// On the device; freed with the program.
template <class T>
T* allocate(size_t count) {
  T* p;
  CHECK(cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T)));
  return p;
}
template <class T>
T* upload(const std::vector<T>& values) {
  T* p = allocate<T>(values.size());
  CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T>
std::vector<T> download(const T* p, size_t count) {
  std::vector<T> values(count);
  CHECK(cudaMemcpy(values.data(), p, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

struct Shape {
  bool fp8;
  std::vector<int> prefixes;
  int s_q, h_q;
  int b() const { return static_cast<int>(prefixes.size()); }
  size_t rows() const { return size_t(b()) * s_q * h_q; }
};

// One call: lists of scattered slots, a random tree, everything else as the op hands it over.
struct Call {
  Shape shape;
  MlaTreeVerifyParams params{};
  std::vector<int> indptr{0}, indices;
  std::vector<uint8_t> mask;
  int num_slots;

  Call(const Shape& s, int num_sms, std::mt19937& random) : shape(s) {
    for (int prefix : s.prefixes) indptr.push_back(indptr.back() + prefix + s.s_q);
    num_slots = indptr.back() + 7;  // some belong to nobody
    std::vector<int> slots(num_slots);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), random);
    indices.assign(slots.begin(), slots.begin() + indptr.back());
    for (int i = 0; i < s.b() * s.s_q; ++i)
      for (int key = 0; key < s.s_q; ++key)
        mask.push_back(key == i % s.s_q || (key < i % s.s_q && random() % 2));
    params.kv_indptr = upload(indptr), params.kv_indices = upload(indices);
    params.tree_mask = upload(mask), params.mask_layout = MaskLayout::kQlen;
    params.b = s.b(), params.s_q = s.s_q, params.h_q = s.h_q, params.page_size = 1;
    params.num_sms = num_sms, params.num_slots = num_slots, params.num_indices = indices.size();
    params.kv_is_fp8 = s.fp8, params.kv_stride = kDqk;
    params.q_stride_h = kDqk, params.q_stride_s = kDqk * s.h_q;
    params.q_stride_b = params.q_stride_s * s.s_q;
    params.score_scale = kScale, params.v_scale = 1.f;
    params.out = allocate<__nv_bfloat16>(s.rows() * kDv);
    params.lse = allocate<float>(s.rows());
    params.status = upload(std::vector<int>{0});
    params.workspace_bytes = mla_tree_verify_workspace_bytes(s.b(), s.s_q, s.h_q, num_sms);
    params.workspace = allocate<char>(params.workspace_bytes);
    params.plan_ints = mla_tree_verify_plan_ints(s.b(), s.s_q, s.h_q, num_sms);
    params.plan = allocate<int>(params.plan_ints);
  }

  void plan(cudaStream_t stream) const {
    MlaTreeVerifyPlanParams p{};
    p.kv_indptr = params.kv_indptr, p.plan = const_cast<int*>(params.plan);
    p.num_indices = params.num_indices, p.plan_ints = params.plan_ints;
    p.b = params.b, p.s_q = params.s_q, p.h_q = params.h_q, p.num_sms = params.num_sms;
    CHECK(mla_tree_verify_plan(p, stream));
  }
};

float round_to(float v, bool fp8) {
  return fp8 ? float(__nv_fp8_e4m3(v)) : __bfloat162float(__float2bfloat16(v));
}

// Host values of the cache, as the device holds them; slots of nobody are NaN.
std::vector<float> make_rows(const Call& call, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(size_t(call.num_slots) * kDqk, NAN);
  for (int slot : call.indices)
    for (int c = 0; c < kDqk; ++c)
      rows[size_t(slot) * kDqk + c] = round_to(normal(random), call.shape.fp8);
  return rows;
}

void* upload_rows(const std::vector<float>& rows, bool fp8) {
  if (fp8) {
    std::vector<__nv_fp8_e4m3> values(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) values[i] = __nv_fp8_e4m3(rows[i]);
    return upload(values);
  }
  std::vector<__nv_bfloat16> values(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) values[i] = __float2bfloat16(rows[i]);
  return upload(values);
}

// Relative error of the whole result against double precision.
double compare(const Call& call, const std::vector<float>& rows, const std::vector<float>& q,
               const std::vector<__nv_bfloat16>& out) {
  const Shape& s = call.shape;
  double error = 0, norm = 0;
  for (size_t row = 0; row < s.rows(); ++row) {
    const int request = row / (s.s_q * s.h_q), position = row / s.h_q % s.s_q,
              tokens = call.indptr[request + 1] - call.indptr[request], prefix = tokens - s.s_q;
    std::vector<double> o(kDv);
    double top = -INFINITY, sum = 0;
    std::vector<double> scores;
    std::vector<const float*> keys;
    for (int i = 0; i < tokens; ++i) {
      if (i >= prefix && !call.mask[(request * s.s_q + position) * s.s_q + i - prefix]) continue;
      keys.push_back(&rows[size_t(call.indices[call.indptr[request] + i]) * kDqk]);
      double score = 0;
      for (int c = 0; c < kDqk; ++c) score += double(q[row * kDqk + c]) * keys.back()[c];
      scores.push_back(score * kScale);
      top = std::max(top, scores.back());
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      const double weight = std::exp(scores[i] - top);
      sum += weight;
      for (int c = 0; c < kDv; ++c) o[c] += weight * keys[i][c];
    }
    for (int c = 0; c < kDv; ++c) {
      const double want = o[c] / sum, difference = __bfloat162float(out[row * kDv + c]) - want;
      error += difference * difference, norm += want * want;
    }
  }
  return std::sqrt(error / norm);
}

bool check_shape(const Shape& shape, int num_sms, int repeats) {
  std::mt19937 random(shape.rows() + num_sms);
  Call call(shape, num_sms, random);
  const std::vector<float> rows = make_rows(call, random);
  std::vector<float> q(shape.rows() * kDqk);
  std::normal_distribution<float> normal;
  for (float& v : q) v = round_to(2 * normal(random), false);
  call.params.q = upload_rows(q, false), call.params.kv_cache = upload_rows(rows, shape.fp8);
  std::vector<__nv_bfloat16> first;
  int differ = 0;
  for (int i = 0; i < repeats; ++i) {
    if (i < 2) call.plan(nullptr);  // the others share the second one, as layers do
    CHECK(cudaMemset(call.params.out, 0xff, shape.rows() * kDv * 2));
    CHECK(mla_tree_verify(call.params, nullptr));
    CHECK(cudaDeviceSynchronize());
    auto out = download(static_cast<__nv_bfloat16*>(call.params.out), shape.rows() * kDv);
    if (i == 0)
      first = std::move(out);
    else
      differ += std::memcmp(first.data(), out.data(), out.size() * 2) != 0;
  }
  const double error = compare(call, rows, q, first);
  const int status = download(call.params.status, 1)[0];
  const bool good = error < 4e-3 && differ == 0 && status == 0;
  std::string prefixes;
  for (int p : shape.prefixes) prefixes += (prefixes.empty() ? "" : ",") + std::to_string(p);
  std::printf(
      "check %s bs %d q %d h %d prefixes %s sms %d status %d: rel %.2e repeats that differ %d %s\n",
      shape.fp8 ? "fp8" : "bf16", shape.b(), shape.s_q, shape.h_q, prefixes.c_str(), num_sms,
      status, error, differ, good ? "ok" : "WRONG");
  std::fflush(stdout);
  return good;
}

// One request on the whole GPU, and five on as few SMs as give a block several segments and a
// request several blocks. Rows: 8, 24, 40 and 72.
int run_checks(const std::string& kv, int repeats, bool long_too, int sms) {
  bool good = true;
  for (bool fp8 : {false, true}) {
    if ((kv == "bf16" && fp8) || (kv == "fp8" && !fp8)) continue;
    for (int s_q : {1, 3, 5, 9}) {
      good &= check_shape({fp8, {60}, s_q, 8}, sms, repeats);
      good &= check_shape({fp8, {5, 130, 20, 33, 90}, s_q, 8}, 4, repeats);
    }
    if (!long_too) continue;
    for (int s_q : {9, 33}) {
      good &= check_shape({fp8, {1024}, s_q, 8}, sms, repeats);
      good &= check_shape({fp8, {4096, 200, 17, 1024, 1, 300}, s_q, 8}, sms, repeats);
    }
  }
  return good ? 0 : 1;
}

__global__ void fill(uint32_t* words, size_t count, bool fp8) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 29, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 32;
    // Any sign and fraction, sizes of 1/2 to 2.
    const uint32_t bits = static_cast<uint32_t>(x);
    words[i] = fp8 ? (bits & 0x8f8f8f8fu) | 0x30303030u : (bits & 0x80ff80ffu) | 0x3f003f00u;
  }
}

void time_shape(const Shape& shape, int num_sms, int turns, cudaStream_t stream) {
  std::mt19937 random(1);
  Call call(shape, num_sms, random);
  const size_t layer_bytes = size_t(call.num_slots) * kDqk * (shape.fp8 ? 1 : 2);
  const int layers =
      static_cast<int>(std::clamp<size_t>(size_t(1750) * 1000000 / layer_bytes, 4, 64));
  std::vector<void*> pools;
  for (int i = 0; i < layers; ++i) {
    pools.push_back(allocate<char>(layer_bytes));
    fill<<<1024, 256, 0, stream>>>(static_cast<uint32_t*>(pools[i]), layer_bytes / 4, shape.fp8);
  }
  auto* q = allocate<uint32_t>(shape.rows() * kDqk / 2);
  fill<<<64, 256, 0, stream>>>(q, shape.rows() * kDqk / 2, false);
  call.params.q = q;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  call.plan(stream);
  for (void* pool : pools) {
    call.params.kv_cache = pool;
    CHECK(mla_tree_verify(call.params, stream));
  }
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  std::vector<float> us;
  for (int i = 0; i < turns + 3; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(replay, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) us.push_back(ms * 1000 / layers);
  }
  std::sort(us.begin(), us.end());
  std::printf("time %-4s bs %d q %d h %d prefix %6d: %7.2f us (min %.2f, %d layers)\n",
              shape.fp8 ? "fp8" : "bf16", shape.b(), shape.s_q, shape.h_q, shape.prefixes[0],
              us[us.size() / 2], us[0], layers);
  std::fflush(stdout);
  CHECK(cudaGraphExecDestroy(replay)), CHECK(cudaGraphDestroy(graph));
  for (void* pool : pools) CHECK(cudaFree(pool));
}

void run_times(const std::string& kv, const std::string& which, int num_sms) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (bool fp8 : {false, true}) {
    if ((kv == "bf16" && fp8) || (kv == "fp8" && !fp8)) continue;
    for (int prefix : {200, 1024, 4096, 16384})
      time_shape({fp8, {prefix}, 9, 8}, num_sms, 25, stream);
    if (which == "small") continue;
    for (int prefix : {65536, 189440}) time_shape({fp8, {prefix}, 9, 8}, num_sms, 15, stream);
    time_shape({fp8, {189440}, 33, 8}, num_sms, 7, stream);
    time_shape({fp8, {189440, 1024, 1024, 1024, 1024, 1024, 1024, 1024}, 9, 8}, num_sms, 15,
               stream);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc == 4 ? argv[1] : "", kv = argc == 4 ? argv[2] : "",
                    which = argc == 4 ? argv[3] : "";
  const bool known_kv = kv == "bf16" || kv == "fp8" || kv == "both",
             known_which = which == "small" || which == "all";
  if ((what != "check" && what != "time") || !known_kv || !known_which) {
    std::fprintf(stderr, "usage: %s check|time bf16|fp8|both small|all\n", argv[0]);
    return 2;
  }
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  if (what == "check") return run_checks(kv, which == "small" ? 2 : 10, which == "all", sms);
  run_times(kv, which, sms);
  return 0;
}
