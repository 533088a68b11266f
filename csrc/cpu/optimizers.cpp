// adam_, lamb_, sgd_, adagrad_ and novograd_ on the CPU. Formulas: csrc/optimizer_math.h; arguments: csrc/optimizer_ops.h.
// Each is one pass over its operands, except that LAMB and NovoGrad need a norm of every tensor before they can write.
#include "../optimizer_ops.h"

#include "stream.h"
#include "sums.h"
#include "walk.h"

namespace apexfx {
namespace {

// Loops over a block. The float ones are compiled for AVX-512, AVX2 and plain x86-64; float64 tensors are rare.
APEXFX_CLONES void adam_loop(float* __restrict__ p, const float* __restrict__ g, float* __restrict__ m,
                             float* __restrict__ v, int64_t n, AdamScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { adam_update(p[i], m[i], v[i], g[i], s); }, p, g, m, v);
}
void adam_loop(double* p, const double* g, double* m, double* v, int64_t n, AdamScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) adam_update(p[i], m[i], v[i], g[i], s);
}

APEXFX_CLONES void moments_loop(const float* __restrict__ p, const float* __restrict__ g, float* __restrict__ m,
                                float* __restrict__ v, int64_t n, AdamScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { adam_moments(p[i], m[i], v[i], g[i], s); }, p, g, m, v);
}
void moments_loop(const double* p, const double* g, double* m, double* v, int64_t n, AdamScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) adam_moments(p[i], m[i], v[i], g[i], s);
}

// out = the direction p moves against.
APEXFX_CLONES void direction_loop(const float* __restrict__ p, const float* __restrict__ m, const float* __restrict__ v,
                                  float* __restrict__ out, int64_t n, AdamScalars<float> s) {
  for (int64_t i = 0; i < n; ++i) out[i] = adam_direction(p[i], m[i], v[i], s);
}
void direction_loop(const double* p, const double* m, const double* v, double* out, int64_t n, AdamScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) out[i] = adam_direction(p[i], m[i], v[i], s);
}

APEXFX_CLONES void descend_loop(float* __restrict__ p, const float* __restrict__ m, const float* __restrict__ v,
                                float rate, int64_t n, AdamScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { p[i] = p[i] - rate * adam_direction(p[i], m[i], v[i], s); }, p, m, v);
}
void descend_loop(double* p, const double* m, const double* v, double rate, int64_t n, AdamScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) p[i] = p[i] - rate * adam_direction(p[i], m[i], v[i], s);
}

APEXFX_CLONES void sgd_loop(float* __restrict__ p, const float* __restrict__ g, int64_t n, SgdScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { sgd_update(p[i], g[i], s); }, p, g);
}
void sgd_loop(double* p, const double* g, int64_t n, SgdScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) sgd_update(p[i], g[i], s);
}

APEXFX_CLONES void momentum_loop(float* __restrict__ p, const float* __restrict__ g, float* __restrict__ b, int64_t n,
                                 SgdScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { sgd_momentum_update<float, false>(p[i], b[i], g[i], s); }, p, g, b);
}
void momentum_loop(double* p, const double* g, double* b, int64_t n, SgdScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) sgd_momentum_update<double, false>(p[i], b[i], g[i], s);
}

APEXFX_CLONES void first_momentum_loop(float* __restrict__ p, const float* __restrict__ g, float* __restrict__ b,
                                       int64_t n, SgdScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { sgd_momentum_update<float, true>(p[i], b[i], g[i], s); }, p, g, b);
}
void first_momentum_loop(double* p, const double* g, double* b, int64_t n, SgdScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) sgd_momentum_update<double, true>(p[i], b[i], g[i], s);
}

APEXFX_CLONES void adagrad_loop(float* __restrict__ p, const float* __restrict__ g, float* __restrict__ h, int64_t n,
                                AdagradScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { adagrad_update(p[i], h[i], g[i], s); }, p, g, h);
}
void adagrad_loop(double* p, const double* g, double* h, int64_t n, AdagradScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) adagrad_update(p[i], h[i], g[i], s);
}

APEXFX_CLONES void novograd_loop(float* __restrict__ p, const float* __restrict__ g, float* __restrict__ m, int64_t n,
                                 NovogradScalars<float> s) {
  stream(n, [=](int64_t i) APEXFX_INLINE { novograd_update(p[i], m[i], g[i], s); }, p, g, m);
}
void novograd_loop(double* p, const double* g, double* m, int64_t n, NovogradScalars<double> s) {
  for (int64_t i = 0; i < n; ++i) novograd_update(p[i], m[i], g[i], s);
}

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

void count_step(const DeviceScalars& scalars) { *const_cast<float*>(scalars.step) += 1.0f; }

struct Cpu {
  static void adam(TensorLists& lists, const AdamOptions& options, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<AdamScalars> both{adam_scalars<float>(options, scalars), adam_scalars<double>(options, scalars)};
    const Walk walk(lists);
    walk.run<5, true>(0b11101, 0b10000, [&](const Chunk&, auto** x, int64_t n) {
      adam_loop(x[0], x[1], x[2], x[3], n, both.of(x[0]));
      copy_to_model(x[0], x[4], n);
    });
    lists.finish();
    count_step(scalars);
  }

  static void sgd(TensorLists& lists, const SgdOptions& options, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<SgdScalars> both{sgd_scalars<float>(options, scalars), sgd_scalars<double>(options, scalars)};
    const Walk walk(lists);
    walk.run<4, true>(0b1101, 0b1000, [&](const Chunk&, auto** x, int64_t n) {
      const auto& s = both.of(x[0]);
      if (options.momentum == 0.0) sgd_loop(x[0], x[1], n, s);
      else if (options.first_run) first_momentum_loop(x[0], x[1], x[2], n, s);
      else momentum_loop(x[0], x[1], x[2], n, s);
      copy_to_model(x[0], x[3], n);
    });
    lists.finish();
  }

  static void adagrad(TensorLists& lists, const AdagradOptions& options, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<AdagradScalars> both{adagrad_scalars<float>(options, scalars), adagrad_scalars<double>(options, scalars)};
    const Walk walk(lists);
    walk.run<4, true>(0b1101, 0b1000, [&](const Chunk&, auto** x, int64_t n) {
      adagrad_loop(x[0], x[1], x[2], n, both.of(x[0]));
      copy_to_model(x[0], x[3], n);
    });
    lists.finish();
  }

  // First pass: moments, and the square sums of p and of its direction u per chunk. Second pass: u again (cheaper than
  // keeping it: p, m and v are read either way) and the descent.
  static void lamb(TensorLists& lists, const AdamOptions& options, bool adapts, const DeviceScalars& scalars) {
    if (scalars.skip()) return;
    const Both<AdamScalars> both{adam_scalars<float>(options, scalars), adam_scalars<double>(options, scalars)};
    const Walk walk(lists);
    PartialSums param_sums(walk), direction_sums(walk);
    walk.run<4>(0b1100, 0, [&](const Chunk& chunk, auto** x, int64_t n) {
      const auto& s = both.of(x[0]);
      moments_loop(x[0], x[1], x[2], x[3], n, s);
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
    walk.run<5, true>(0b10001, 0b10010, [&](const Chunk& chunk, auto** x, int64_t n) {
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
    const Walk walk(lists);
    PartialSums sums(walk, options.max_norm);
    walk.run<2>(0, 0b01, [&](const Chunk& chunk, auto** x, int64_t n) {
      sums.add(chunk, options.max_norm ? max_abs(x[1], n) : square_sum(x[1], n));
    });
    const std::vector<double> totals = sums.per_tensor();
    std::vector<Both<NovogradScalars>> both;
    for (size_t t = 0; t < norms.size(); ++t) {
      const double norm = options.max_norm ? totals[t] : std::sqrt(totals[t]);
      *norms[t] = static_cast<float>(novograd_norm(*norms[t], norm, options, scalars));
      both.push_back({novograd_scalars<float>(*norms[t], options, scalars),
                      novograd_scalars<double>(*norms[t], options, scalars)});
    }
    walk.run<4, true>(0b1101, 0b1000, [&](const Chunk& chunk, auto** x, int64_t n) {
      novograd_loop(x[0], x[1], x[2], n, both[chunk.tensor].of(x[0]));
      copy_to_model(x[0], x[3], n);
    });
    lists.finish();
    count_step(scalars);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) { APEXFX_REGISTER_OPTIMIZERS(m, Cpu); }

}  // namespace apexfx
