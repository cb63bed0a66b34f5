// The input and the output of a linear, row by row: a row has the same bits whatever is computed beside it.
#include "linear_ends.h"

#include "vectors.h"

#include <cmath>

namespace speccompile {
namespace {

template <typename T>
float mean_square(const T* x, int64_t depth) {
  // Four sums, so that an addition need not wait for the one before it.
  Vec sums[4] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
  int next = 0;
  by_vectors(depth, [&](int64_t i, int64_t count) {
    const Vec values = load(x + i, count);
    sums[next] = at::vec::fmadd(values, values, sums[next]);
    next = (next + 1) % 4;
  });
  const Vec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum) / static_cast<float>(depth);
}

Vec activated(Activation activation, const Vec& x) {
  const Vec one(1.0f), half(0.5f);
  switch (activation) {
    case Activation::Silu:
      return x / (one + x.neg().exp());
    case Activation::Gelu:
      return half * x * (one + (x * Vec(0.70710678118654752440f)).erf());
    case Activation::GeluTanh: {
      const Vec cubic = x + Vec(0.044715f) * x * x * x;
      return half * x * (one + (Vec(0.79788456080286535588f) * cubic).tanh());
    }
    case Activation::None:
      return x;
  }
  return x;
}

template <typename T>
void input_row(const LinearInput& input, int64_t row, float* to) {
  const int64_t depth = input.depth;
  const T* const x = static_cast<const T*>(input.x) + row * depth;
  if (input.norm) {
    const T* const weight = static_cast<const T*>(input.norm);
    fetch_lines(weight, depth * static_cast<int64_t>(sizeof(T)));
    const Vec factor(1.0f / std::sqrt(mean_square(x, depth) + input.eps));
    if (input.offset == 0) {
      by_vectors(depth, [&](int64_t i, int64_t count) {
        const Vec scaled = rounded<T>(load(x + i, count) * factor);
        store(rounded<T>(load(weight + i, count) * scaled), to + i, count);
      });
    } else {
      const Vec offset(input.offset);
      by_vectors(depth, [&](int64_t i, int64_t count) {
        store(rounded<T>(load(x + i, count) * factor * (offset + load(weight + i, count))), to + i, count);
      });
    }
  } else if (input.gate) {
    const T* const gate = static_cast<const T*>(input.gate) + row * depth;
    by_vectors(depth, [&](int64_t i, int64_t count) {
      const Vec opened = rounded<T>(activated(input.activation, load(gate + i, count)));
      store(rounded<T>(opened * load(x + i, count)), to + i, count);
    });
  } else {
    by_vectors(depth, [&](int64_t i, int64_t count) { store(load(x + i, count), to + i, count); });
  }
}

template <typename T>
void add_bias(const LinearOutput& output, int64_t rows, int64_t begin, int64_t end) {
  const T* const bias = static_cast<const T*>(output.bias) + begin;
  for (int64_t row = 0; row < rows; ++row) {
    float* const y = output.y + row * output.features + begin;
    by_vectors(end - begin, [&](int64_t i, int64_t count) {
      store(load(y + i, count) + load(bias + i, count), y + i, count);
    });
  }
}

template <typename T>
void finish(const LinearOutput& output, int64_t rows, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* const y = output.y + row * output.features;
    T* const to = static_cast<T*>(output.result) + row * output.features;
    const T* const residual =
        output.residual ? static_cast<const T*>(output.residual) + row * output.features : nullptr;
    by_vectors(end - begin, [&](int64_t i, int64_t count) {
      const int64_t at = begin + i;
      Vec values = load(y + at, count);
      if (residual) {
        values = load(residual + at, count) + rounded<T>(values);
      }
      store(values, to + at, count);
    });
  }
}

}  // namespace

void linear_input_row(const LinearInput& input, int64_t row, float* to) {
  with_type(input.type, [&](auto zero) { input_row<decltype(zero)>(input, row, to); });
}

void store_row(Type type, const float* from, int64_t count, void* to) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    by_vectors(count, [&](int64_t i, int64_t numbers) {
      store(load(from + i, numbers), static_cast<T*>(to) + i, numbers);
    });
  });
}

void finish_blocks(const LinearOutput& output, int64_t rows, int64_t first, int64_t last) {
  const int64_t begin = first * kColumns, end = std::min(last * kColumns, output.features);
  if (output.bias) {
    with_type(output.bias_type, [&](auto zero) { add_bias<decltype(zero)>(output, rows, begin, end); });
  }
  if (output.result == output.y && output.residual == nullptr) {
    return;
  }
  with_type(output.type, [&](auto zero) { finish<decltype(zero)>(output, rows, begin, end); });
}

}  // namespace speccompile
