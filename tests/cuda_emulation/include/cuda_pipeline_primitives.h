// Asynchronous copies for the emulation: made when they are waited for, no earlier.
#pragma once

#include <cuda_runtime.h>

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  const bool aligned = (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % bytes == 0;
  if (!aligned || (bytes != 4 && bytes != 8 && bytes != 16)) {
    fprintf(stderr, "%zu bytes cannot be copied from %p to %p\n", bytes, from, to);
    abort();
  }
  emulation::fibers[emulation::current]->copies.back().push_back({to, from, bytes});
}

inline void __pipeline_commit() { emulation::fibers[emulation::current]->copies.push_back({}); }

inline void __pipeline_wait_prior(size_t prior) {
  auto& copies = emulation::fibers[emulation::current]->copies;
  for (; copies.size() > prior + 1; copies.pop_front())
    for (const auto& copy : copies.front()) memcpy(copy.to, copy.from, copy.bytes);
}
