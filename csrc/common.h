// What every CPU and CUDA op shares: the stable ABI's types, argument checks, dtype dispatch and layout matching.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef __CUDACC__
#define APEXFX_HD __host__ __device__ __forceinline__
#else
#define APEXFX_INLINE __attribute__((always_inline))  // of a lambda: goes after its parameters
#define APEXFX_HD inline APEXFX_INLINE
#endif

// Compiles a function for AVX-512, AVX2 and plain x86-64 and picks one when the library is loaded, so that one wheel
// runs on any machine. Whatever the function calls must be always_inline (APEXFX_HD), else it stays baseline code.
#if !defined(__CUDACC__) && defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__clang__)
#if __GNUC__ >= 12  // v3 is AVX2 with fused multiply-add, v4 AVX-512 with the 16-bit lanes of conversions; older compilers know neither
#define APEXFX_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), noinline))
#else
#define APEXFX_CLONES __attribute__((target_clones("default", "avx2", "avx512f"), noinline))
#endif
#else
#define APEXFX_CLONES
#endif

namespace apexfx {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Half = c10::Half;
using BFloat16 = c10::BFloat16;

// What values of E are computed in: double for double, else float.
template <typename E>
using Compute = std::conditional_t<std::is_same_v<E, double>, double, float>;

// Parts of a message. (A std::ostream would need the one libstdc++ of torch: a toolchain that links its own into the library gives
// it locales that are not its stream's, and the first number crashes.)
inline std::string text(const char* part) { return part; }

template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
inline std::string text(T number) {
  return std::to_string(number);
}

inline std::string text(double number) {
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%g", number);
  return digits;
}

// Throws std::runtime_error("apexfx::<op>: ...") unless `condition` holds; Python sees a RuntimeError.
template <typename... Parts>
inline void check(bool condition, const char* op, const Parts&... parts) {
  if (condition) return;
  std::string message = std::string("apexfx::") + op + ": ";
  ((message += text(parts)), ...);
  throw std::runtime_error(message);
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    default: return "an unsupported dtype";
  }
}

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

// Calls f(T{}) with T = float, Half or BFloat16 (and double where `with_double`).
template <typename F>
inline void dispatch_float(ScalarType dtype, const char* op, const char* argument, F&& f) {
  switch (dtype) {
    case ScalarType::Float: f(float{}); return;
    case ScalarType::Half: f(Half{}); return;
    case ScalarType::BFloat16: f(BFloat16{}); return;
    default: check(false, op, argument, " is ", dtype_name(dtype), "; expected float32, float16 or bfloat16");
  }
}

template <typename F>
inline void dispatch_float_or_double(ScalarType dtype, const char* op, const char* argument, F&& f) {
  if (dtype == ScalarType::Double) f(double{});
  else dispatch_float(dtype, op, argument, std::forward<F>(f));
}

inline bool same_device(const Tensor& a, const Tensor& b) { return a.device() == b.device(); }

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  auto x = a.sizes(), y = b.sizes();
  return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin());
}

// True where both walk memory in the same order: strides of dimensions longer than one agree.
inline bool same_strides(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes(), x = a.strides(), y = b.strides();
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && x[d] != y[d]) return false;
  return true;
}

}  // namespace apexfx
