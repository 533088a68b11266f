// flatten_bucket: out[offsets[i] + k] = cast(tensors[i][k]) / divisor, zero between the slots; unflatten_bucket is the
// way back. The cast comes first and the division is a true one, as in `tensor.to(dtype) / divisor`.
#include "../bucket.h"

#include <cstring>

#include "chunks.h"
#include "vector.h"

namespace apexfx {
namespace {

// One chunk of at most kChunk elements from `in` to `out`.
void convert(const void* in, ScalarType in_dtype, void* out, ScalarType out_dtype, double divisor, int64_t n) {
  if (in_dtype == out_dtype && divisor == 1.0) {
    memcpy(out, in, n * element_size(out_dtype));
    return;
  }
  if (out_dtype == ScalarType::Double) {
    double* wide = static_cast<double*>(out);
    dispatch_float_or_double(in_dtype, "bucket", "tensor", [&](auto zero) {
      using T = decltype(zero);
      for (int64_t i = 0; i < n; ++i) wide[i] = static_cast<double>(static_cast<const T*>(in)[i]) / divisor;
    });
    return;
  }
  alignas(64) float scratch[kBlock];
  const bool rounds_first = divisor != 1.0 && in_dtype != out_dtype && out_dtype != ScalarType::Float;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    void* place = element(out, out_dtype, begin);
    const float* values = load(element(in, in_dtype, begin), in_dtype, scratch, count);
    if (rounds_first) {
      store(values, place, out_dtype, count);
      values = load(place, out_dtype, scratch, count);
    }
    if (divisor != 1.0) {
      float* quotient = out_dtype == ScalarType::Float ? static_cast<float*>(place) : scratch;
      divide(values, quotient, static_cast<float>(divisor), count);
      values = quotient;
    }
    store(values, place, out_dtype, count);
  }
}

Tensor flatten_bucket(const std::vector<Tensor>& tensors, std::vector<int64_t> offsets, int64_t numel, ScalarType dtype,
                      double divisor) {
  const char* op = "flatten_bucket";
  const std::vector<Tensor> sources = checked_contiguous(op, tensors);
  check(is_floating(dtype), op, "dtype is ", dtype_name(dtype), "; expected a floating point dtype");
  std::vector<int64_t> numels;
  for (const Tensor& t : sources) numels.push_back(t.numel());
  const std::vector<int64_t> order = sorted_slots(op, offsets, numels, numel, divisor);
  Tensor flat = new_empty_like_dtype(sources[0], {numel}, dtype);
  void* out = flat.mutable_data_ptr();

  int64_t end = 0;
  auto zero_until = [&](int64_t begin) {
    if (begin > end) memset(element(out, dtype, end), 0, (begin - end) * element_size(dtype));
  };
  for (int64_t i : order) {
    zero_until(offsets[i]);
    end = offsets[i] + numels[i];
  }
  zero_until(numel);

  Chunks(numels).for_each([&](const Chunk& c) {
    const Tensor& source = sources[c.tensor];
    convert(element(source.const_data_ptr(), source.scalar_type(), c.begin), source.scalar_type(),
            element(out, dtype, offsets[c.tensor] + c.begin), dtype, divisor, c.count);
  });
  return flat;
}

std::vector<Tensor> unflatten_bucket(const Tensor& flat, std::vector<int64_t> offsets, std::vector<int64_t> sizes,
                                     std::vector<int64_t> ranks, ScalarType dtype, double divisor) {
  const char* op = "unflatten_bucket";
  check(flat.dim() == 1 && is_floating(flat.scalar_type()), op, "flat must be a 1-D floating point buffer, got ",
        flat.dim(), " dims of ", dtype_name(flat.scalar_type()));
  check(is_floating(dtype), op, "dtype is ", dtype_name(dtype), "; expected a floating point dtype");
  const auto shapes = unpack_shapes(op, sizes, ranks);
  std::vector<int64_t> numels;
  for (const auto& shape : shapes) numels.push_back(numel_of(op, shape));
  sorted_slots(op, offsets, numels, flat.numel(), divisor);
  const Tensor source = flat.is_contiguous() ? flat : torch::stable::contiguous(flat);
  std::vector<Tensor> outputs;
  for (const auto& shape : shapes) outputs.push_back(new_empty_like_dtype(flat, shape, dtype));

  Chunks(numels).for_each([&](const Chunk& c) {
    convert(element(source.const_data_ptr(), source.scalar_type(), offsets[c.tensor] + c.begin), source.scalar_type(),
            element(outputs[c.tensor].mutable_data_ptr(), dtype, c.begin), dtype, divisor, c.count);
  });
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) {
  m.impl("flatten_bucket", TORCH_BOX(&flatten_bucket));
  m.impl("unflatten_bucket", TORCH_BOX(&unflatten_bucket));
}

}  // namespace apexfx
