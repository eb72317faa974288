// What mla_prepare.cu does of up to 16 tokens, and the product that follows it, in one launch: queries = norm(query part) W_q_b^T, for a W
// packed in 4 bits. Results are those of the two launches to the last bit.
//
// A block that multiplies is that of tokens_in_shared.cu, but for its tokens: their rows are short enough to be in shared memory whole, and
// each block norms them for itself, a warp a token. That costs a block some hundred nanoseconds, a launch costs two microseconds. A block
// more for each token, on a multiprocessor that would have no work, writes what is cached of it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "attention/mla_prepare.cuh"
#include "common/copies.cuh"
#include "common/lanes.cuh"
#include "common/launch.cuh"
#include "linears/shared_tokens.cuh"

namespace {

constexpr int kMostPieces = 8;  // pieces of 256 values that a warp norms: rows of at most 2048

// A row of the query part by one warp, a lane eight values of each piece: its squares are added up as the warps of `norm_row` add them up.
// gains: in shared memory, where each lane copies those that it reads.
template <class T> struct NormedRow {
  Eight<T> v[kMostPieces];

  __device__ __forceinline__ static int place(int piece) { return piece * 256 + (threadIdx.x & 31) * 8; }
  __device__ __forceinline__ static void copy_gains(char* gains, const T* from, int width) {
#pragma unroll
    for (int i = 0; i < kMostPieces; ++i)
      if (place(i) < width) copy16(shared_address(gains) + place(i) * 2, from + place(i));
    end_copies();
  }
  __device__ __forceinline__ void load(const T* from, int width) {
#pragma unroll
    for (int i = 0; i < kMostPieces; ++i) v[i] = place(i) < width ? *reinterpret_cast<const Eight<T>*>(from + place(i)) : Eight<T>{};
  }
  // Into the chunks of the ring, as `token` of each.
  template <class D> __device__ __forceinline__ void norm(const char* gains, char* ring, int token, int width, float eps) {
    float squares[kMostPieces] = {}, total = 0;
#pragma unroll
    for (int i = 0; i < kMostPieces; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) squares[i] += v[i].get(j) * v[i].get(j);
#pragma unroll
    for (int i = 0; i < kMostPieces; ++i) squares[i] = warp_sum(squares[i]);
#pragma unroll
    for (int i = 0; i < kMostPieces; ++i) total += squares[i];
    const float factor = rsqrtf(total / width + eps);
#pragma unroll
    for (int i = 0; i < kMostPieces; ++i) {
      if (place(i) >= width) continue;
      const Eight<T> gain = *reinterpret_cast<const Eight<T>*>(gains + place(i) * 2);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[i].set(j, v[i].get(j) * factor * gain.get(j));
      *reinterpret_cast<uint4*>(ring + place(i) / 128 * D::place + token * D::pitch + place(i) % 128 * 2) = v[i].bits;
    }
  }
};

template <int FMT, class T, int G, int MT> __global__ void __launch_bounds__(Layout<FMT, G, MT>::threads, 1) mla_queries(const MlaPrepare m, const GemmParams p) {
  using D = Layout<FMT, G, MT>;
  using Lane = Sums<FMT, T, G, 2, MT, true>;
  extern __shared__ __align__(128) char shared[];
  const int width = m.q_lora + m.kv_lora + m.rope;
  const T* rows_a = (const T*)m.qkv_a;
  if ((int)blockIdx.x < p.m) {
    const int token = blockIdx.x;
    const Eight<T> gains = first_gains((const T*)m.kv_norm, m.kv_lora);
    wait_for_predecessor();
    let_successor_start();
    cache_token(m, rows_a + (size_t)token * width + m.q_lora, gains, (T*)m.cache + m.slots[token] * (m.kv_lora + m.rope), token * (m.rope / 2));
    return;
  }
  const int lane = threadIdx.x & 31, warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
  const int rows = p.wn * 32, pitch = rows + 4, wk = kMathWarps / p.wn, warp_n = warp % p.wn, warp_k = warp / p.wn;
  const int first = (blockIdx.x - p.m) * rows, present = min(p.wn, (p.n - first) / 32), chunks = p.k / 128;
  static_assert((D::places - kMostPieces * 2) * D::place >= kMostPieces * 512);
  char *ring = shared + D::weights, *gains = ring + kMostPieces * 2 * D::place;  // after the chunks of the longest row
  auto* red = reinterpret_cast<float*>(shared);  // [warp along K][token][pitch], once the rings are done with
  const auto* factors = reinterpret_cast<const float*>(shared + D::factors_at);

  const bool multiplies = warp < kMathWarps && warp_n < present && warp_k < wk;
  const int row = first + warp_n * 32, tile = row % 64 / 16, own = multiplies ? (chunks - warp_k + wk - 1) / wk : 0;
  // A token a warp, the first of them by the warps that have no weights.
  const int token = (warp + kCopyWarps) % (kMathWarps + kCopyWarps);
  if (token < p.m) NormedRow<T>::copy_gains(gains, (const T*)m.q_norm, m.q_lora);
  Copied<FMT, G, MT> weights;
  Operands<FMT, G, 2, MT> stream;
  if (warp < kMathWarps) {
    weights.start(p, shared_address(shared) + warp * D::steps * D::S::step_bytes, (size_t)(row / 64) * chunks + warp_k, tile, wk, 2 * own);
    stream.clear();
    stream.point(p, 0, row, warp_k, wk);
    stream.request_factors(0, own > 0), stream.request_factors(1, own > 0);
  } else if (warp == kMathWarps) {
    for (int i = lane * 4; i < present * 32; i += 128) copy16(shared_address(factors + i), p.row_scale + first + i);
    end_copies();
  }
  if (token < p.m) {
    NormedRow<T> normed;
    wait_for_predecessor();
    normed.load(rows_a + (size_t)token * width, m.q_lora);
    if (warp < kMathWarps) wait_for_copies<D::steps>();
    else wait_for_copies<0>();  // the first token's warp waits for the factors too
    normed.template norm<D>(gains, ring, token, m.q_lora, m.eps);
  }
  __syncthreads();

  Lane sums;
  sums.clear();
  for (int left = 2 * own, c = warp_k; left > 0; left -= 2, c += wk) {
    const uint32_t chunk = shared_address(ring) + c * D::place;
    if constexpr (FMT == kInt4) {
      // Each of the warps side by side adds the chunk's tokens up for itself: they write the same numbers to the same place.
      add_up_tokens<T, G, MT>(chunk);
      __syncwarp();
    }
    sums.given = chunk + D::tokens * D::pitch + (lane & 3) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      read_tokens<FMT, G, MT>(stream.x[half], chunk, half);
      sums.step(stream, weights, half, half, left - half, tile);
      weights.finish(half, left - half);
    }
    stream.advance();
    stream.request_factors(0, left > 2), stream.request_factors(1, left > 2);
  }
  let_successor_start();
  wait_for_predecessor();
  __syncthreads();
  if (multiplies) {
#pragma unroll
    for (int nt = 0; nt < 2; ++nt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          red[(warp_k * D::tokens + mt * 8 + (lane & 3) * 2 + c % 2) * pitch + warp_n * 32 + nt * 16 + c / 2 * 8 + (lane >> 2)] = sums.acc[nt][mt][c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows / 4 * p.m; i += D::threads) {
    const int r = i % (rows / 4) * 4, t = i / (rows / 4);
    if (first + r >= p.out_n) continue;
    float y[4] = {};
    for (int w = 0; w < wk; ++w) {
      const float4 share = *reinterpret_cast<const float4*>(red + (w * D::tokens + t) * pitch + r);
      y[0] += share.x, y[1] += share.y, y[2] += share.z, y[3] += share.w;
    }
    T rounded[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) rounded[e] = T(y[e] * factors[r + e]);
    store_run<T, 4>(p, t, first + r, rounded);
  }
}

template <int FMT, class T, int G, int MT> int launch(const MlaPrepare& m, const GemmParams& p, void* stream) {
  using D = Layout<FMT, G, MT>;
  auto kernel = mla_queries<FMT, T, G, MT>;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, D::bytes)) return fault;
  return start(kernel, p.m + (p.n + p.wn * 32 - 1) / (p.wn * 32), D::threads, D::bytes, stream, m, p);
}

template <int FMT, class T, int G> int launch(const MlaPrepare& m, const GemmParams& p, void* stream) {
  return p.m <= 8 ? launch<FMT, T, G, 1>(m, p, stream) : launch<FMT, T, G, 2>(m, p, stream);
}

}  // namespace

using bf16 = __nv_bfloat16;

// m: as for mla_prepare.cu, q_a unused; q_lora is p.k, at most 2048, kv_lora at most 2048. p: x unused, at most 16 tokens, no experts,
// not split. dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_mla_queries(const MlaPrepare* m, const GemmParams* p, int format, int dtype, int group, void* s) {
  if (format == kFp4) return launch<kFp4, bf16, 16>(*m, *p, s);
  if (group == 32) return dtype == 0 ? launch<kInt4, bf16, 32>(*m, *p, s) : launch<kInt4, __half, 32>(*m, *p, s);
  if (group == 64) return dtype == 0 ? launch<kInt4, bf16, 64>(*m, *p, s) : launch<kInt4, __half, 64>(*m, *p, s);
  return dtype == 0 ? launch<kInt4, bf16, 128>(*m, *p, s) : launch<kInt4, __half, 128>(*m, *p, s);
}
