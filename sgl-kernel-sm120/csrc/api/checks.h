// SPDX-License-Identifier: Apache-2.0
// Argument checks. An api function makes them in this order: arch, ndim, sizes bound to names,
// limits, device, dtype, shape, strides. A message reads "op: tensor: expected X, got Y; remedy",
// as in python/sgl_kernel_sm120/_check.py. Each macro takes the op's name from a local `kOp`.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <initializer_list>
#include <sstream>
#include <string>

#include "torch_abi.h"

#define CHECK_ARCH(tensor) ::sgl_kernel_sm120::check_arch(kOp, #tensor, tensor)
#define CHECK_NDIM(tensor, ndim, layout) \
  ::sgl_kernel_sm120::check_ndim(kOp, #tensor, tensor, ndim, layout)
#define CHECK_RANGE(value, low, high) ::sgl_kernel_sm120::check_range(kOp, #value, value, low, high)
#define CHECK_DEVICE(tensor, device) ::sgl_kernel_sm120::check_device(kOp, #tensor, tensor, device)
#define CHECK_DTYPE(tensor, ...) \
  ::sgl_kernel_sm120::check_dtype(kOp, #tensor, tensor, {__VA_ARGS__})
#define CHECK_SHAPE(tensor, layout, ...) \
  ::sgl_kernel_sm120::check_shape(kOp, #tensor, tensor, layout, {__VA_ARGS__})
#define CHECK_ROW_MAJOR(tensor) ::sgl_kernel_sm120::check_row_major(kOp, #tensor, tensor)
#define CHECK_CONTIGUOUS(tensor) ::sgl_kernel_sm120::check_contiguous(kOp, #tensor, tensor)
#define CHECK_BYTES(tensor, bytes, remedy) \
  ::sgl_kernel_sm120::check_bytes(kOp, #tensor, tensor, bytes, remedy)
#define CHECK_ALIGNED(tensor, bytes) ::sgl_kernel_sm120::check_aligned(kOp, #tensor, tensor, bytes)
#define CHECK_LAUNCH(error) ::sgl_kernel_sm120::check_launch(kOp, error)

#ifndef SGL_KERNEL_SM120_ARCHS
#error "SGL_KERNEL_SM120_ARCHS: tools/kernel_build.py passes the list of architectures"
#endif

namespace sgl_kernel_sm120 {

using torch_abi::Tensor;
using torch_abi::TensorList;

struct Dtype {
  int32_t code;
  const char* name;
};
inline Dtype bf16() { return {aoti_torch_dtype_bfloat16(), "bfloat16"}; }
inline Dtype fp32() { return {aoti_torch_dtype_float32(), "float32"}; }
inline Dtype fp8_e4m3fn() { return {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"}; }
inline Dtype i32() { return {aoti_torch_dtype_int32(), "int32"}; }
inline Dtype i64() { return {aoti_torch_dtype_int64(), "int64"}; }
inline Dtype u8() { return {aoti_torch_dtype_uint8(), "uint8"}; }
inline Dtype boolean() { return {aoti_torch_dtype_bool(), "bool"}; }

inline std::string numbers(int64_t count, int64_t (*at)(const void*, int64_t), const void* of) {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(at(of, i));
  return text + "]";
}
inline std::string sizes(const Tensor& t) {
  return numbers(
      t.dim(), [](const void* p, int64_t i) { return static_cast<const Tensor*>(p)->size(i); }, &t);
}
inline std::string strides(const Tensor& t) {
  return numbers(
      t.dim(), [](const void* p, int64_t i) { return static_cast<const Tensor*>(p)->stride(i); },
      &t);
}
inline std::string describe(const Tensor& t) {
  const int32_t code = t.dtype();
  std::string dtype = "dtype code " + std::to_string(code);
  for (const Dtype& known : {bf16(), fp32(), fp8_e4m3fn(), i32(), i64(), u8(), boolean()})
    if (known.code == code) dtype = known.name;
  return dtype + " " + sizes(t) +
         (t.is_cuda() ? " on cuda:" + std::to_string(t.device()) : " not on a CUDA device");
}

[[noreturn]] inline void reject(const char* op, const std::string& name,
                                const std::string& expected, const std::string& got,
                                const std::string& remedy = "") {
  torch_abi::fail(std::string(op) + ": " + name + ": expected " + expected + ", got " + got +
                  (remedy.empty() ? "" : "; " + remedy));
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  if (cudaError_t error = cudaDeviceGetAttribute(&value, attribute, device); error != cudaSuccess)
    torch_abi::fail(std::string("cudaDeviceGetAttribute: ") + cudaGetErrorString(error));
  return value;
}

// Plain code such as "80" runs on every later minor version; a code ending in "a" on its own
// version alone.
inline bool runs_on(const std::string& arch, int major, int minor) {
  // By hand: strtol, which std::stoi calls, is a symbol of glibc 2.38 where its headers are newer.
  int number = 0;
  for (const char c : arch) number = c >= '0' && c <= '9' ? 10 * number + (c - '0') : number;
  const bool exact = arch.back() == 'a';
  return number / 10 == major && (exact ? number % 10 == minor : number % 10 <= minor);
}

inline void check_arch(const char* op, const char* name, const Tensor& t) {
  if (!t.is_cuda()) reject(op, name, "a CUDA tensor", describe(t));
  if (!aoti_torch_get_current_cuda_stream)
    torch_abi::fail(std::string(op) +
                    ": this torch has no CUDA support; install a CUDA build of torch");
  static std::atomic<uint64_t> supported{0};  // one bit a device that passed
  const uint64_t bit = t.device() < 64 ? uint64_t{1} << t.device() : 0;
  if (supported.load(std::memory_order_relaxed) & bit) return;
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor, t.device());
  const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor, t.device());
  std::istringstream archs(SGL_KERNEL_SM120_ARCHS);
  bool found = false;
  for (std::string arch; archs >> arch;) found = found || runs_on(arch, major, minor);
  if (!found)
    reject(op, name, "a GPU of the architectures " SGL_KERNEL_SM120_ARCHS,
           "sm_" + std::to_string(major * 10 + minor), "rebuild with SGL_KERNEL_SM120_ARCHS");
  supported.fetch_or(bit, std::memory_order_relaxed);
}

inline void check_ndim(const char* op, const char* name, const Tensor& t, int64_t ndim,
                       const char* layout) {
  if (t.dim() != ndim)
    reject(op, name, std::to_string(ndim) + " dimensions " + layout, describe(t));
}

inline void check_range(const char* op, const char* name, int64_t value, int64_t low,
                        int64_t high) {
  if (value < low || value > high)
    reject(op, name, std::to_string(low) + ".." + std::to_string(high), std::to_string(value));
}

inline void check_device(const char* op, const char* name, const Tensor& t, int32_t device) {
  if (!t.is_cuda() || t.device() != device)
    reject(op, name, "a tensor on cuda:" + std::to_string(device), describe(t),
           "move it with .to('cuda:" + std::to_string(device) + "')");
}

inline void check_dtype(const char* op, const char* name, const Tensor& t,
                        std::initializer_list<Dtype> allowed) {
  std::string names;
  for (const Dtype& dtype : allowed) {
    if (dtype.code == t.dtype()) return;
    names += (names.empty() ? "" : " or ") + std::string(dtype.name);
  }
  reject(op, name, names, describe(t));
}

inline void check_shape(const char* op, const char* name, const Tensor& t, const char* layout,
                        std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  std::string text;
  int64_t d = 0;
  for (int64_t size : shape) {
    text += (d ? ", " : "") + std::to_string(size);
    same = same && t.size(d) == size;
    ++d;
  }
  if (!same) reject(op, name, std::string(layout) + " = [" + text + "]", describe(t));
}

inline void check_row_major(const char* op, const char* name, const Tensor& t) {
  const int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1)
    reject(op, name, "stride 1 in the last dimension", "strides " + strides(t),
           "call .contiguous()");
}

inline void check_contiguous(const char* op, const char* name, const Tensor& t) {
  if (!t.is_contiguous())
    reject(op, name, "a contiguous tensor", "strides " + strides(t), "call .contiguous()");
}

inline void check_bytes(const char* op, const char* name, const Tensor& t, int64_t bytes,
                        const char* remedy) {
  const int64_t got = t.numel() * t.element_size();
  if (got < bytes)
    reject(op, name, "at least " + std::to_string(bytes) + " bytes", std::to_string(got), remedy);
}

inline void check_aligned(const char* op, const char* name, const Tensor& t, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(t.data()) % bytes)
    reject(op, name, "an address that is a multiple of " + std::to_string(bytes), "another",
           "do not slice inside a row");
}

inline void check_launch(const char* op, cudaError_t error) {
  if (error != cudaSuccess)
    torch_abi::fail(std::string(op) + ": launch failed: " + cudaGetErrorString(error));
}

// Makes a device current for a launch, and the previous one afterwards.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaGetDevice(&previous_);
    if (previous_ != device) cudaSetDevice(device);
    changed_ = previous_ != device;
  }
  DeviceGuard(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

inline cudaStream_t current_stream(int32_t device) {
  return static_cast<cudaStream_t>(
      TORCH_ABI_GET(void*, aoti_torch_get_current_cuda_stream, device));
}

template <class T>
T* pointer(const Tensor& t) {
  return static_cast<T*>(t.data());
}
template <class T>
T* pointer_or_null(const Tensor& t) {
  return t.absent() ? nullptr : pointer<T>(t);
}

}  // namespace sgl_kernel_sm120
