// Large outputs on huge pages. A fresh output is written once, and at 4 KiB a page the faults cost several times what
// the kernel does: glibc gives allocations from 32 MiB on fresh pages every time, and smaller ones whenever the top of
// the heap was handed back. (THP_MEM_ALLOC_ENABLE=1 asks for all of torch's.)
#pragma once

#include "vector.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace apexfx {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Asks for huge pages inside `t`, which is left as it is where it holds fewer than two of them.
inline Tensor on_huge_pages(Tensor t) {
#ifdef __linux__
  const uintptr_t begin = reinterpret_cast<uintptr_t>(t.mutable_data_ptr());
  const uintptr_t end = begin + static_cast<uintptr_t>(t.numel() * element_size(t.scalar_type()));
  const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1), last = end & ~(kHugePage - 1);
  if (end - begin >= 2 * kHugePage) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return t;
}

}  // namespace apexfx
