// How blocks of a cluster wait for each other, read each other's shared memory and copy into it.

#pragma once

#include <stdint.h>

#include <type_traits>

namespace {

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
// The address of `at` in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t at, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
__device__ __forceinline__ void arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// To the same place of both blocks, counted at the barrier of each.
__device__ __forceinline__ void copy_to_both(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)3) : "memory");
}
// Two words to the place of `at` in another block of the cluster.
__device__ __forceinline__ void write_to(uint32_t at, int block, uint2 words) {
  asm volatile("st.shared::cluster.v2.u32 [%0], {%1,%2};" :: "r"(address_in(at, block)), "r"(words.x), "r"(words.y) : "memory");
}
// Four words at the place of `at` in another block of the cluster.
template <class Acc> __device__ __forceinline__ void read_from(Acc (&v)[4], uint32_t at, int block) {
  uint32_t w[4];
  const uint32_t there = address_in(at, block);
  asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(there) : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = std::is_same_v<Acc, int> ? (Acc)(int)w[i] : (Acc)__uint_as_float(w[i]);
}

}  // namespace
