// checksum on the CPU; see csrc/checksum.h.
#include "../checksum.h"

#include "chunks.h"

namespace apexfx {
namespace {

#define APEXFX_WORD_SUM(T)                                              \
  APEXFX_CLONES uint64_t word_sum(const T* __restrict__ x, int64_t n) { \
    WordSum sum;                                                        \
    for (int64_t i = 0; i < n; ++i) sum.add(x[i]);                      \
    return sum.total();                                                 \
  }

APEXFX_WORD_SUM(uint8_t)
APEXFX_WORD_SUM(uint16_t)
APEXFX_WORD_SUM(uint32_t)
APEXFX_WORD_SUM(uint64_t)

struct Cpu {
  static void add(const std::vector<Position>& positions, const Tensor& sums) {
    std::vector<int64_t> numels;
    for (const Position& position : positions) numels.push_back(position.numel);
    uint64_t* totals = static_cast<uint64_t*>(sums.data_ptr());
    Chunks(numels).for_each([&](const Chunk& chunk) {
      const Position& position = positions[chunk.tensor];
      dispatch_word(position.dtype[0], [&](auto zero) {
        const auto* data = static_cast<const decltype(zero)*>(position.data[0]) + chunk.begin;
        __atomic_fetch_add(&totals[chunk.tensor], word_sum(data, chunk.count), __ATOMIC_RELAXED);
      });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(apexfx, CPU, m) { m.impl("checksum", TORCH_BOX(&checksum<Cpu>)); }

}  // namespace apexfx
