// The sum over the GPUs of one host, its sum with the residual, and the norm of that, in one launch: what a half of a layer ends and the next
// begins with. Before them, where it is asked for, the sum over each token's experts. Each is rounded as sum_pairs.cu, exchange.cu and norm.cu
// round it.
//
// A cluster of up to eight blocks has a row, a thread a word of 16 bytes. Sums of squares meet in the blocks' shared memory.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "collectives/inbox.cuh"
#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/lanes.cuh"
#include "common/launch.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct ExchangeNorm {
  const void* x;                               // [rows, h], or null:
  const float* pairs;                          // [rows * top_k, h], multiplied with the routing weights before
  const void *residual, *weight;               // [rows, h], [h]
  void *normed, *total;                        // [rows, h]
  int* counters;                               // of fused_experts.cu: `count` of them become zero where x is null
  int count, rows, h, top_k, rank, room;       // room: words of a sender's part of an inbox
  float eps;
};

namespace {

using bf16 = __nv_bfloat16;
constexpr int kFewThreads = 128, kMostThreads = 1024, kMostBlocks = 8;

// To the same place of another block of the cluster.
__device__ __forceinline__ void write_to(float* place, float v, int block) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(address_in(shared_address(place), block)), "f"(v) : "memory");
}

// The sum over a token's experts of eight columns, as sum_pairs.cu has it. AT_ONCE are asked for before the first is added.
template <class T, int AT_ONCE> __device__ __forceinline__ Eight<T> sum_of_pairs(const float* from, int top_k, int h) {
  float sum[8] = {};
  for (int first = 0; first < top_k; first += AT_ONCE) {
    float4 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (first + k >= top_k) continue;
      const float4* one = reinterpret_cast<const float4*>(from + (size_t)(first + k) * h);
      low[k] = one[0], high[k] = one[1];
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (first + k >= top_k) continue;
      sum[0] += low[k].x, sum[1] += low[k].y, sum[2] += low[k].z, sum[3] += low[k].w;
      sum[4] += high[k].x, sum[5] += high[k].y, sum[6] += high[k].z, sum[7] += high[k].w;
    }
  }
  Eight<T> rounded;
#pragma unroll
  for (int j = 0; j < 8; ++j) rounded.set(j, sum[j]);
  return rounded;
}

// `count` numbers of shared memory, in their order.
template <int AT_ONCE> __device__ __forceinline__ float sum_in_order(const float* from, int count) {
  float total = 0;
  for (int first = 0; first < count; first += AT_ONCE) {
    float part[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) part[i] = first + i < count ? from[first + i] : 0.f;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) total += part[i];
  }
  return total;
}

// THREADS: of a block at most. With few of them a thread has registers for all of its pairs at once.
template <class T, int RANKS, bool PAIRS, int THREADS>
__global__ void __launch_bounds__(THREADS) exchange_norm(const __grid_constant__ ExchangeNorm m, const __grid_constant__ Inboxes inboxes, State* state) {
  constexpr bool few = THREADS == kFewThreads;
  __shared__ float sums[THREADS / 32 * kMostBlocks];
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
    if constexpr (PAIRS) v = sum_of_pairs<T, few ? 9 : 2>(m.pairs + (size_t)blockIdx.y * m.top_k * m.h + at * 8, m.top_k, m.h);
    else v = reinterpret_cast<const Eight<T>*>(m.x)[word];
    const uint4 own = sendable(v.bits);
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      if (r != m.rank) write_word(inboxes.of[r] + half + (size_t)m.rank * m.room + word, own);
      else parts[r] = own;
    }
    residual = reinterpret_cast<const Eight<T>*>(m.residual)[word];
    for (int i = word; PAIRS && i < m.count; i += m.rows * (m.h / 8)) m.counters[i] = 0;
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
  const float factor = rsqrtf(sum_in_order<few ? 32 : 8>(sums, gridDim.x * warps) / m.h + m.eps);
#pragma unroll
  for (int j = 0; j < 8; ++j) v.set(j, v.get(j) * factor * gain.get(j));
  if (mine) reinterpret_cast<Eight<T>*>(m.normed)[word] = v;
}

template <class T, bool PAIRS> int run(const ExchangeNorm& m, int ranks, const Inboxes& inboxes, void* state, void* stream) {
  int threads = kFewThreads;
  while (threads * kMostBlocks * 8 < m.h) threads *= 2;
  const int blocks = (m.h / 8 + threads - 1) / threads;
  const auto go = [&](auto few, auto many) {
    return start_clusters(threads == kFewThreads ? few : many, dim3(blocks, m.rows), threads, 0, blocks, stream, m, inboxes, (State*)state);
  };
  const auto of = [&]<int RANKS>(std::integral_constant<int, RANKS>) { return go(exchange_norm<T, RANKS, PAIRS, kFewThreads>, exchange_norm<T, RANKS, PAIRS, kMostThreads>); };
  switch (ranks) {
    case 2: return of(std::integral_constant<int, 2>());
    case 3: return of(std::integral_constant<int, 3>());
    case 4: return of(std::integral_constant<int, 4>());
    case 5: return of(std::integral_constant<int, 5>());
    case 6: return of(std::integral_constant<int, 6>());
    case 7: return of(std::integral_constant<int, 7>());
    case 8: return of(std::integral_constant<int, 8>());
  }
  return (int)cudaErrorInvalidValue;
}

}  // namespace

// dtype: 0 bf16, 1 fp16. h: a multiple of 8, at most 65536. inboxes: a pointer per rank. Returns a cudaError_t.
extern "C" int qk_exchange_norm(const ExchangeNorm* m, int dtype, int ranks, void* const* inboxes, void* state, void* s) {
  Inboxes all = {};
  for (int r = 0; r < ranks && r < MOST_RANKS; ++r) all.of[r] = (uint4*)inboxes[r];
  if (dtype == 0) return m->x ? run<bf16, false>(*m, ranks, all, state, s) : run<bf16, true>(*m, ranks, all, state, s);
  return m->x ? run<__half, false>(*m, ranks, all, state, s) : run<__half, true>(*m, ranks, all, state, s);
}
