// Channels_last x, or (N, C): rows of C, walked in pieces of rows. Rows are taken `repeat` at a time where C is small,
// so that a loop over `width` fills registers.
#pragma once

#include "batch_norm_cpu.h"

namespace apexfx {
namespace batch_norm {

class RowPieces {
 public:
  static int64_t repeat_of(int64_t channels) { return std::max<int64_t>(1, 64 / channels); }

  explicit RowPieces(const Layout& x)
      : total_rows_(x.outer), channels_(x.channels), repeat_(repeat_of(channels_)), width_(repeat_ * channels_) {
    const int64_t least = std::max({kPiece / channels_, kMinRows, (total_rows_ + kMaxPieces - 1) / kMaxPieces});
    count_ = (total_rows_ + least - 1) / least;
    if (count_ > 1) count_ = (count_ + 1) / 2 * 2;  // as many for each thread
    rows_ = (total_rows_ + count_ - 1) / count_;
    rows_ = (rows_ + repeat_ - 1) / repeat_ * repeat_;
    count_ = (total_rows_ + rows_ - 1) / rows_;
  }

  // Adds [sum, sum of squares] of every channel to total[c] and total[C + c].
  template <typename E>
  void sums(const E* x, double* total) const {
    sum_pieces(total, [&](int64_t i, double* sums) {
      alignas(64) Scratch<E> scratch;
      std::vector<T<E>> first(channels_), shift(width_);
      for (int64_t c = 0; c < channels_; ++c) first[c] = static_cast<T<E>>(x[begin(i) + c]);
      const double rows = static_cast<double>(size(i) / channels_);
      const auto sum = [&] {
        for (int64_t r = 0; r < repeat_; ++r) std::copy_n(first.data(), channels_, shift.data() + r * channels_);
        std::fill_n(sums, 2 * channels_, 0.0);
        sum_piece<E>(i, sums, [&](int64_t at, int64_t column, int64_t n, T<E>* total, T<E>* squares) {
          row_sums(read(x + at, scratch, n), shift.data() + column, total, squares, width_ - column, n);
        });
      };
      sum();
      if (any_is_far(rows, sums, sums + channels_, channels_)) {
        for (int64_t c = 0; c < channels_; ++c)
          if (is_far(rows, sums[c], sums[channels_ + c])) first[c] += static_cast<T<E>>(sums[c] / rows);
        sum();
      }
      channel_unshifted(rows, first.data(), sums, sums + channels_, channels_);
    });
  }

  // Adds [sum g, sum g * (x - center)].
  template <typename E>
  void gradient_sums(const ChannelConstants<E>& constants, const E* grad, const E* x, double* total) const {
    sum_pieces(total, [&](int64_t i, double* sums) {
      alignas(64) Scratch<E> scratch[2];
      sum_piece<E>(i, sums, [&](int64_t at, int64_t column, int64_t n, T<E>* total, T<E>* products) {
        row_gradient_sums(constants.from(column), read(grad + at, scratch[0], n), read(x + at, scratch[1], n), total,
                          products, width_ - column, n);
      });
    });
  }

  template <typename E>
  void normalize(const ChannelConstants<E>& constants, const E* x, const E* residual, E* y) const {
    for_pieces<E>([&](int64_t at, int64_t column, int64_t n) {
      with_scratch(x + at, offset(residual, at), y + at, n, [&](auto... operands) {
        row_normalize(constants.from(column), operands..., width_ - column, n);
      });
    });
  }

  template <typename E>
  void gradient(const ChannelConstants<E>& constants, const E* grad, const E* x, E* dx) const {
    for_pieces<E>([&](int64_t at, int64_t column, int64_t n) {
      with_scratch(grad + at, x + at, dx + at, n, [&](auto... operands) {
        row_gradient(constants.from(column), operands..., width_ - column, n);
      });
    });
  }

 private:
  static constexpr int64_t kMinRows = 128;    // of a piece, where C is so large that fewer would do
  static constexpr int64_t kMaxPieces = 256;
  static constexpr int64_t kFlushRows = 64;   // added up in float before they go into a double

  int64_t begin(int64_t i) const { return i * rows_ * channels_; }
  int64_t size(int64_t i) const { return std::min(rows_, total_rows_ - i * rows_) * channels_; }

  // Calls f(offset, column, n) for whole rows (column 0) or a part of one, as fit a scratch buffer.
  template <typename E, typename F>
  void for_row_blocks(int64_t n, F&& f) const {
    if (kDirect<E> || width_ <= kBlock) {
      const int64_t step = kDirect<E> ? n : kBlock / width_ * width_;
      for (int64_t begin = 0; begin < n; begin += step) f(begin, int64_t{0}, std::min(step, n - begin));
      return;
    }
    for (int64_t row = 0; row < n; row += width_)
      for (int64_t column = 0; column < width_; column += kBlock)
        f(row + column, column, std::min(kBlock, width_ - column));
  }

  // Calls f(position, column, n) for everything.
  template <typename E, typename F>
  void for_pieces(F&& f) const {
    parallel(count_, rows_ * channels_, [&](int64_t i) {
      for_row_blocks<E>(size(i), [&](int64_t offset, int64_t column, int64_t n) { f(begin(i) + offset, column, n); });
    });
  }

  // Runs f(element, column, n, total, product) over blocks of the rows of a piece; the running sums end in `into` (2C).
  template <typename E, typename F>
  void sum_piece(int64_t i, double* into, F&& f) const {
    std::vector<T<E>> total(width_, 0), product(width_, 0);
    const int64_t step = kFlushRows * width_, n = size(i);
    for (int64_t at = 0; at < n; at += step) {
      for_row_blocks<E>(std::min(step, n - at), [&](int64_t offset, int64_t column, int64_t m) {
        f(begin(i) + at + offset, column, m, total.data() + column, product.data() + column);
      });
      for (int64_t r = 0; r < width_; r += channels_) {
        channel_flush(total.data() + r, into, channels_);
        channel_flush(product.data() + r, into + channels_, channels_);
      }
    }
  }

  // Adds up f(piece, sums), the 2C sums of a piece.
  template <typename F>
  void sum_pieces(double* out, F&& f) const {
    Doubles partial(2 * channels_ * count_, 0.0);
    parallel(count_, rows_ * channels_, [&](int64_t i) { f(i, &partial[2 * channels_ * i]); });
    for (int64_t i = 0; i < count_; ++i) channel_flush(&partial[2 * channels_ * i], out, 2 * channels_);
  }

  int64_t total_rows_, channels_, repeat_, width_;
  int64_t rows_, count_;  // of a piece; of pieces
};

}  // namespace batch_norm
}  // namespace apexfx
