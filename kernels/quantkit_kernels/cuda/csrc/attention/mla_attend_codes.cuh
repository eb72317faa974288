// `attend` (mla_attend.cuh) of latents in 8 bits: the same blocks, tiles and shares of the work.
//
// Codes become 16-bit operands in registers, exactly. A word that ldmatrix brings has four codes along a latent, where the query has four
// columns in a row instead of two and two; transposed it has two codes of each of two tokens, of even and of odd columns. The scale of a token
// multiplies its scores; of the sum of latents it is part of the probability, as a logarithm, so that what is rounded to 16 bits lies in 0 .. 1.
// The rotary key is stored divided by the scale and needs no more. With half the bytes the ring holds eight tiles, and a part of eight tiles or
// fewer is asked for whole before the queries are there.
#pragma once

#include "attention/mla_attend.cuh"
#include "common/codes.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct MlaCodes {
  const void *codes, *keys;  // [.., 512] bytes, [.., 64]
  const float* scales;       // [..]
};

namespace {

constexpr int kCodeSlots = 8, kCodeStride = kLatent + 16, kKeyStride = 2 * kRope + 16;  // bytes: eight rows of a matrix lie in different banks
constexpr int kKeysAt = kTile * kCodeStride, kScalesAt = kKeysAt + kTile * kKeyStride, kCodeTileBytes = kScalesAt + kTile * 4;
constexpr int attend_codes_bytes(int head_tiles) { return kCodeSlots * kCodeTileBytes + 16 * head_tiles * (4 * kScoreStride * 4 + kProbStride + 4) + kCodeSlots * 8; }

// A warp's copies of four rows, of which lane i knows the token of row i % 4.
template <class T> __device__ __forceinline__ void copy_coded_rows(uint32_t slot, int row0, const MlaCodes& cache, int token, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const size_t from = __shfl_sync(0xffffffffu, token, i);
    copy16(slot + (row0 + i) * kCodeStride + lane * 16, (const char*)cache.codes + from * kLatent + lane * 16);
  }
  const size_t from = __shfl_sync(0xffffffffu, token, lane / 8);
  copy16(slot + kKeysAt + (row0 + lane / 8) * kKeyStride + lane % 8 * 16, (const char*)cache.keys + from * kRope * 2 + lane % 8 * 16);
  if (lane < 4) copy4(slot + kScalesAt + (row0 + lane) * 4, cache.scales + token);
}

// A warp's quarter of the queries: 128 columns that meet codes, and 16 that turn. Heads past the last repeat it.
template <class T, int HT> __device__ __forceinline__ void load_coded_queries(uint32_t (&queries)[HT][9][4], const T* row, int head0, int heads, int quarter, int g, int part) {
#pragma unroll
  for (int t = 0; t < HT; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const T* from = row + (size_t)min(head0 + t * 16 + h * 8 + g, heads - 1) * kEntry;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const uint2 four = *reinterpret_cast<const uint2*>(from + quarter * 128 + k * 16 + 4 * part);
        queries[t][k][h] = four.x, queries[t][k][2 + h] = four.y;
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) queries[t][8][2 * b + h] = *reinterpret_cast<const uint32_t*>(from + kLatent + quarter * 16 + 8 * b + 2 * part);
    }
}

// As `multiply_keys`.
template <class T, int HT, class Code>
__device__ __forceinline__ void multiply_codes(float (&score)[HT][2][4], const uint32_t (&queries)[HT][9][4], uint32_t tile, int quarter, int tokens0, int matrix, int matrix_row) {
  uint32_t words[4][4], keys[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) load_matrices(words[k], tile + (tokens0 + (matrix & 1) * 8 + matrix_row) * kCodeStride + quarter * 128 + (2 * k + (matrix >> 1)) * 16);
  load_matrices(keys, tile + kKeysAt + (tokens0 + (matrix >> 1) * 8 + matrix_row) * kKeyStride + (quarter * 16 + (matrix & 1) * 8) * 2);
#pragma unroll
  for (int k = 0; k < 8; ++k)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t word = words[k / 2][k % 2 * 2 + n], low = two_codes<T, Code, 0, 1>(word), high = two_codes<T, Code, 2, 3>(word);
#pragma unroll
      for (int t = 0; t < HT; ++t) mma<T>(score[t][n], queries[t][k], low, high);
    }
#pragma unroll
  for (int t = 0; t < HT; ++t) mma<T>(score[t][0], queries[t][8], keys[0], keys[1]), mma<T>(score[t][1], queries[t][8], keys[2], keys[3]);
}

// sums += probabilities . codes, of 16 tokens and a warp's 64 columns: sums[2c] of the even columns of chunk c of 16, sums[2c + 1] of the odd ones.
template <class T, int HT, class Code>
__device__ __forceinline__ void add_codes(float (&sums)[HT][8][4], const char* probabilities, uint32_t tile, int k, int warp, int matrix, int matrix_row) {
  uint32_t a[HT][4], words[2][4];
#pragma unroll
  for (int t = 0; t < HT; ++t)
    load_matrices(a[t], shared_address(probabilities) + (t * 16 + (matrix & 1) * 8 + matrix_row) * kProbStride + (k * 16 + (matrix >> 1) * 8) * 2);
#pragma unroll
  for (int c = 0; c < 2; ++c)
    load_matrices_transposed(words[c], tile + (k * 16 + (matrix & 1) * 8 + matrix_row) * kCodeStride + warp * 64 + (2 * c + (matrix >> 1)) * 16);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint32_t first = words[c / 2][c % 2 * 2], second = words[c / 2][c % 2 * 2 + 1];
    const uint32_t even[2] = {two_codes<T, Code, 0, 2>(first), two_codes<T, Code, 0, 2>(second)};
    const uint32_t odd[2] = {two_codes<T, Code, 1, 3>(first), two_codes<T, Code, 1, 3>(second)};
#pragma unroll
    for (int t = 0; t < HT; ++t) mma<T>(sums[t][2 * c], a[t], even[0], even[1]), mma<T>(sums[t][2 * c + 1], a[t], odd[0], odd[1]);
  }
}

// Scores of one head, and of tokens with these scales, become probabilities times the scales, over 2^top; the sum of those without is added to
// `total`.
template <class T, int N> __device__ __forceinline__ void exponentiate_scaled(T (&probabilities)[N], const float (&scores)[N], const float (&logs)[N], float top, float& total) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    total += exp2f(scores[i] - top);
    probabilities[i] = T(exp2f(scores[i] + logs[i] - top));
  }
}

// As `store_part`, of sums as `add_codes` leaves them.
template <int HT> __device__ __forceinline__ void store_coded_part(const Attend& p, const float (&sums)[HT][8][4], int head0, int row, int split, int g, int part, int warp) {
#pragma unroll
  for (int t = 0; t < HT; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int to = head0 + t * 16 + h * 8 + g;
      if (to >= p.heads) continue;
      float* out = p.weighted + (((size_t)row * p.heads + to) * p.splits + split) * kLatent + warp * 64 + 4 * part;
#pragma unroll
      for (int c = 0; c < 4; ++c)
        *reinterpret_cast<float4*>(out + c * 16) = make_float4(sums[t][2 * c][2 * h], sums[t][2 * c + 1][2 * h], sums[t][2 * c][2 * h + 1], sums[t][2 * c + 1][2 * h + 1]);
    }
}

template <class T, int HT, class Code> __global__ void __launch_bounds__(kThreads, 1) attend_codes(const T* q, const MlaCodes cache, const Attend p) {
  constexpr int heads_here = 16 * HT, per_thread = kTile * heads_here / kThreads, threads_per_head = kTile / per_thread;
  struct __align__(4 * per_thread) Few { float v[per_thread]; };
  struct __align__(2 * per_thread) Probabilities { T v[per_thread]; };
  extern __shared__ __align__(128) char shared[];
  float* scores = reinterpret_cast<float*>(shared + kCodeSlots * kCodeTileBytes);  // [quarter of the products][head][token]
  char* probabilities = reinterpret_cast<char*>(scores + 4 * heads_here * kScoreStride);
  float* shrink = reinterpret_cast<float*>(probabilities + heads_here * kProbStride);
  const uint32_t ring = shared_address(shared), barriers = shared_address(shrink + heads_here);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;
  const int head0 = blockIdx.x * heads_here, split = blockIdx.y, row = blockIdx.z;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kCodeSlots; ++i) init_barrier(barriers + i * 8, kThreads);
  }
  __syncthreads();
  const int length = p.lengths[row * p.lengths_stride], tiles = tiles_of(length), parts = parts_of(tiles, p.splits);
  const int begin = split < parts ? tiles * split / parts : 0, count = split < parts ? tiles * (split + 1) / parts - begin : 0;

  // A warp copies four rows. Tokens past the end repeat the last: their probability is zero, and zero times what nobody wrote might be NaN.
  const auto look_up = [&](int turn) {
    const int token = min((begin + turn) * kTile + warp * 4 + part, length - 1), block = token / p.block_size;
    return p.table[(row * p.table_width + block) * p.table_stride] * p.block_size + token - block * p.block_size;
  };
  const auto request = [&](int turn, int token) {
    copy_coded_rows<T>(ring + turn % kCodeSlots * kCodeTileBytes, warp * 4, cache, token, lane);
    arrive_after_copies(barriers + turn % kCodeSlots * 8);
  };

  // The newest token was cached before the queries' kernel began, so all of the cache may be read while that ends.
  int places[kCodeSlots] = {};
#pragma unroll
  for (int turn = 0; turn < kCodeSlots; ++turn)
    if (turn < count) places[turn] = look_up(turn);
#pragma unroll
  for (int turn = 0; turn < kCodeSlots; ++turn)
    if (turn < count) request(turn, places[turn]);
  wait_for_predecessor();
  let_successor_start();
  if (count == 0) return;

  // This warp's share of the scores: a quarter of the products, for half of the tile's tokens.
  const int quarter = warp & 3, tokens0 = (warp >> 2) * 16;
  uint32_t queries[HT][9][4];
  load_coded_queries<T, HT>(queries, q + (size_t)row * p.heads * kEntry, head0, p.heads, quarter, g, part);

  float sums[HT][8][4] = {};  // of its 64 columns of the result
  // A head's softmax is the business of 8 or 16 threads, each with a few of a tile's tokens.
  const int head = threadIdx.x / threads_per_head, token0 = threadIdx.x % threads_per_head * per_thread;
  float largest = -INFINITY, total = 0;

  for (int turn = 0; turn < count; ++turn) {
    const uint32_t tile = ring + turn % kCodeSlots * kCodeTileBytes;
    // The slot of the turn before this one is free from the first barrier on. Where its tile's tokens lie is asked for before it is needed.
    const bool more = turn > 0 && turn + kCodeSlots - 1 < count;
    const int next = more ? look_up(turn + kCodeSlots - 1) : 0;
    wait_for(barriers + turn % kCodeSlots * 8, turn / kCodeSlots & 1);
    float score[HT][2][4] = {};
    multiply_codes<T, HT, Code>(score, queries, tile, quarter, tokens0, matrix, matrix_row);
    store_scores<HT>(scores, score, quarter, tokens0, g, part);
    __syncthreads();
    Few s = *reinterpret_cast<const Few*>(scores + head * kScoreStride + token0);
    const Few scale = *reinterpret_cast<const Few*>(shared + turn % kCodeSlots * kCodeTileBytes + kScalesAt + token0 * 4);
    float logs[per_thread], top = largest;
#pragma unroll
    for (int j = 1; j < 4; ++j) {
      const Few more_of_it = *reinterpret_cast<const Few*>(scores + (j * heads_here + head) * kScoreStride + token0);
#pragma unroll
      for (int i = 0; i < per_thread; ++i) s.v[i] += more_of_it.v[i];
    }
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      logs[i] = __log2f(scale.v[i]);
      s.v[i] = (begin + turn) * kTile + token0 + i < length ? s.v[i] * (p.scale * scale.v[i]) : -INFINITY;
      top = fmaxf(top, s.v[i] + logs[i]);
    }
    for (int o = threads_per_head / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    const float less = exp2f(largest - top);
    largest = top, total *= less;
    Probabilities prob;
    exponentiate_scaled(prob.v, s.v, logs, top, total);
    *reinterpret_cast<Probabilities*>(probabilities + head * kProbStride + token0 * 2) = prob;
    if (token0 == 0) shrink[head] = less;
    if (more) request(turn + kCodeSlots - 1, next);
    __syncthreads();

    shrink_sums<HT>(sums, shrink, g);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) add_codes<T, HT, Code>(sums, probabilities, tile, k, warp, matrix, matrix_row);
  }

  store_found(p, largest, total, threads_per_head, head, token0, head0, row, split);
  store_coded_part<HT>(p, sums, head0, row, split, g, part, warp);
}

template <class T, class Code> int launch_attend_codes(const void* q, const MlaCodes& cache, const Attend& p, int rows, void* s) {
  static const cudaError_t allowed[] = {allow(attend_codes<T, 1, Code>, attend_codes_bytes(1)), allow(attend_codes<T, 2, Code>, attend_codes_bytes(2))};
  const int tiles = p.heads > 16 ? 2 : 1;
  if (allowed[tiles - 1] != cudaSuccess) return (int)allowed[tiles - 1];
  const dim3 grid((p.heads + 16 * tiles - 1) / (16 * tiles), p.splits, rows);
  if (tiles == 2) return start(attend_codes<T, 2, Code>, grid, kThreads, attend_codes_bytes(2), s, (const T*)q, cache, p);
  return start(attend_codes<T, 1, Code>, grid, kThreads, attend_codes_bytes(1), s, (const T*)q, cache, p);
}

}  // namespace
