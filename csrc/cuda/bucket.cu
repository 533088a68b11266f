// flatten_bucket and unflatten_bucket on CUDA: out = cast(in) / divisor, a true division, zero between the slots.
#include "../bucket.h"

#include "multi_tensor_loop.cuh"

namespace apexfx {
namespace {

// x[1] = cast(x[0]) / divisor; the value takes the destination's precision before the division, as torch's would.
struct Convert {
  static constexpr int kOperands = 2, kSums = 0;
  static constexpr unsigned kWritten = 0b10, kUnread = 0b10;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = false;
  using Dtypes = CopyDtypes;
  double divisor;
  ScalarType out_dtype;
  __device__ bool skip() const { return false; }
  template <typename T>
  __device__ T prepare() const {
    // float16 and bfloat16 divide in float32, as torch does
    return out_dtype == ScalarType::Double ? static_cast<T>(divisor) : static_cast<T>(static_cast<float>(divisor));
  }
  template <typename T>
  __device__ void apply(T (&x)[2], T s, double (&)[1]) const {
    T value = x[0];
    if (s != T(1)) {
      if (out_dtype == ScalarType::Half) value = static_cast<T>(static_cast<float>(static_cast<Half>(static_cast<float>(value))));
      else if (out_dtype == ScalarType::BFloat16) value = static_cast<T>(static_cast<float>(static_cast<BFloat16>(static_cast<float>(value))));
      else if (out_dtype == ScalarType::Float) value = static_cast<T>(static_cast<float>(value));
      value = divide(value, s);
    }
    x[1] = value;
  }
  static __device__ float divide(float a, float b) { return __fdiv_rn(a, b); }
  static __device__ double divide(double a, double b) { return __ddiv_rn(a, b); }
};

// x[0] = 0
struct Zero {
  static constexpr int kOperands = 1, kSums = 0;
  static constexpr unsigned kWritten = 0b1, kUnread = 0b1;
  static constexpr bool kMaximum = false, kPerTensor = false, kUnscales = false;
  using Dtypes = Variants<Operands<float>, Operands<Half>, Operands<BFloat16>, Operands<double>>;
  __device__ bool skip() const { return false; }
  template <typename T>
  __device__ int prepare() const { return 0; }
  template <typename T>
  __device__ void apply(T (&x)[1], int, double (&)[1]) const { x[0] = T(0); }
};

size_t size_of(ScalarType dtype) { return dtype == ScalarType::Double ? 8 : dtype == ScalarType::Float ? 4 : 2; }

Position position(const void* in, ScalarType in_dtype, void* out, ScalarType out_dtype, int64_t numel) {
  Position p;
  p.data[0] = const_cast<void*>(in);
  p.data[1] = out;
  p.dtype[0] = in_dtype;
  p.dtype[1] = out_dtype;
  p.numel = numel;
  return p;
}

Tensor flatten_bucket(const std::vector<Tensor>& tensors, std::vector<int64_t> offsets, int64_t numel, ScalarType dtype,
                      double divisor) {
  const char* op = "flatten_bucket";
  check(!tensors.empty(), op, "tensors is empty; expected at least one tensor");
  const DeviceGuard guard(tensors[0].get_device_index());
  const std::vector<Tensor> sources = checked_contiguous(op, tensors);
  check(is_floating(dtype), op, "dtype is ", dtype_name(dtype), "; expected a floating point dtype");
  std::vector<int64_t> numels;
  for (const Tensor& t : sources) numels.push_back(t.numel());
  const std::vector<int64_t> order = sorted_slots(op, offsets, numels, numel, divisor);
  const Tensor flat = new_empty_like_dtype(sources[0], {numel}, dtype);
  char* out = static_cast<char*>(flat.data_ptr());
  const cudaStream_t stream = current_stream(sources[0]);

  std::vector<Position> gaps, slots;
  int64_t end = 0;
  auto gap_until = [&](int64_t begin) {
    if (begin <= end) return;
    Position gap;
    gap.data[0] = out + end * size_of(dtype);
    gap.dtype[0] = dtype;
    gap.numel = begin - end;
    gaps.push_back(gap);
  };
  for (int64_t i : order) {
    gap_until(offsets[i]);
    end = offsets[i] + numels[i];
  }
  gap_until(numel);
  for (size_t i = 0; i < sources.size(); ++i)
    if (numels[i] > 0)
      slots.push_back(position(sources[i].data_ptr(), sources[i].scalar_type(), out + offsets[i] * size_of(dtype), dtype, numels[i]));
  int64_t num_chunks = 0;
  multi_tensor_loop(tables_of<1>(gaps, num_chunks), Zero{}, nullptr, stream);
  multi_tensor_loop(tables_of<2>(slots, num_chunks), Convert{divisor, dtype}, nullptr, stream);
  return flat;
}

std::vector<Tensor> unflatten_bucket(const Tensor& flat, std::vector<int64_t> offsets, std::vector<int64_t> sizes,
                                     std::vector<int64_t> ranks, ScalarType dtype, double divisor) {
  const char* op = "unflatten_bucket";
  check(flat.dim() == 1 && is_floating(flat.scalar_type()), op, "flat must be a 1-D floating point buffer, got ",
        flat.dim(), " dims of ", dtype_name(flat.scalar_type()));
  check(is_floating(dtype), op, "dtype is ", dtype_name(dtype), "; expected a floating point dtype");
  const DeviceGuard guard(flat.get_device_index());
  const auto shapes = unpack_shapes(op, sizes, ranks);
  std::vector<int64_t> numels;
  for (const auto& shape : shapes) numels.push_back(numel_of(op, shape));
  sorted_slots(op, offsets, numels, flat.numel(), divisor);
  const Tensor source = flat.is_contiguous() ? flat : torch::stable::contiguous(flat);
  const ScalarType in_dtype = source.scalar_type();
  const char* in = static_cast<const char*>(source.data_ptr());
  std::vector<Tensor> outputs;
  std::vector<Position> slots;
  for (size_t i = 0; i < shapes.size(); ++i) {
    outputs.push_back(new_empty_like_dtype(flat, shapes[i], dtype));
    if (numels[i] > 0)
      slots.push_back(position(in + offsets[i] * size_of(in_dtype), in_dtype, outputs[i].data_ptr(), dtype, numels[i]));
  }
  int64_t num_chunks = 0;
  multi_tensor_loop(tables_of<2>(slots, num_chunks), Convert{divisor, dtype}, nullptr, current_stream(flat));
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CUDA, m) {
  m.impl("flatten_bucket", TORCH_BOX(&flatten_bucket));
  m.impl("unflatten_bucket", TORCH_BOX(&unflatten_bucket));
}

}  // namespace apexfx
