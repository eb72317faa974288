// Sum over the GPUs of one host, for the small tensors of a decode step: every rank writes its values into an inbox on each of the others
// and adds up what arrived in its own, in the order of the ranks, so that all of them hold the same bits. Or, instead of adding, puts what
// arrived side by side.
//
// An empty word is EMPTY; a value that looks like it, a NaN of its own kind, is sent as another NaN. So the data are their own flag, and one
// pass over the link is all that a rank waits for. Calls take the two halves of an inbox in turn. Who has read a word empties it: a peer
// writes there again two calls later, and then it has seen this rank's values of the call between, which were sent after this call ended.
// Every rank must make the same calls in the same order. No multicast.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/launch.cuh"

namespace {

constexpr int MOST_RANKS = 8, MOST_THREADS = 512;
constexpr unsigned EMPTY = 0xffffffffu, OTHER_NAN = 0x7fff7fffu;

// Memory of each rank as this process sees it.
struct Inboxes {
  uint4* of[MOST_RANKS];
};

// `calls` made so far on this device, and blocks of the running one that `arrived`.
struct State {
  unsigned calls, arrived;
};

__device__ __forceinline__ uint4 read_word(const uint4* from) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void write_word(uint4* to, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ bool is_full(uint4 v) { return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY; }

__device__ __forceinline__ uint4 sendable(uint4 v) {
  const auto fix = [](unsigned word) { return word == EMPTY ? OTHER_NAN : word; };
  return {fix(v.x), fix(v.y), fix(v.z), fix(v.w)};
}

template <class T, int RANKS> __device__ __forceinline__ uint4 sum(const uint4 (&parts)[RANKS]) {
  constexpr int VALUES = sizeof(uint4) / sizeof(T);
  float sums[VALUES] = {};
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sums[i] += float(reinterpret_cast<const T*>(&parts[r])[i]);
  uint4 total;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) reinterpret_cast<T*>(&total)[i] = T(sums[i]);
  return total;
}

struct Gather {};

// One thread a word of 16 bytes. An inbox: two halves of RANKS parts of `room` words, a part per sender. T: what is added up, in float32; or
// Gather: rows of `row_words` words of each rank come to lie side by side. SCATTER: x has `words` words for each rank, which alone adds them.
template <class T, int RANKS, bool SCATTER>
__global__ void __launch_bounds__(MOST_THREADS)
    exchange(const uint4* x, uint4* out, const __grid_constant__ Inboxes inboxes, State* state, int rank, int words, int row_words, int room) {
  wait_for_predecessor();
  let_successor_start();
  const unsigned calls = *(volatile unsigned*)&state->calls;
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  const size_t half = (size_t)(calls & 1) * RANKS * room;
  const bool mine = at < words;
  uint4 parts[RANKS] = {};
  if (mine) {
#pragma unroll
    for (int r = 0; r < RANKS; ++r) {
      const uint4 own = sendable(x[at + (SCATTER ? (size_t)r * words : 0)]);
      if (r != rank) write_word(inboxes.of[r] + half + (size_t)rank * room + at, own);
      else parts[r] = own;
    }
  }
  __syncthreads();  // every thread knows the number of calls
  if (threadIdx.x == 0 && atomicInc(&state->arrived, gridDim.x - 1) == gridDim.x - 1) *(volatile unsigned*)&state->calls = calls + 1;
  if (!mine) return;
  uint4* inbox = inboxes.of[rank] + half + at;
  bool full;
  do {
    full = true;
#pragma unroll
    for (int r = 0; r < RANKS; ++r)
      if (r != rank) {
        parts[r] = read_word(inbox + (size_t)r * room);
        full &= is_full(parts[r]);
      }
  } while (!full);
#pragma unroll
  for (int r = 0; r < RANKS; ++r)
    if (r != rank) write_word(inbox + (size_t)r * room, {EMPTY, EMPTY, EMPTY, EMPTY});
  if constexpr (std::is_same_v<T, Gather>) {
    const size_t to = (size_t)(at / row_words) * RANKS * row_words + at % row_words;
#pragma unroll
    for (int r = 0; r < RANKS; ++r) out[to + (size_t)r * row_words] = parts[r];
  } else {
    out[at] = sum<T>(parts);
  }
}

template <class T, bool SCATTER = false> int run(int ranks, const void* x, void* out, const Inboxes& inboxes, void* state, int rank, int words, int row_words, int room, void* stream) {
  int threads = 128;
  while (threads < MOST_THREADS && (words + threads - 1) / threads > 132) threads *= 2;
  const auto go = [&](auto kernel) {
    return start(kernel, (words + threads - 1) / threads, threads, 0, stream, (const uint4*)x, (uint4*)out, inboxes, (State*)state, rank, words, row_words, room);
  };
  switch (ranks) {
    case 2: return go(exchange<T, 2, SCATTER>);
    case 3: return go(exchange<T, 3, SCATTER>);
    case 4: return go(exchange<T, 4, SCATTER>);
    case 5: return go(exchange<T, 5, SCATTER>);
    case 6: return go(exchange<T, 6, SCATTER>);
    case 7: return go(exchange<T, 7, SCATTER>);
    case 8: return go(exchange<T, 8, SCATTER>);
  }
  return (int)cudaErrorInvalidValue;
}

}  // namespace

// Memory of this rank that others may open: emptied, with a handle of 64 bytes for another process.
extern "C" int qk_inbox_make(size_t bytes, void** memory, void* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == 64);
  int error = (int)cudaMalloc(memory, bytes);
  if (!error) error = (int)cudaMemset(*memory, 0xff, bytes);
  if (!error) error = (int)cudaDeviceSynchronize();
  if (!error) error = (int)cudaIpcGetMemHandle((cudaIpcMemHandle_t*)handle, *memory);
  return error;
}

extern "C" int qk_inbox_open(const void* handle, void** memory) {
  return (int)cudaIpcOpenMemHandle(memory, *(const cudaIpcMemHandle_t*)handle, cudaIpcMemLazyEnablePeerAccess);
}

extern "C" const char* qk_error_text(int error) { return cudaGetErrorString((cudaError_t)error); }

// dtype: 0 bf16, 1 fp16, 2 float32, 3 whatever is to be put side by side; 4, 5, 6 as 0, 1, 2 where each rank adds its own part of x alone.
// inboxes: a pointer per rank. words: of 16 bytes, of what a rank gets from one, at most `room`.
extern "C" int qk_peer_exchange(const void* x, void* out, void* const* inboxes, void* state, int dtype, int ranks, int rank, int words, int row_words, int room,
                                void* stream) {
  Inboxes all = {};
  for (int r = 0; r < ranks && r < MOST_RANKS; ++r) all.of[r] = (uint4*)inboxes[r];
  if (dtype == 0) return run<__nv_bfloat16>(ranks, x, out, all, state, rank, words, row_words, room, stream);
  if (dtype == 1) return run<__half>(ranks, x, out, all, state, rank, words, row_words, room, stream);
  if (dtype == 2) return run<float>(ranks, x, out, all, state, rank, words, row_words, room, stream);
  if (dtype == 4) return run<__nv_bfloat16, true>(ranks, x, out, all, state, rank, words, row_words, room, stream);
  if (dtype == 5) return run<__half, true>(ranks, x, out, all, state, rank, words, row_words, room, stream);
  if (dtype == 6) return run<float, true>(ranks, x, out, all, state, rank, words, row_words, room, stream);
  return run<Gather>(ranks, x, out, all, state, rank, words, row_words, room, stream);
}
