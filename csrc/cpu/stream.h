// Loops over operands too large for any cache, which take as long as memory does.
#pragma once

#include "../common.h"

namespace apexfx {

constexpr int64_t kLine = 16;    // floats to a cache line
constexpr int64_t kAhead = 512;  // floats: how far ahead of its turn a line is asked for

// Calls update(i) for i < n, asking for the lines of `operands` ahead of their turn (the processor's own prefetching
// stops at the end of every page). An update must not depend on another.
template <typename F, typename... T>
APEXFX_HD void stream(int64_t n, F update, T*... operands) {
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    (__builtin_prefetch(operands + i + kAhead), ...);
#pragma GCC ivdep
    for (int64_t j = 0; j < kLine; ++j) update(i + j);
  }
  for (; i < n; ++i) update(i);
}

}  // namespace apexfx
