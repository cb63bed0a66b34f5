// C functions of the ops that bodies call, as the C++ that Inductor writes calls them: by their names, without torch's
// dispatcher, which takes longer than some of them. speccompile/ops/cpu/shims.py declares them.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/stable/library.h>

#include <array>
#include <cstdarg>
#include <optional>
#include <vector>

#include "recorded.h"
#include "tensors.h"

#define SHIM extern "C" __attribute__((visibility("default"))) AOTITorchError

namespace speccompile {

using Handle = AtenTensorHandle;

// Handles that come in are the caller's.
inline Tensor shared(Handle handle) {
  Handle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &own));
  return Tensor(own);
}

inline std::vector<Tensor> shared(const Handle* handles, int64_t count) {
  std::vector<Tensor> made;
  made.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    made.push_back(shared(handles[i]));
  }
  return made;
}

inline std::optional<Tensor> shared_if(const Handle* handle) {
  return handle ? std::optional<Tensor>(shared(*handle)) : std::nullopt;
}

template <typename T>
std::optional<T> value_if(const T* value) {
  return value ? std::optional<T>(*value) : std::nullopt;
}

inline Handle handed_over(const Tensor& tensor) {
  Handle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor.get(), &own));
  return own;
}

// Every op has to be seen: the check of a captured graph, which rounds no inputs.
inline bool are_watched() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set();
}

template <typename Result, typename... Arguments>
Result dispatched(const char* name, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Result>(stack[0]);
}

// After the arguments of ops with as many results as there are weights stands where each one goes.
inline void hand_over(const std::vector<Tensor>& made, va_list out) {
  for (const Tensor& tensor : made) {
    *va_arg(out, Handle*) = handed_over(tensor);
  }
}

}  // namespace speccompile
