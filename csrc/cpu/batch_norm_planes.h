// Contiguous x: N * C planes. The statistics of a channel are those of its segments, each some whole planes or a part
// of one; the planes of neighbouring channels are walked together, since they are neighbours in memory.
#pragma once

#include "batch_norm_cpu.h"

namespace apexfx {
namespace batch_norm {

class Planes {
 public:
  explicit Planes(const Layout& x) : outer_(x.outer), channels_(x.channels), inner_(x.inner) {
    pieces_ = (inner_ + kPiece - 1) / kPiece;
    length_ = (inner_ + pieces_ - 1) / pieces_;
    const int64_t most = std::max<int64_t>(1, kPiece / inner_);  // planes of a segment
    segments_ = pieces_ > 1 ? outer_ * pieces_ : (outer_ + most - 1) / most;
    planes_ = pieces_ > 1 ? 1 : (outer_ + segments_ - 1) / segments_;
  }

  int64_t segments() const { return segments_; }
  int64_t per_channel() const { return outer_ * inner_; }
  int64_t channels() const { return channels_; }

  // Channels a task takes, of `elements` each: about half a piece, but enough tasks for some threads. One, where planes
  // are cut: what follows a part of a plane is not another channel's.
  int64_t block(int64_t elements) const {
    const int64_t wanted = std::max<int64_t>(1, kPiece / 2 / elements);
    return std::min(wanted, (channels_ + 7) / 8);
  }

  // Calls f(plane of channel `first` in memory, elements of it) for every plane, or part of one, of a segment.
  template <typename F>
  void for_planes(int64_t segment, int64_t first, F&& f) const {
    const int64_t begin = pieces_ > 1 ? segment / pieces_ : segment * planes_;
    const int64_t inside = pieces_ > 1 ? segment % pieces_ * length_ : 0;
    const int64_t end = std::min(outer_, begin + planes_), n = std::min(length_, inner_ - inside);
    for (int64_t plane = begin; plane < end; ++plane) f((plane * channels_ + first) * inner_ + inside, n);
  }

  // Adds the [sum, sum of squares] of a segment of n channels from `first` to `total` and `of_squares`.
  template <typename E>
  void sums(const E* x, int64_t segment, int64_t first, int64_t n, double* total, double* of_squares) const {
    std::vector<T<E>> shift(n);
    std::vector<LaneSums> lanes(n);
    double count = 0;
    for_planes(segment, first, [&](int64_t at, int64_t length) {
      if (count == 0)
        for (int64_t c = 0; c < n; ++c) shift[c] = static_cast<T<E>>(x[at + c * inner_]);
      count += static_cast<double>(length);
      shifted_sums(x + at, length, n, shift.data(), lanes.data());
    });
    for (int64_t c = 0; c < n; ++c) {
      Sums sums = added(lanes[c]);
      if (is_far(count, sums.total, sums.of_squares)) {
        shift[c] += static_cast<T<E>>(sums.total / count);
        lanes[c] = {};
        for_planes(segment, first + c,
                   [&](int64_t at, int64_t length) { shifted_sums(x + at, length, 1, &shift[c], &lanes[c]); });
        sums = added(lanes[c]);
      }
      sums = unshifted(count, static_cast<double>(shift[c]), sums.total, sums.of_squares);
      total[c] += sums.total;
      of_squares[c] += sums.of_squares;
    }
  }

  // Adds [sum g, sum g * (x - center)].
  template <typename E>
  void gradient_sums(const ChannelConstants<E>& constants, const E* grad, const E* x, int64_t segment, int64_t first,
                     int64_t n, double* total, double* centered) const {
    std::vector<LaneSums> lanes(n);
    for_planes(segment, first, [&](int64_t at, int64_t length) {
      for_runs<E>(length, n, [&](int64_t run, int64_t c, int64_t channels, int64_t inner) {
        alignas(64) Scratch<E> scratch[2];
        const int64_t here = at + run, size = channels * inner;
        plane_gradient_sums(constants.from(first + c), read(grad + here, scratch[0], size),
                            read(x + here, scratch[1], size), inner, channels, &lanes[c]);
      });
    });
    for (int64_t c = 0; c < n; ++c) {
      const Sums sums = added(lanes[c]);
      total[c] += sums.total;
      centered[c] += sums.of_squares;
    }
  }

  template <typename E>
  void normalize(const ChannelConstants<E>& constants, const E* x, const E* residual, E* y, int64_t segment,
                 int64_t first, int64_t n) const {
    for_planes(segment, first, [&](int64_t at, int64_t length) {
      for_runs<E>(length, n, [&](int64_t run, int64_t c, int64_t channels, int64_t inner) {
        const int64_t here = at + run;
        with_scratch(x + here, offset(residual, here), y + here, channels * inner, [&](auto... operands) {
          plane_normalize(constants.from(first + c), operands..., inner, channels);
        });
      });
    });
  }

  template <typename E>
  void gradient(const ChannelConstants<E>& constants, const E* grad, const E* x, E* dx, int64_t segment, int64_t first,
                int64_t n) const {
    for_planes(segment, first, [&](int64_t at, int64_t length) {
      for_runs<E>(length, n, [&](int64_t run, int64_t c, int64_t channels, int64_t inner) {
        const int64_t here = at + run;
        with_scratch(grad + here, x + here, dx + here, channels * inner, [&](auto... operands) {
          plane_gradient(constants.from(first + c), operands..., inner, channels);
        });
      });
    });
  }

 private:
  // Calls f(offset, channel, channels, elements of each) for what fits a scratch buffer: all where none is needed.
  template <typename E, typename F>
  static void for_runs(int64_t length, int64_t channels, F&& f) {
    if (kDirect<E>) return f(int64_t{0}, int64_t{0}, channels, length);
    const int64_t together = std::max<int64_t>(1, kBlock / length), step = std::min(length, kBlock);
    for (int64_t c = 0; c < channels; c += together)
      for (int64_t i = 0; i < length; i += step)
        f(c * length + i, c, std::min(together, channels - c), std::min(step, length - i));
  }

  template <typename E>
  void shifted_sums(const E* x, int64_t length, int64_t channels, const T<E>* shift, LaneSums* lanes) const {
    for_runs<E>(length, channels, [&](int64_t run, int64_t c, int64_t together, int64_t inner) {
      alignas(64) Scratch<E> scratch;
      plane_sums(read(x + run, scratch, together * inner), inner, together, shift + c, lanes + c);
    });
  }

  static Sums added(const LaneSums& lanes) {
    const auto sum = [](const double* v) { return (v[0] + v[2]) + (v[1] + v[3]); };
    return {sum(lanes.first), sum(lanes.second)};
  }

  int64_t outer_, channels_, inner_;
  int64_t pieces_, length_;  // of a plane; elements of one
  int64_t segments_;         // of a channel
  int64_t planes_;           // of a segment
};

// Runs f(segment, first channel, channels) for all of them. At least some elements a task.
template <typename F>
void for_segments(const Planes& planes, F&& f) {
  const int64_t elements = std::max<int64_t>(1, planes.per_channel() / planes.segments());
  const int64_t block = planes.block(elements), blocks = (planes.channels() + block - 1) / block;
  parallel(blocks * planes.segments(), block * elements, [&](int64_t i) {
    const int64_t first = i % blocks * block;
    f(i / blocks, first, std::min(block, planes.channels() - first));
  });
}

// Adds up f(segment, first, channels, total, second), the two sums of a segment, into out[c] and out[C + c].
template <typename F>
void sum_segments(const Planes& planes, double* out, F&& f) {
  const int64_t channels = planes.channels();
  Doubles partial(2 * channels * planes.segments(), 0.0);
  for_segments(planes, [&](int64_t segment, int64_t first, int64_t n) {
    double* total = &partial[2 * channels * segment + first];
    f(segment, first, n, total, total + channels);
  });
  for (int64_t segment = 0; segment < planes.segments(); ++segment)
    channel_flush(&partial[2 * channels * segment], out, 2 * channels);
}

}  // namespace batch_norm
}  // namespace apexfx
