// 64-byte vectors, which the compiler breaks up for machines with narrower ones, what the loops of batch norm load into
// them (float, double, or bfloat16 as bits), and the two kinds of loops over a plane. For functions marked
// APEXFX_CLONES only.
#pragma once

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

#include "batch_norm_loops.h"

namespace apexfx {
namespace batch_norm {

APEXFX_HD float value(float x) { return x; }
APEXFX_HD double value(double x) { return x; }
APEXFX_HD float value(Bf16 x) { return bfloat16_to_float(x.bits); }
APEXFX_HD void assign(float& out, float x) { out = x; }
APEXFX_HD void assign(double& out, double x) { out = x; }
APEXFX_HD void assign(Bf16& out, float x) { out.bits = float_to_bfloat16(x); }

template <typename T, int64_t N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <typename T, int64_t N = 64 / sizeof(T)>
using Vector = typename VectorOf<T, N>::type;

template <typename T>
constexpr int64_t kLanes = 64 / sizeof(T);

template <typename V>
APEXFX_HD V load_as(const void* x) {
  V v;
  memcpy(&v, x, sizeof(v));
  return v;
}

// As many elements as V holds, a vector of any size or one element.
template <typename V, typename E>
APEXFX_HD V load(const E* x) {
  constexpr int64_t lanes = sizeof(V) / sizeof(value(E{}));
  if constexpr (lanes == 1) return value(*x);
  else if constexpr (!std::is_same_v<E, Bf16>) return load_as<V>(x);
  else {
    const auto wide = __builtin_convertvector(load_as<Vector<uint16_t, lanes>>(x), Vector<uint32_t, lanes>) << 16;
    return load_as<V>(&wide);
  }
}

// The bits of bfloat16 in the upper half of each lane, and others below; as float_to_bfloat16.
template <typename V>
APEXFX_HD auto rounded(const V& v) {
  using Bits = Vector<uint32_t, sizeof(V) / sizeof(uint32_t)>;
  const auto bits = load_as<Bits>(&v);
  const Bits near = bits + 0x7fffu + ((bits >> 16) & 1u);
  return v != v ? (bits & 0u) + 0x7fc00000u : near;
}

template <typename E, typename V>
APEXFX_HD void store(E* out, const V& v) {
  constexpr int64_t lanes = sizeof(V) / sizeof(value(E{}));
  if constexpr (lanes == 1) {
    assign(*out, v);
  } else if constexpr (!std::is_same_v<E, Bf16>) {
    memcpy(out, &v, sizeof(v));
  } else {
    const auto bits = __builtin_convertvector(rounded(v) >> 16, Vector<uint16_t, lanes>);
    memcpy(out, &bits, sizeof(bits));
  }
}

// 64 bytes of elements as vectors, of which loops that treat all elements alike need not know the order: bfloat16 gives
// those at even places and those at odd ones, which takes no shuffle.
template <typename E>
struct Block;
template <typename T>
struct PlainBlock {
  static constexpr int64_t kElements = 64 / sizeof(T);
  static constexpr int kParts = 1;
  using Value = T;
  Vector<T> part[1];
  APEXFX_HD void load(const T* x) { part[0] = load_as<Vector<T>>(x); }
  APEXFX_HD void store(T* out) const { memcpy(out, part, sizeof(part)); }
};
template <>
struct Block<float> : PlainBlock<float> {};
template <>
struct Block<double> : PlainBlock<double> {};
template <>
struct Block<Bf16> {
  static constexpr int64_t kElements = 32;
  static constexpr int kParts = 2;
  using Value = float;
  Vector<float> part[2];
  APEXFX_HD void load(const Bf16* x) {
    const auto bits = load_as<Vector<uint32_t>>(x);
    const auto even = bits << 16, odd = bits & 0xffff0000u;
    part[0] = load_as<Vector<float>>(&even);
    part[1] = load_as<Vector<float>>(&odd);
  }
  APEXFX_HD void store(Bf16* out) const {
    const auto bits = rounded(part[0]) >> 16 | (rounded(part[1]) & 0xffff0000u);
    memcpy(out, &bits, sizeof(bits));
  }
};

template <typename E>
APEXFX_HD Block<E> load_block(const E* x) {
  Block<E> block;
  block.load(x);
  return block;
}

// The first n elements, fewer than fill a block.
template <typename E>
APEXFX_HD Block<E> load_part(const E* x, int64_t n) {
  alignas(64) E all[Block<E>::kElements] = {};
  for (int64_t k = 0; k < n; ++k) all[k] = x[k];
  return load_block<E>(all);
}

template <typename E, typename F, typename... In>
APEXFX_HD Block<E> mapped(F&& f, const In&... in) {
  Block<E> out;
  for (int p = 0; p < Block<E>::kParts; ++p) out.part[p] = f(in.part[p]...);
  return out;
}

// out[i] = f(in[i]...), where the last block overlaps the one before it: what belongs to both is computed twice.
template <typename E, typename F, typename... In>
APEXFX_HD void map_elements(int64_t n, E* __restrict__ out, F&& f, const In* __restrict__... in) {
  constexpr int64_t step = Block<E>::kElements;
  int64_t i = 0;
  for (; i + step <= n; i += step) mapped<E>(f, load_block<E>(in + i)...).store(out + i);
  if (i == n) return;
  if (n >= step) {
    mapped<E>(f, load_block<E>(in + n - step)...).store(out + n - step);
    return;
  }
  alignas(64) E all[step];
  mapped<E>(f, load_part<E>(in, n)...).store(all);
  for (int64_t k = 0; k < n; ++k) out[k] = all[k];
}

// Two values that go together, each a vector or one element.
template <typename X>
struct Pair {
  X first, second;
  APEXFX_HD void operator+=(const Pair& other) {
    first += other.first;
    second += other.second;
  }
};

// The bits that keep the elements [begin, end) of a block in its part p; one of them is its first or its last. They are
// loaded, because compilers compare vectors of constants lane by lane.
template <typename E>
APEXFX_HD Vector<int32_t> mask_of(int64_t begin, int64_t end, int p) {
  alignas(64) static const struct {
    uint64_t none[8] = {}, all[8] = {~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull}, none_again[8] = {};
  } masks;
  const int64_t at = begin > 0 ? 64 - begin * sizeof(E) : 128 - end * sizeof(E);
  const auto mask = load_as<Vector<int32_t>>(reinterpret_cast<const char*>(&masks) + at);
  if constexpr (Block<E>::kParts == 1) return mask;
  else return p == 0 ? mask << 16 >> 16 : mask >> 16;
}

template <typename V>
APEXFX_HD V kept(const V& v, const Vector<int32_t>& mask) {  // 0 elsewhere, also where that is NaN
  const auto bits = load_as<Vector<int32_t>>(&v) & mask;
  return load_as<V>(&bits);
}

APEXFX_HD void add_lanes(const Vector<double>& v, double* lanes) {
  Vector<double, 4> half[2];
  memcpy(half, &v, sizeof(v));
  half[0] = load_as<Vector<double, 4>>(lanes) + (half[0] + half[1]);
  memcpy(lanes, half, sizeof(half[0]));
}
APEXFX_HD void add_lanes(const Vector<float>& v, double* lanes) {
  Vector<float, 8> half[2];
  memcpy(half, &v, sizeof(v));
  half[0] += half[1];
  Vector<float, 4> quarter[2];
  memcpy(quarter, half, sizeof(quarter));
  const auto wide = __builtin_convertvector(quarter[0] + quarter[1], Vector<double, 4>);
  const auto sum = load_as<Vector<double, 4>>(lanes) + wide;
  memcpy(lanes, &sum, sizeof(sum));
}

// sums += terms(in[i]...), kSpan elements at a time.
template <typename E, typename F, typename... In>
APEXFX_HD void add_terms(int64_t n, LaneSums& sums, F&& terms, const In* __restrict__... in) {
  constexpr int64_t step = Block<E>::kElements, kSpan = 4096;
  constexpr int parts = Block<E>::kParts;
  using P = Pair<Vector<typename Block<E>::Value>>;
  for (int64_t begin = 0; begin < n; begin += kSpan) {
    const int64_t end = n < begin + kSpan ? n : begin + kSpan;
    P all[4] = {};
    const auto add = [&](int into, const auto&... block) __attribute__((always_inline)) {
      for (int p = 0; p < parts; ++p) all[into + p] += terms(block.part[p]...);
    };
    int64_t i = begin;
    for (; i + 4 / parts * step <= end; i += 4 / parts * step)
      for (int k = 0; k < 4; k += parts) add(k, load_block<E>(in + i + k / parts * step)...);
    for (; i + step <= end; i += step) add(0, load_block<E>(in + i)...);
    if (i < end) {
      const int64_t first = n >= step ? step - (end - i) : 0, last = n >= step ? step : n;
      const auto add_kept = [&](const auto&... block) __attribute__((always_inline)) {
        for (int p = 0; p < parts; ++p) {
          const P pair = terms(block.part[p]...);
          const auto mask = mask_of<E>(first, last, p);
          all[2 + p] += P{kept(pair.first, mask), kept(pair.second, mask)};
        }
      };
      if (n >= step) add_kept(load_block<E>(in + end - step)...);
      else add_kept(load_part<E>(in, n)...);
    }
    add_lanes((all[0].first + all[1].first) + (all[2].first + all[3].first), sums.first);
    add_lanes((all[0].second + all[1].second) + (all[2].second + all[3].second), sums.second);
  }
}

}  // namespace batch_norm
}  // namespace apexfx
