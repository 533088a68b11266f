// The four passes over x that batch norm is made of, in either layout.
#pragma once

#include "batch_norm_planes.h"
#include "batch_norm_rows.h"

namespace apexfx {
namespace batch_norm {

inline int64_t repeat_of(const Layout& layout) {
  return layout.channels_last ? RowPieces::repeat_of(layout.channels) : 1;
}

// out (2C) += [sum x, sum x^2]
template <typename E>
void add_sums(const Layout& layout, const E* x, double* out) {
  if (layout.channels_last) return RowPieces(layout).sums(x, out);
  const Planes planes(layout);
  sum_segments(planes, out, [&](auto... segment) { planes.sums(x, segment...); });
}

// out (2C) += [sum g, sum g * (x - center)]
template <typename E>
void add_gradient_sums(const Layout& layout, const ChannelConstants<E>& constants, const E* grad, const E* x,
                       double* out) {
  if (layout.channels_last) return RowPieces(layout).gradient_sums(constants, grad, x, out);
  const Planes planes(layout);
  sum_segments(planes, out, [&](auto... segment) { planes.gradient_sums(constants, grad, x, segment...); });
}

template <typename E>
void normalize_all(const Layout& layout, const ChannelConstants<E>& constants, const E* x, const E* residual, E* y) {
  if (layout.channels_last) return RowPieces(layout).normalize(constants, x, residual, y);
  const Planes planes(layout);
  for_segments(planes, [&](auto... segment) { planes.normalize(constants, x, residual, y, segment...); });
}

template <typename E>
void gradient_all(const Layout& layout, const ChannelConstants<E>& constants, const E* grad, const E* x, E* dx) {
  if (layout.channels_last) return RowPieces(layout).gradient(constants, grad, x, dx);
  const Planes planes(layout);
  for_segments(planes, [&](auto... segment) { planes.gradient(constants, grad, x, dx, segment...); });
}

}  // namespace batch_norm
}  // namespace apexfx
