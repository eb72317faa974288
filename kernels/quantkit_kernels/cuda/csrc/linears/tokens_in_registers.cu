// y[M, N] = x[M, K] @ W[N, K]^T for a packed W and few tokens M, of one linear or of routed experts. Each warp has its own weights, and its
// tokens in registers.
//
// With few tokens the product is limited by memory bandwidth: every weight is read once and multiplied with all the tokens that need it. So W
// is the A operand (16 rows) of mma.sync and the tokens are the B operand (8 columns). The bulk copy engine copies runs of the packed weights
// (packed.cuh) into a ring in shared memory that each warp has for itself, with one mbarrier for each place: no warp waits for another, and up
// to 190 KB a multiprocessor are on their way without a register spent on them. A lane's share of x comes through L1.
//
// A block is 8 warps: `wn` of them side by side along N (16 * RT rows each), the others along K, where they take chunks of 128 in turn. Blocks
// may split K further (`split`). Partial sums of warps meet in shared memory; those of blocks meet in a workspace, where the last of these
// blocks adds them up in their order (signals.cuh): results do not depend on timing.
//
// A kernel may start while its predecessor writes its last results (programmatic dependent launch). It asks for weights, which nothing
// computes, at once, and for everything else after griddepcontrol.wait.

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "common/launch.cuh"
#include "common/signals.cuh"
#include "linears/gemm_params.cuh"
#include "linears/warp_sums.cuh"
#include "linears/warp_weights.cuh"

namespace {

// Which pairs are of one expert: writes those numbered first .. first + room - 1 into `list`, in order, and returns how many there are.
// The list is complete after the block's next barrier.
__device__ int list_pairs(const GemmParams& p, int expert, int first, int room, int* list) {
  __shared__ int counts[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int each = (p.pairs + kThreads - 1) / kThreads * 32, begin = warp * each, end = min(p.pairs, begin + each);
  const auto ballot_of = [&](int base) {
    return __ballot_sync(0xffffffffu, base + lane < end && p.ids[(size_t)(base + lane) * p.ids_stride] == expert);
  };
  int count = 0;
#pragma unroll 4
  for (int base = begin; base < end; base += 32) count += __popc(ballot_of(base));
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  int place = -first, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) place += counts[w];
    total += counts[w];
  }
  for (int base = begin; base < end && count > 0; base += 32) {
    const unsigned ballot = ballot_of(base);
    const int mine = place + __popc(ballot & ((1u << lane) - 1));
    if ((ballot >> lane & 1) && mine >= 0 && mine < room) list[mine] = base + lane;
    place += __popc(ballot);
  }
  return total;
}

// Sums over warps along K are in `red` [warp along K][rows of the block][tokens]; what they become is the epilogue's business.
template <int FMT, class T, int RT, int MT, class Acc>
__device__ void finish_tile(const GemmParams& p, Acc* red, int block_n, int part, int expert, int tile_id, const int* tokens, int count) {
  constexpr int tokens_per_tile = 8 * MT;
  const int rows = p.wn * RT * 16, wk = kWarps / p.wn, outputs = rows * tokens_per_tile;
  // The sum over this block's warps goes to the first warp's place.
  for (int i = threadIdx.x; i < outputs; i += kThreads) {
    Acc sum = 0;
    for (int w = 0; w < wk; ++w) sum += red[w * outputs + i];
    red[i] = sum;
  }
  __syncthreads();
  if (p.split > 1) {
    // The last of the blocks that share K was started last, so it may wait for the others.
    Acc* all = reinterpret_cast<Acc*>(p.sums) + (size_t)tile_id * p.split * outputs;
    if (part < p.split - 1) {
      for (int i = threadIdx.x; i < outputs; i += kThreads) hand_over(all + (size_t)part * outputs + i, red[i]);
      return;
    }
    for (int i = threadIdx.x; i < outputs; i += kThreads) red[i] = take_over(all + i, outputs, p.split - 1) + red[i];
    __syncthreads();
  }
  const float* row_scale = p.row_scale + (size_t)expert * p.n + (size_t)block_n * rows;
  const int produced = p.epilogue == kSiluMul ? rows / 2 : rows;
  for (int i = threadIdx.x; i < produced * count; i += kThreads) {
    const int r = i % produced, t = i / produced, token = tokens[t];
    const float x_scale = FMT == kInt8 ? p.x_scale[p.epilogue == kSiluMul ? token / p.top_k : token] : 1.f;
    const int feature = block_n * produced + r;
    if (feature >= p.out_n) continue;
    if (p.epilogue == kSiluMul) {
      // Rows come as 8 of gate, 8 of up.
      const int gate = (r / 8) * 16 + r % 8;
      const float a = float(red[gate * tokens_per_tile + t]) * row_scale[gate] * x_scale;
      const float b = float(red[(gate + 8) * tokens_per_tile + t]) * row_scale[gate + 8] * x_scale;
      store<T>(p.out, (size_t)token * p.out_n + feature, gated(a, b, p.limit));
    } else {
      const float y = float(red[r * tokens_per_tile + t]) * row_scale[r] * x_scale;
      if (p.epilogue == kWeigh) reinterpret_cast<float*>(p.out)[(size_t)token * p.out_n + feature] = y * p.pair_weights[token];
      else store<T>(p.out, (size_t)token * p.out_n + feature, y);
    }
  }
}

template <int FMT, class T, int G, int RT, int MT, bool BULK>
__global__ void __launch_bounds__(kThreads, Shape<FMT, G, RT, MT, BULK>::blocks) tokens_in_registers(const GemmParams p) {
  using S = Shape<FMT, G, RT, MT, BULK>;
  using Weights = std::conditional_t<BULK, Ring<FMT, G, RT, MT>, Direct<FMT, G, RT, MT>>;
  using Acc = typename Sums<FMT, T, G, RT, MT>::Acc;
  constexpr int tokens_per_tile = 8 * MT;
  extern __shared__ __align__(128) char shared[];
  __shared__ int list[tokens_per_tile];
  Acc* red = reinterpret_cast<Acc*>(shared + S::slots * kWarps * S::step_bytes);
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), g = lane >> 2, q = lane & 3;
  const int block_n = blockIdx.x / p.split, part = blockIdx.x % p.split;
  const int warp_n = warp % p.wn, warp_k = warp / p.wn, wk = kWarps / p.wn;
  const int row = (block_n * p.wn + warp_n) * RT * 16, tile = (row % 64) / 16;
  const int all_chunks = p.k / 128, begin = all_chunks * part / p.split + warp_k, end = all_chunks * (part + 1) / p.split;
  const int chunks = begin < end ? (end - begin + wk - 1) / wk : 0;
  const size_t row_bytes = (size_t)p.k * (FMT == kInt8 ? 1 : 2);

  Weights weights;
  weights.init(shared, warp);

  int expert = 0, first = 0, total;
  // The routing of a layer's second product was there before its first began.
  const bool wait_late = !p.ids || p.epilogue == kWeigh;
  if (p.ids) {
    if (!wait_late) wait_for_predecessor();
    // The last expert first: a shared one, which all tokens ask for, would else be what the launch ends on.
    expert = p.by_expert ? gridDim.y - 1 - blockIdx.y : p.ids[(size_t)blockIdx.y * p.ids_stride];
    if (expert < 0) return;
    total = list_pairs(p, expert, 0, tokens_per_tile, list);
    __syncthreads();
    // Without a block per expert there is one per pair, and an expert belongs to its first pair.
    if (total == 0 || (!p.by_expert && list[0] != (int)blockIdx.y)) return;
  } else {
    first = blockIdx.y * tokens_per_tile;
    total = min(p.m, first + tokens_per_tile);
    if (threadIdx.x < tokens_per_tile) list[threadIdx.x] = first + threadIdx.x;
  }

  for (;;) {
    weights.start(p, ((size_t)expert * (p.n / 64) + row / 64) * (p.k / 128) + begin, tile, wk, 2 * chunks);
    Operands<FMT, G, RT, MT> stream;
    stream.clear();
    stream.point(p, expert, row, begin, wk);
    stream.request_factors(0, chunks > 0), stream.request_factors(1, chunks > 0);
    if (wait_late) wait_for_predecessor();
    __syncthreads();
    const int count = min(tokens_per_tile, total - first);
    // A column of the product depends on its own token only, so places without a token repeat the first and are not stored.
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int token = list[mt * 8 + g < count ? mt * 8 + g : 0];
      stream.token[mt] = reinterpret_cast<const char*>(p.x) + row_bytes * (p.epilogue == kSiluMul ? token / p.top_k : token) + q * 16 +
                         (size_t)begin * 128 * (FMT == kInt8 ? 1 : 2);
    }
    stream.request_tokens(0, 0, chunks > 0), stream.request_tokens(1, 0, chunks > 0);

    Sums<FMT, T, G, RT, MT> sums;
    sums.clear();
    // The way out between the two halves of a chunk is never taken, but the compiler, which cannot know, leaves each half's loads in it
    // instead of gathering them at the end of the chunk.
    int steps = 2 * chunks;
    asm volatile("" : "+r"(steps));
    for (int i = 0; i < steps; i += Weights::unroll) {
#pragma unroll
      for (int at = 0; at < Weights::unroll; ++at) {
        const int half = at % 2, left = steps - i - at;
        if (left <= 0) break;
        sums.step(stream, weights, at, half, left, tile);
        stream.request_tokens(half, 1, left > 2);
        weights.finish(at, half, left);
        if (half == 1) {
          stream.advance();
          stream.request_factors(0, left > 2), stream.request_factors(1, left > 2);
        }
      }
    }
    let_successor_start();
    // red[warp_k][row of the block][token]
    Acc* mine = red + ((size_t)warp_k * p.wn + warp_n) * RT * 16 * tokens_per_tile;
#pragma unroll
    for (int nt = 0; nt < RT; ++nt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) mine[(nt * 16 + (c / 2) * 8 + g) * tokens_per_tile + mt * 8 + q * 2 + c % 2] = sums.acc[nt][mt][c];
    __syncthreads();
    const int tile_id = blockIdx.y * (gridDim.x / p.split) + block_n;
    finish_tile<FMT, T, RT, MT, Acc>(p, red, block_n, part, expert, tile_id, list, count);
    first += tokens_per_tile;
    if (first >= total) return;
    __syncthreads();
    list_pairs(p, expert, first, tokens_per_tile, list);
    __syncthreads();
  }
}

template <int FMT, class T, int G, int RT, int MT, bool BULK> int launch(const GemmParams& p, int grid_y, void* stream) {
  auto kernel = tokens_in_registers<FMT, T, G, RT, MT, BULK>;
  constexpr int bytes = Shape<FMT, G, RT, MT, BULK>::bytes;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, bytes)) return fault;
  return start(kernel, dim3(p.n / (p.wn * RT * 16) * p.split, grid_y), kThreads, bytes, stream, p);
}

template <int FMT, class T, int G> int launch(const GemmParams& p, int token_tiles, int row_tiles, int bulk, int grid_y, void* stream) {
  if (token_tiles == 4) return launch<FMT, T, G, 4, 4, true>(p, grid_y, stream);
  if (token_tiles == 2) return row_tiles == 4 ? launch<FMT, T, G, 4, 2, true>(p, grid_y, stream) : launch<FMT, T, G, 2, 2, true>(p, grid_y, stream);
  if (bulk) return row_tiles == 4 ? launch<FMT, T, G, 4, 1, true>(p, grid_y, stream) : launch<FMT, T, G, 2, 1, true>(p, grid_y, stream);
  return row_tiles == 4 ? launch<FMT, T, G, 4, 1, false>(p, grid_y, stream) : launch<FMT, T, G, 2, 1, false>(p, grid_y, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype: 0 bf16, 1 fp16. token_tiles 1, 2 or 4; row_tiles 2 or 4, and 4 with four token tiles. Returns a cudaError_t.
extern "C" int qk_tokens_in_registers(const GemmParams* p, int format, int dtype, int group, int token_tiles, int row_tiles, int bulk, int grid_y, void* s) {
  const auto run = [&](auto launcher) { return launcher(*p, token_tiles, row_tiles, bulk, grid_y, s); };
  if (format == kFp4) return run(launch<kFp4, bf16, 16>);
  if (format == kInt8) return dtype == 0 ? run(launch<kInt8, bf16, 0>) : run(launch<kInt8, __half, 0>);
  if (group == 32) return dtype == 0 ? run(launch<kInt4, bf16, 32>) : run(launch<kInt4, __half, 32>);
  if (group == 64) return dtype == 0 ? run(launch<kInt4, bf16, 64>) : run(launch<kInt4, __half, 64>);
  return dtype == 0 ? run(launch<kInt4, bf16, 128>) : run(launch<kInt4, __half, 128>);
}
