// A tensor of the caller's, without a count of its uses. An op has thirteen of them or so: to count the uses of each takes
// about as long as the op itself where no row has an adapter.
#pragma once

#include <functional>
#include <numeric>
#include <vector>

#include "../base/ops/shims.h"

namespace speccompile {

class View {
 public:
  explicit View(Handle handle) : handle_(handle) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &dtype_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle, &is_contiguous_));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data_));
  }

  Handle get() const { return handle_; }
  int64_t dim() const { return dim_; }
  // Of the last dimension for -1.
  int64_t size(int64_t i) const { return sizes_[i < 0 ? dim_ + i : i]; }
  int64_t numel() const { return std::accumulate(sizes_, sizes_ + dim_, int64_t{1}, std::multiplies<int64_t>()); }
  int32_t dtype() const { return dtype_; }
  bool is_contiguous() const { return is_contiguous_; }
  void* data() const { return data_; }

  // A tensor of the same sizes, strides and dtype.
  Tensor new_like() const {
    int64_t* strides;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle_, &strides));
    Handle made;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dim_, sizes_, strides, dtype_, aoti_torch_device_type_cpu(), 0, &made));
    return Tensor(made);
  }

 private:
  Handle handle_;
  int64_t dim_;
  int64_t* sizes_;
  int32_t dtype_;
  bool is_contiguous_;
  void* data_;
};

inline std::vector<View> views(const Handle* handles, int64_t count) {
  return {handles, handles + count};
}

inline std::vector<View> views(const std::vector<Tensor>& tensors) {
  std::vector<View> made;
  for (const Tensor& tensor : tensors) {
    made.emplace_back(tensor.get());
  }
  return made;
}

// `view`, or a copy of it in order, which `kept` then holds.
inline View side_by_side(const View& view, std::vector<Tensor>& kept) {
  if (view.is_contiguous()) {
    return view;
  }
  kept.push_back(torch::stable::contiguous(shared(view.get())));
  return View(kept.back().get());
}

inline Type type_of(const View& view) {
  static const int32_t single = aoti_torch_dtype_float32(), brain = aoti_torch_dtype_bfloat16(),
                       half = aoti_torch_dtype_float16();
  STD_TORCH_CHECK(
      view.dtype() == single || view.dtype() == brain || view.dtype() == half,
      "speccompile's CPU ops take float32, bfloat16 and float16");
  return view.dtype() == single ? Type::Float : view.dtype() == brain ? Type::BFloat16 : Type::Half;
}

}  // namespace speccompile
