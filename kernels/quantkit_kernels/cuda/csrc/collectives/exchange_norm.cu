// The sum over the GPUs of one host, its sum with the residual, and the norm of that, in one launch: what a half of a layer ends and the next
// begins with. Each is rounded as exchange.cu and norm.cu round it.
//
// A cluster of up to eight blocks has a row, a thread a word of 16 bytes. Sums of squares meet in the blocks' shared memory.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "collectives/inbox.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/lanes.cuh"
#include "common/launch.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct ExchangeNorm {
  const void *x, *residual, *weight;  // [rows, h] twice, [h]
  void *normed, *total;               // [rows, h]
  int rows, h, rank, room;            // room: words of a sender's part of an inbox
  float eps;
};

namespace {

constexpr int kMostThreads = 1024, kMostBlocks = 8;

// To the same place of another block of the cluster.
__device__ __forceinline__ void write_to(float* place, float v, int block) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address_in(shared_address(place), block)), "f"(v) : "memory");
}

template <class T, int RANKS>
__global__ void __launch_bounds__(kMostThreads) exchange_norm(const __grid_constant__ ExchangeNorm m, const __grid_constant__ Inboxes inboxes, State* state) {
  __shared__ float sums[kMostThreads / 32 * kMostBlocks];
  const int at = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x / 32;
  const bool mine = at < m.h / 8;
  const size_t word = (size_t)blockIdx.y * (m.h / 8) + at;
  // Before a block writes into another, that must have begun.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  Eight<T> gain = {}, v = {}, residual = {};
  if (mine) gain = reinterpret_cast<const Eight<T>*>(m.weight)[at];
  // A few blocks: the next kernel may ask for its weights while these wait.
  let_successor_start();
  wait_for_predecessor();
  const unsigned calls = *(volatile unsigned*)&state->calls;
  const size_t half = (size_t)(calls & 1) * RANKS * m.room;
  uint4 parts[RANKS] = {};
  if (mine) {
    const uint4 own = sendable(reinterpret_cast<const uint4*>(m.x)[word]);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (r != m.rank) write_word(inboxes.of[r] + half + (size_t)m.rank * m.room + word, own);
      else parts[r] = own;
    }
    residual = reinterpret_cast<const Eight<T>*>(m.residual)[word];
  }
  count_call(state, calls, gridDim.x * gridDim.y);
  if (mine) {
    receive<RANKS>(parts, inboxes.of[m.rank] + half + word, m.rank, m.room);
    v.bits = sum<T>(parts);
  }
  float squares = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) v.set(j, v.get(j) + residual.get(j)), squares += v.get(j) * v.get(j);
  if (mine) reinterpret_cast<Eight<T>*>(m.total)[word] = v;
  squares = warp_sum(squares);
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  if (lane < gridDim.x) write_to(sums + blockIdx.x * warps + warp, squares, lane);
  cluster_barrier();
  float total = 0;
  for (int w = 0; w < (int)gridDim.x * warps; ++w) total += sums[w];
  const float factor = rsqrtf(total / m.h + m.eps);
#pragma unroll
  for (int j = 0; j < 8; ++j) v.set(j, v.get(j) * factor * gain.get(j));
  if (mine) reinterpret_cast<Eight<T>*>(m.normed)[word] = v;
}

template <class T> int run(const ExchangeNorm& m, int ranks, const Inboxes& inboxes, void* state, void* stream) {
  int threads = 128;
  while (threads * kMostBlocks * 8 < m.h) threads *= 2;
  const int blocks = (m.h / 8 + threads - 1) / threads;
  const auto go = [&](auto kernel) { return start_clusters(kernel, dim3(blocks, m.rows), threads, 0, blocks, stream, m, inboxes, (State*)state); };
  switch (ranks) {
    case 2: return go(exchange_norm<T, 2>);
    case 3: return go(exchange_norm<T, 3>);
    case 4: return go(exchange_norm<T, 4>);
    case 5: return go(exchange_norm<T, 5>);
    case 6: return go(exchange_norm<T, 6>);
    case 7: return go(exchange_norm<T, 7>);
    case 8: return go(exchange_norm<T, 8>);
  }
  return (int)cudaErrorInvalidValue;
}

}  // namespace

// dtype: 0 bf16, 1 fp16. h: a multiple of 8, at most 65536. inboxes: a pointer per rank. Returns a cudaError_t.
extern "C" int qk_exchange_norm(const ExchangeNorm* m, int dtype, int ranks, void* const* inboxes, void* state, void* s) {
  Inboxes all = {};
  for (int r = 0; r < ranks && r < MOST_RANKS; ++r) all.of[r] = (uint4*)inboxes[r];
  return dtype == 0 ? run<__nv_bfloat16>(*m, ranks, all, state, s) : run<__half>(*m, ranks, all, state, s);
}
