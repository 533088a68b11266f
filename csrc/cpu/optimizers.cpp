// adam_, lamb_, sgd_, adagrad_ and novograd_ on the CPU. Formulas: csrc/optimizer_math.h; arguments: csrc/optimizer_ops.h.
// Each is one pass over its operands, except that LAMB and NovoGrad need a norm of every tensor before they can write.
#include "../optimizer_ops.h"

#include "sums.h"
#include "multi_tensor_loop.h"

namespace apexfx {
namespace {

// Loops over a block, compiled for AVX-512, AVX2 and plain x86-64.
#define APEXFX_OPTIMIZER_LOOPS(T)                                                                                     \
  APEXFX_CLONES void adam_loop(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ m, T* __restrict__ v,      \
                               int64_t n, AdamScalars<T> s) {                                                         \
    for (int64_t i = 0; i < n; ++i) adam_update(p[i], m[i], v[i], g[i], s);                                           \
  }                                                                                                                   \
  APEXFX_CLONES void moments_loop(const T* __restrict__ p, const T* __restrict__ g, T* __restrict__ m,                \
                                  T* __restrict__ v, int64_t n, AdamScalars<T> s) {                                   \
    for (int64_t i = 0; i < n; ++i) adam_moments(p[i], m[i], v[i], g[i], s);                                          \
  }                                                                                                                   \
  /* out = the direction p moves against */                                                                           \
  APEXFX_CLONES void direction_loop(const T* __restrict__ p, const T* __restrict__ m, const T* __restrict__ v,        \
                                    T* __restrict__ out, int64_t n, AdamScalars<T> s) {                               \
    for (int64_t i = 0; i < n; ++i) out[i] = adam_direction(p[i], m[i], v[i], s);                                     \
  }                                                                                                                   \
  APEXFX_CLONES void descend_loop(T* __restrict__ p, const T* __restrict__ m, const T* __restrict__ v, T rate,        \
                                  int64_t n, AdamScalars<T> s) {                                                      \
    for (int64_t i = 0; i < n; ++i) p[i] = p[i] - rate * adam_direction(p[i], m[i], v[i], s);                         \
  }                                                                                                                   \
  APEXFX_CLONES void sgd_loop(T* __restrict__ p, const T* __restrict__ g, int64_t n, SgdScalars<T> s) {               \
    for (int64_t i = 0; i < n; ++i) sgd_update(p[i], g[i], s);                                                        \
  }                                                                                                                   \
  APEXFX_CLONES void momentum_loop(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ b, int64_t n,          \
                                   SgdScalars<T> s) {                                                                 \
    for (int64_t i = 0; i < n; ++i) sgd_momentum_update<T, false>(p[i], b[i], g[i], s);                               \
  }                                                                                                                   \
  APEXFX_CLONES void first_momentum_loop(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ b, int64_t n,    \
                                         SgdScalars<T> s) {                                                           \
    for (int64_t i = 0; i < n; ++i) sgd_momentum_update<T, true>(p[i], b[i], g[i], s);                                \
  }                                                                                                                   \
  APEXFX_CLONES void adagrad_loop(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ h, int64_t n,           \
                                  AdagradScalars<T> s) {                                                              \
    for (int64_t i = 0; i < n; ++i) adagrad_update(p[i], h[i], g[i], s);                                              \
  }                                                                                                                   \
  APEXFX_CLONES void novograd_loop(T* __restrict__ p, const T* __restrict__ g, T* __restrict__ m, int64_t n,          \
                                   NovogradScalars<T> s) {                                                            \
    for (int64_t i = 0; i < n; ++i) novograd_update(p[i], m[i], g[i], s);                                             \
  }                                                                                                                   \
  APEXFX_CLONES void multiply_loop(T* g, T factor, int64_t n) {                                                       \
    for (int64_t i = 0; i < n; ++i) g[i] = g[i] * factor;                                                             \
  }

APEXFX_OPTIMIZER_LOOPS(float)
APEXFX_OPTIMIZER_LOOPS(double)

// Both precisions of an optimizer's scalars; the block picks by the type of its pointers.
template <template <typename> class Scalars>
struct Both {
  Scalars<float> single;
  Scalars<double> wide;
  const Scalars<float>& of(const float*) const { return single; }
  const Scalars<double>& of(const double*) const { return wide; }
};

template <typename T>
void copy_to_model(const T* params, T* model, int64_t n) {
  if (model != nullptr) memcpy(model, params, n * sizeof(T));
}

// The gradients of a block that an update has read, as the step leaves them; `written_gradients` is their bit of a mask.
template <typename T>
void unscale(T* grads, int64_t n, const DeviceScalars& scalars) {
  if (scalars.unscales) multiply_loop(grads, static_cast<T>(scalars.inverse_scale()), n);
}

unsigned written_gradients(const DeviceScalars& scalars) { return scalars.unscales ? 0b10 : 0; }

void count_step(const DeviceScalars& scalars) { *const_cast<float*>(scalars.step) += 1.0f; }

struct Cpu {
  static void adam(TensorLists& lists, const AdamOptions& options, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<AdamScalars> both{adam_scalars<float>(options, scalars), adam_scalars<double>(options, scalars)};
    const MultiTensorLoop loop(lists);
    loop.run<5, true>(0b11101 | written_gradients(scalars), 0b10000, [&](const Chunk&, auto** x, int64_t n) {
      adam_loop(x[0], x[1], x[2], x[3], n, both.of(x[0]));
      unscale(x[1], n, scalars);
      copy_to_model(x[0], x[4], n);
    });
    lists.finish();
    count_step(scalars);
  }

  static void sgd(TensorLists& lists, const SgdOptions& options, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<SgdScalars> both{sgd_scalars<float>(options, scalars), sgd_scalars<double>(options, scalars)};
    const MultiTensorLoop loop(lists);
    loop.run<4, true>(0b1101 | written_gradients(scalars), 0b1000, [&](const Chunk&, auto** x, int64_t n) {
      const auto& s = both.of(x[0]);
      if (options.momentum == 0.0) sgd_loop(x[0], x[1], n, s);
      else if (options.first_run) first_momentum_loop(x[0], x[1], x[2], n, s);
      else momentum_loop(x[0], x[1], x[2], n, s);
      unscale(x[1], n, scalars);
      copy_to_model(x[0], x[3], n);
    });
    lists.finish();
  }

  static void adagrad(TensorLists& lists, const AdagradOptions& options, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<AdagradScalars> both{adagrad_scalars<float>(options, scalars), adagrad_scalars<double>(options, scalars)};
    const MultiTensorLoop loop(lists);
    loop.run<4, true>(0b1101 | written_gradients(scalars), 0b1000, [&](const Chunk&, auto** x, int64_t n) {
      adagrad_loop(x[0], x[1], x[2], n, both.of(x[0]));
      unscale(x[1], n, scalars);
      copy_to_model(x[0], x[3], n);
    });
    lists.finish();
  }

  // First pass: moments, and the square sums of p and of its direction u per chunk. Second pass: u again (cheaper than
  // keeping it: p, m and v are read either way) and the descent.
  static void lamb(TensorLists& lists, const AdamOptions& options, bool adapts, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<AdamScalars> both{adam_scalars<float>(options, scalars), adam_scalars<double>(options, scalars)};
    const MultiTensorLoop loop(lists);
    PartialSums param_sums(loop), direction_sums(loop);
    loop.run<4>(0b1100 | written_gradients(scalars), 0, [&](const Chunk& chunk, auto** x, int64_t n) {
      const auto& s = both.of(x[0]);
      moments_loop(x[0], x[1], x[2], x[3], n, s);
      unscale(x[1], n, scalars);
      if (!adapts) return;
      std::decay_t<decltype(x[0][0])> direction[kBlock];
      for (int64_t begin = 0; begin < n; begin += kBlock) {  // one trip, except for float64
        const int64_t count = std::min(kBlock, n - begin);
        direction_loop(x[0] + begin, x[2] + begin, x[3] + begin, direction, count, s);
        param_sums.add(chunk, square_sum(x[0] + begin, count));
        direction_sums.add(chunk, square_sum(direction, count));
      }
    });
    const std::vector<double> p2 = param_sums.per_tensor(), u2 = direction_sums.per_tensor();
    loop.run<5, true>(0b10001, 0b10010, [&](const Chunk& chunk, auto** x, int64_t n) {
      const auto& s = both.of(x[0]);
      descend_loop(x[0], x[2], x[3], lamb_rate(s.lr, p2[chunk.tensor], u2[chunk.tensor], adapts), n, s);
      copy_to_model(x[0], x[4], n);
    });
    lists.finish();
    count_step(scalars);
  }

  static void novograd(TensorLists& lists, const std::vector<float*>& norms, const NovogradOptions& options,
                       const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const MultiTensorLoop loop(lists);
    PartialSums sums(loop, options.max_norm);
    loop.run<2>(0, 0b01, [&](const Chunk& chunk, auto** x, int64_t n) {
      sums.add(chunk, options.max_norm ? max_abs(x[1], n) : square_sum(x[1], n));
    });
    const std::vector<double> totals = sums.per_tensor();
    Both<NovogradScalars> scalars_of{novograd_scalars<float>(options, scalars), novograd_scalars<double>(options, scalars)};
    std::vector<Both<NovogradScalars>> both;
    for (size_t t = 0; t < norms.size(); ++t) {
      const double norm = options.max_norm ? totals[t] : std::sqrt(totals[t]);
      *norms[t] = static_cast<float>(novograd_norm(*norms[t], norm, options, scalars));
      set_norm(scalars_of.single, *norms[t], options);
      set_norm(scalars_of.wide, *norms[t], options);
      both.push_back(scalars_of);
    }
    loop.run<4, true>(0b1101 | written_gradients(scalars), 0b1000, [&](const Chunk& chunk, auto** x, int64_t n) {
      novograd_loop(x[0], x[1], x[2], n, both[chunk.tensor].of(x[0]));
      unscale(x[1], n, scalars);
      copy_to_model(x[0], x[3], n);
    });
    lists.finish();
    count_step(scalars);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) { APEXFX_REGISTER_OPTIMIZERS(m, Cpu); }

}  // namespace apexfx
