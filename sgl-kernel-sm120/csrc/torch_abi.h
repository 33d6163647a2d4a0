// SPDX-License-Identifier: Apache-2.0
// What this library uses of torch's stable C interface (torch 2.11 and later), declared by hand, so
// that building needs neither torch nor its headers. tools/check_torch_abi.sh compiles it against a
// torch's own headers: a changed signature is then a compile error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

extern "C" {
struct AtenTensorOpaque;
struct StableListOpaque;
class TorchLibraryOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using StableListHandle = StableListOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;

int32_t aoti_torch_library_init_impl(const char* ns, const char* key, const char* file,
                                     uint32_t line, TorchLibraryHandle* out);
int32_t torch_library_impl(TorchLibraryHandle library, const char* name,
                           void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t abi);
int32_t torch_list_size(StableListHandle list, size_t* out);
int32_t torch_list_get_item(StableListHandle list, size_t index, StableIValue* out);
int32_t torch_delete_list(StableListHandle list);
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
int32_t aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** out);
int32_t aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* out);
int32_t aoti_torch_get_size(AtenTensorHandle tensor, int64_t dim, int64_t* out);
int32_t aoti_torch_get_stride(AtenTensorHandle tensor, int64_t dim, int64_t* out);
int32_t aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* out);
int32_t aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* out);
int32_t aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* out);
int32_t aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* out);
int32_t aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* out);
size_t aoti_torch_dtype_element_size(int32_t dtype);
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_bool();
// In libtorch_cuda alone: weak, null under a CPU build of torch.
__attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** out);
// torch 2.13 and later: weak, null before, where a failed call prints its reason on stderr.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace torch_abi {

constexpr uint64_t kTorch_2_11 =
    (uint64_t{2} << 56) | (uint64_t{11} << 48);  // the oldest torch this library works with

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// Calls a C function whose last argument is where its result goes.
template <class Result, class Function, class... Args>
Result get(const char* name, Function function, Args... args) {
  Result result{};
  if (function(args..., &result)) {
    const bool has_reason = torch_exception_get_what_without_backtrace != nullptr;
    const char* reason =
        has_reason ? torch_exception_get_what_without_backtrace() : "its reason is on stderr";
    fail(std::string(name) + " failed: " + (reason ? reason : "unknown"));
  }
  return result;
}
#define TORCH_ABI_GET(Result, function, ...) \
  ::torch_abi::get<Result>(#function, function, __VA_ARGS__)

// Owns one reference that the dispatcher handed over.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }

  void* data() const { return TORCH_ABI_GET(void*, aoti_torch_get_data_ptr, handle_); }
  int64_t dim() const { return TORCH_ABI_GET(int64_t, aoti_torch_get_dim, handle_); }
  int64_t size(int64_t d) const { return TORCH_ABI_GET(int64_t, aoti_torch_get_size, handle_, d); }
  int64_t stride(int64_t d) const {
    return TORCH_ABI_GET(int64_t, aoti_torch_get_stride, handle_, d);
  }
  int64_t numel() const { return TORCH_ABI_GET(int64_t, aoti_torch_get_numel, handle_); }
  int32_t dtype() const { return TORCH_ABI_GET(int32_t, aoti_torch_get_dtype, handle_); }
  int64_t element_size() const {
    return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype()));
  }
  bool is_contiguous() const { return TORCH_ABI_GET(bool, aoti_torch_is_contiguous, handle_); }
  bool is_cuda() const {
    return TORCH_ABI_GET(int32_t, aoti_torch_get_device_type, handle_) ==
           aoti_torch_device_type_cuda();
  }
  int32_t device() const { return TORCH_ABI_GET(int32_t, aoti_torch_get_device_index, handle_); }
  bool absent() const { return numel() == 0; }  // an optional tensor that was not given

 private:
  AtenTensorHandle handle_;
};
using TensorList = std::vector<Tensor>;

// One argument off the dispatcher's stack.
template <class T>
T take(StableIValue value);
template <>
inline Tensor take<Tensor>(StableIValue value) {
  return Tensor(reinterpret_cast<AtenTensorHandle>(value));
}
template <>
inline int64_t take<int64_t>(StableIValue value) {
  return static_cast<int64_t>(value);
}
template <>
inline bool take<bool>(StableIValue value) {
  return static_cast<uint8_t>(value) != 0;
}
template <>
inline double take<double>(StableIValue value) {
  double number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}
template <>
inline TensorList take<TensorList>(StableIValue value) {
  auto list = reinterpret_cast<StableListHandle>(value);
  const size_t size = TORCH_ABI_GET(size_t, torch_list_size, list);
  TensorList tensors;
  tensors.reserve(size);
  for (size_t i = 0; i < size; ++i)
    tensors.push_back(take<Tensor>(TORCH_ABI_GET(StableIValue, torch_list_get_item, list, i)));
  torch_delete_list(list);
  return tensors;
}

// Boxed<f>::call is the function that torch_library_impl wants, for void f(const Tensor&, ...,
// int64_t, double, bool).
template <auto Function>
struct Boxed;
template <class... Args, void (*Function)(Args...)>
struct Boxed<Function> {
  static void call(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
    if (num_inputs != sizeof...(Args) || num_outputs != 0)
      fail("schema and implementation of an op take different arguments");
    apply(stack, std::index_sequence_for<Args...>{});
  }

 private:
  template <size_t... I>
  static void apply(StableIValue* stack, std::index_sequence<I...>) {
    std::tuple<std::decay_t<Args>...> args{take<std::decay_t<Args>>(stack[I])...};
    Function(std::get<I>(args)...);
  }
};

}  // namespace torch_abi
