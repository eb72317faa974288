// How blocks of a cluster wait for each other and read each other's shared memory.

#pragma once

#include <stdint.h>

#include <type_traits>

namespace {

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// Four words at the place of `at` in another block of the cluster.
template <class Acc> __device__ __forceinline__ void read_from(Acc (&v)[4], uint32_t at, int block) {
  uint32_t there, w[4];
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(there) : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = std::is_same_v<Acc, int> ? (Acc)(int)w[i] : (Acc)__uint_as_float(w[i]);
}

}  // namespace
