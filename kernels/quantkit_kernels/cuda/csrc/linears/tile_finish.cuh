// What becomes of a tile's sums.

#pragma once

#include <stdint.h>

#include <type_traits>

#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "common/packed.cuh"
#include "linears/tile.cuh"
#include "linears/tile_params.cuh"

namespace {

template <int FMT, class T, int G, int NT, int WGS> struct Finish {
  using S = Tile<FMT, G, NT, WGS>;
  using Acc = std::conditional_t<FMT == kInt8, int, float>;
  const TileParams& p;
  char* ring;
  const float* row_scale;  // of the block's rows
  const float* x_scale;    // of the tile's tokens
  int block_n, tile, count;

  // A block that has whole sums. Each thread's are of rows `row` and `row` + 8.
  template <int MANY, int EACH> __device__ __forceinline__ void whole(const Acc (&acc)[MANY][EACH]) const {
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + (lane >> 2), q = lane & 3;
    const float scale[2] = {row_scale[row], row_scale[row + 8]};
    // Of 24 or 48 tokens the last four times eight are not all there: what repeats the last eight is not stored.
    const auto result = [&](int i, int h, int e) {
      i = i < NT / 8 ? i : NT / 8 - 1;
      const float y = float(acc[i * 8 / (2 * EACH)][i * 4 % EACH + 2 * h + e]) * scale[h];
      return FMT == kInt8 ? y * x_scale[i * 8 + 2 * q + e] : y;
    };
    T* staged = reinterpret_cast<T*>(ring);
    const bool silu = p.epilogue == kSiluMul, weigh = p.epilogue == kWeigh;
    const int* const order = p.order + tile * NT;
    const auto weight_of = [&](int t) { return !weigh ? 1.f : t < count ? p.pair_weights[order[t]] : 0.f; };
    const uint32_t to = shared_address(staged) + (threadIdx.x / 32 * (silu ? 8 : 16)) * 2;
#pragma unroll
    for (int i = 0; i < NT / 8; i += 4) {
      uint32_t m[4];
      if (silu) {
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          float y[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) y[e] = gated(result(i + b, 0, e), result(i + b, 1, e), p.limit);
          m[b] = pair_of<T>(y[0], y[1]);
        }
        store_matrices_transposed(to + (i * 8 + lane) * (S::pitch_stored * 2), m);
      } else {
#pragma unroll
        for (int two = 0; two < 2; ++two) {
#pragma unroll
          for (int b = 0; b < 4; b += 2) {
            const int at = i + 2 * two + b / 2, t = at * 8 + 2 * q;
            const float first = weight_of(t), second = weight_of(t + 1);
#pragma unroll
            for (int h = 0; h < 2; ++h) m[b + h] = pair_of<T>(result(at, h, 0) * first, result(at, h, 1) * second);
          }
          store_matrices_transposed(to + ((i + 2 * two) * 8 + lane / 16 * 8 + lane % 8) * (S::pitch_stored * 2) + (lane / 8 % 2) * 16, m);
        }
      }
    }
    asm volatile("bar.sync 1, %0;" :: "n"(S::consumers) : "memory");
    const int produced = silu ? S::rows / 2 : S::rows;
    for (int i = threadIdx.x; i < count * (produced / 8); i += S::consumers) {
      const int t = i / (produced / 8), r = i % (produced / 8) * 8, feature = block_n * produced + r;
      const int to_row = weigh ? order[t] : tile * NT + t;
      if (feature < p.out_n) store_run<T, 8>(p, to_row, feature, *reinterpret_cast<const T(*)[8]>(staged + t * S::pitch_stored + r));
    }
  }

  // A block of a cluster that split K: it adds up its share of the tokens.
  template <int MANY, int EACH> __device__ __forceinline__ void shared(const Acc (&acc)[MANY][EACH], int part) const {
    Acc* sums = reinterpret_cast<Acc*>(ring);
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + (lane >> 2), token = (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < MANY; ++n)
#pragma unroll
      for (int i = 0; i < EACH; ++i) sums[(n * 2 * EACH + i / 4 * 8 + token + i % 2) * S::pitch + row + i / 2 % 2 * 8] = acc[n][i];
    cluster_barrier();
    const int from = NT * part / p.split, to = min(count, NT * (part + 1) / p.split);
    for (int i = threadIdx.x; i < (to - from) * (S::rows / 4); i += S::consumers) {
      const int r = i % (S::rows / 4) * 4, t = from + i / (S::rows / 4), feature = block_n * S::rows + r;
      if (feature >= p.out_n) continue;
      Acc share[8][4];
#pragma unroll
      for (int b = 0; b < 8; ++b)
        if (b < p.split) read_from(share[b], shared_address(sums + t * S::pitch + r), b);
      T y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        Acc sum = share[0][e];
#pragma unroll
        for (int b = 1; b < 8; ++b)
          if (b < p.split) sum += share[b][e];
        y[e] = T(float(sum) * row_scale[r + e] * (FMT == kInt8 ? x_scale[t] : 1.f));
      }
      store_run<T, 4>(p, tile * NT + t, feature, y);
    }
    cluster_barrier();  // the others have read this block's sums
  }
};

}  // namespace
