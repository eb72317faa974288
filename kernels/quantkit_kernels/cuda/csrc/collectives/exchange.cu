// Sum over the GPUs of one host, for the small tensors of a decode step: every rank writes its values into an inbox on each of the others
// and adds up what arrived in its own, in the order of the ranks, so that all of them hold the same bits (inbox.cuh). Or, instead of adding,
// puts what arrived side by side.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "collectives/inbox.cuh"
#include "common/launch.cuh"

namespace {

constexpr int MOST_THREADS = 512;

struct Gather {};

// One thread a word of 16 bytes. T: what is added up, in float32; or Gather: rows of `row_words` words of each rank come to lie side by side.
// SCATTER: x has `words` words for each rank, which alone adds them.
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
  count_call(state, calls, gridDim.x);
  if (!mine) return;
  receive<RANKS>(parts, inboxes.of[rank] + half + at, rank, room);
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
