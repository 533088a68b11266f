// The update formulas of the optimizers: one source for the CPU and the CUDA kernels. T is the arithmetic type: float,
// or double where the parameters are float64.
//
// Every update sees the gradient after unscaling and clipping, g = grad * clip_coefficient / grad_scale; `step` counts
// the updates already made, so that t = step + 1 below. Scalars are prepared in double.
#pragma once

#include <cmath>

#include "common.h"

namespace apexfx {

// Scalars that may live on the device; a null pointer means "use the number" or "none".
struct DeviceScalars {
  const float* step = nullptr;
  const float* lr = nullptr;
  const float* grad_scale = nullptr;
  const float* found_inf = nullptr;
  const float* clip_coefficient = nullptr;
  bool unscales = false;  // leave the gradients divided by grad_scale, which is there

  APEXFX_HD bool skip() const { return found_inf != nullptr && *found_inf != 0.0f; }
  APEXFX_HD double lr_or(double number) const { return lr != nullptr ? static_cast<double>(*lr) : number; }
  APEXFX_HD double grad_multiplier() const {
    const double clip = clip_coefficient != nullptr ? static_cast<double>(*clip_coefficient) : 1.0;
    return grad_scale != nullptr ? clip / static_cast<double>(*grad_scale) : clip;
  }
  APEXFX_HD double inverse_scale() const { return unscales ? 1.0 / static_cast<double>(*grad_scale) : 1.0; }
  APEXFX_HD double next_step() const { return step != nullptr ? static_cast<double>(*step) + 1.0 : 1.0; }
};

// ---- Adam and AdamW, and LAMB's first half ---------------------------------------------------------------------------
//   m = beta1 m + beta3 g;  v = beta2 v + (1 - beta2) g^2;  u = (m / c1) / (sqrt(v / c2) + eps);  p -= lr (u + wd p)
//   with wd p added to g instead of u where the decay is not decoupled; c = 1 - beta^t, or 1 without bias correction;
//   beta3 = 1 - beta1 (LAMB without grad_averaging: 1).   Kingma & Ba 2014; Loshchilov & Hutter 2017.
struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled, bias_correction, grad_averaging;
};

template <typename T>
struct AdamScalars {
  T lr, beta1, beta2, beta3, one_minus_beta2, eps, decay_gradient, decay_update, inverse_c1, inverse_c2, multiplier;
};

template <typename T>
APEXFX_HD AdamScalars<T> adam_scalars(const AdamOptions& o, const DeviceScalars& d) {
  const double t = d.next_step();
  AdamScalars<T> s;
  s.lr = static_cast<T>(d.lr_or(o.lr));
  s.beta1 = static_cast<T>(o.beta1);
  s.beta2 = static_cast<T>(o.beta2);
  s.beta3 = static_cast<T>(o.grad_averaging ? 1.0 - o.beta1 : 1.0);
  s.one_minus_beta2 = static_cast<T>(1.0 - o.beta2);
  s.eps = static_cast<T>(o.eps);
  s.decay_gradient = static_cast<T>(o.decoupled ? 0.0 : o.weight_decay);
  s.decay_update = static_cast<T>(o.decoupled ? o.weight_decay : 0.0);
  s.inverse_c1 = static_cast<T>(o.bias_correction ? 1.0 / (1.0 - pow(o.beta1, t)) : 1.0);
  s.inverse_c2 = static_cast<T>(o.bias_correction ? 1.0 / (1.0 - pow(o.beta2, t)) : 1.0);
  s.multiplier = static_cast<T>(d.grad_multiplier());
  return s;
}

APEXFX_HD float square_root(float x) { return sqrtf(x); }
APEXFX_HD double square_root(double x) { return sqrt(x); }

// a * b + c, rounded once, on any machine.
APEXFX_HD float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
APEXFX_HD double fused_multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Updates the moments from the gradient as it was stored.
template <typename T>
APEXFX_HD void adam_moments(T p, T& m, T& v, T grad, const AdamScalars<T>& s) {
  const T g = grad * s.multiplier + s.decay_gradient * p;
  m = s.beta1 * m + s.beta3 * g;
  v = s.beta2 * v + s.one_minus_beta2 * (g * g);
}

// The direction p moves against, from moments that are up to date.
template <typename T>
APEXFX_HD T adam_direction(T p, T m, T v, const AdamScalars<T>& s) {
  return (m * s.inverse_c1) / (square_root(v * s.inverse_c2) + s.eps) + s.decay_update * p;
}

template <typename T>
APEXFX_HD void adam_update(T& p, T& m, T& v, T grad, const AdamScalars<T>& s) {
  adam_moments(p, m, v, grad, s);
  p = p - s.lr * adam_direction(p, m, v, s);
}

// ---- LAMB's second half: p -= lr (|p| / |u|) u, the ratio being 1 where a norm is 0 or the layer is not adapted -------
//   You et al. 2019.
template <typename T>
APEXFX_HD T lamb_rate(T lr, double param_square_sum, double direction_square_sum, bool adapts) {
  if (!adapts || !(param_square_sum > 0.0) || !(direction_square_sum > 0.0)) return lr;
  return static_cast<T>(static_cast<double>(lr) * (sqrt(param_square_sum) / sqrt(direction_square_sum)));
}

// ---- SGD: d = g + wd p;  b = momentum b + (1 - dampening) d (b = d the first time);  d = b, or d + momentum b;
//   p -= lr d;  with wd_after_momentum wd p is added to the last d instead. Rounds where torch.optim.SGD does -----------
struct SgdOptions {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, wd_after_momentum, first_run;
};

template <typename T>
struct SgdScalars {
  T lr, momentum, gradient_factor, decay_before, decay_after, multiplier, keep, nesterov_gradient, nesterov_buffer;
};

template <typename T>
APEXFX_HD SgdScalars<T> sgd_scalars(const SgdOptions& o, const DeviceScalars& d) {
  SgdScalars<T> s;
  s.lr = static_cast<T>(d.lr_or(o.lr));
  s.momentum = static_cast<T>(o.momentum);
  s.keep = static_cast<T>(o.first_run ? 0.0 : o.momentum);
  s.gradient_factor = static_cast<T>(o.first_run ? 1.0 : 1.0 - o.dampening);
  s.decay_before = static_cast<T>(o.wd_after_momentum ? 0.0 : o.weight_decay);
  s.decay_after = static_cast<T>(o.wd_after_momentum ? o.weight_decay : 0.0);
  s.multiplier = static_cast<T>(d.grad_multiplier());
  s.nesterov_gradient = static_cast<T>(o.nesterov ? 1.0 : 0.0);
  s.nesterov_buffer = static_cast<T>(o.nesterov ? o.momentum : 1.0);
  return s;
}

template <typename T>
APEXFX_HD void sgd_update(T& p, T grad, const SgdScalars<T>& s) {
  const T d = fused_multiply_add(s.decay_before + s.decay_after, p, grad * s.multiplier);
  p = fused_multiply_add(-s.lr, d, p);
}

// `buffer` is not read on the first run: it may hold anything.
template <typename T, bool kFirstRun>
APEXFX_HD void sgd_momentum_update(T& p, T& buffer, T grad, const SgdScalars<T>& s) {
  const T d = fused_multiply_add(s.decay_before, p, grad * s.multiplier);
  buffer = kFirstRun ? d : fused_multiply_add(s.gradient_factor, d, s.keep * buffer);
  const T step = fused_multiply_add(s.nesterov_buffer, buffer, s.nesterov_gradient * d);
  p = fused_multiply_add(-s.lr, fused_multiply_add(s.decay_after, p, step), p);
}

// ---- Adagrad: h += g^2;  p -= lr g / (sqrt(h) + eps), with the decay in g or beside it ----------------------------------
struct AdagradOptions {
  double lr, eps, weight_decay;
  bool decoupled;
};

template <typename T>
struct AdagradScalars {
  T lr, eps, decay_gradient, decay_update, multiplier;
};

template <typename T>
APEXFX_HD AdagradScalars<T> adagrad_scalars(const AdagradOptions& o, const DeviceScalars& d) {
  return {static_cast<T>(d.lr_or(o.lr)), static_cast<T>(o.eps), static_cast<T>(o.decoupled ? 0.0 : o.weight_decay),
          static_cast<T>(o.decoupled ? o.weight_decay : 0.0), static_cast<T>(d.grad_multiplier())};
}

template <typename T>
APEXFX_HD void adagrad_update(T& p, T& h, T grad, const AdagradScalars<T>& s) {
  const T g = grad * s.multiplier + s.decay_gradient * p;
  h = h + g * g;
  p = p - s.lr * (g / (square_root(h) + s.eps) + s.decay_update * p);
}

// ---- NovoGrad: one second moment n per tensor, a norm (not its square) --------------------------------------------------
//   n = sqrt(beta2 n^2 + (1 - beta2) |g|^2)  or, for the max norm,  n = beta2 n + (1 - beta2) max|g|
//   the first time n = |g| (marked by n < 0);  c1 = 1 - beta1^t;  c2 = sqrt(1 - beta2^t), for n is a norm
//   m = beta1 m + beta3 g;  p -= lr ((m / c1) / (n / c2 + eps) + wd p), or with the decay inside the moment
//   g' = g / (n / c2 + eps) + wd p;  m = beta1 m + beta3 g';  p -= lr m / c1.    Ginsburg et al. 2019.
struct NovogradOptions {
  double lr, beta1, beta2, eps, weight_decay;
  bool bias_correction, grad_averaging, reg_inside_moment, max_norm;
};

template <typename T>
struct NovogradScalars {
  T lr, beta1, beta3, weight_decay, inverse_c1, decay_inside, decay_outside;
  double multiplier, c2;
  T gradient_factor, moment_factor;  // of a tensor: set_norm
};

// `norm` is the gradient's, as stored (before the multiplier); returns n after this step.
APEXFX_HD double novograd_norm(double n, double norm, const NovogradOptions& o, const DeviceScalars& d) {
  norm *= fabs(d.grad_multiplier());
  if (n < 0.0) return norm;
  return o.max_norm ? o.beta2 * n + (1.0 - o.beta2) * norm : sqrt(o.beta2 * n * n + (1.0 - o.beta2) * norm * norm);
}

template <typename T>
APEXFX_HD NovogradScalars<T> novograd_scalars(const NovogradOptions& o, const DeviceScalars& d) {
  const double t = d.next_step();
  NovogradScalars<T> s;
  s.lr = static_cast<T>(d.lr_or(o.lr));
  s.beta1 = static_cast<T>(o.beta1);
  s.beta3 = static_cast<T>(o.grad_averaging ? 1.0 - o.beta1 : 1.0);
  s.weight_decay = static_cast<T>(o.weight_decay);
  s.inverse_c1 = static_cast<T>(o.bias_correction ? 1.0 / (1.0 - pow(o.beta1, t)) : 1.0);
  s.decay_inside = static_cast<T>(o.reg_inside_moment ? o.weight_decay : 0.0);
  s.decay_outside = static_cast<T>(o.reg_inside_moment ? 0.0 : o.weight_decay);
  s.multiplier = d.grad_multiplier();
  s.c2 = o.bias_correction ? sqrt(1.0 - pow(o.beta2, t)) : 1.0;
  return s;
}

// `n` of a tensor after this step.
template <typename T>
APEXFX_HD void set_norm(NovogradScalars<T>& s, double n, const NovogradOptions& o) {
  const double inverse_denominator = 1.0 / (n / s.c2 + o.eps);
  s.gradient_factor = static_cast<T>(s.multiplier * (o.reg_inside_moment ? inverse_denominator : 1.0));
  s.moment_factor = static_cast<T>(o.reg_inside_moment ? 1.0 : inverse_denominator);
}

template <typename T>
APEXFX_HD void novograd_update(T& p, T& m, T grad, const NovogradScalars<T>& s) {
  m = s.beta1 * m + s.beta3 * (grad * s.gradient_factor + s.decay_inside * p);
  p = p - s.lr * ((m * s.inverse_c1) * s.moment_factor + s.decay_outside * p);
}

}  // namespace apexfx
