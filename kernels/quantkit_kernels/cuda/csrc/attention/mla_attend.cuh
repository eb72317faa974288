// Scores and weighted sums of latents: a block takes part of a row's tokens, in tiles of 32 that are copied into a ring of four.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

namespace {

constexpr int kSlots = 4;
constexpr int kEntryStride = 2 * kEntry + 16, kTileBytes = kTile * kEntryStride;  // bytes
constexpr int kScoreStride = kTile + 8, kProbStride = 2 * kTile + 16;             // floats; bytes
constexpr int attend_bytes(int head_tiles) { return kSlots * kTileBytes + 16 * head_tiles * (4 * kScoreStride * 4 + kProbStride + 4) + kSlots * 8; }

// The block's queries, to where tile 0 of the ring would be. Not in bulk, as the tiles: such a copy waits for those asked for before it.
// Heads past the last repeat it.
template <class T, int HT> __device__ __forceinline__ void ask_for_queries(uint32_t ring, const T* row, int head0, int heads) {
  constexpr int pieces = kEntry / 8, all = 16 * HT * pieces;
#pragma unroll
  for (int turn = 0; turn < (all + kThreads - 1) / kThreads; ++turn) {
    const int i = turn * kThreads + threadIdx.x, head = i / pieces, piece = i % pieces;
    if (i < all) copy16(ring + head * kEntryStride + piece * 16, row + (size_t)min(head0 + head, heads - 1) * kEntry + piece * 8);
  }
  end_copies();
}

// A warp's quarter of the queries' 576 columns.
template <int HT> __device__ __forceinline__ void load_queries(uint32_t (&queries)[HT][9][4], uint32_t ring, int quarter, int matrix, int matrix_row) {
#pragma unroll
  for (int t = 0; t < HT; ++t)
#pragma unroll
    for (int k = 0; k < 9; ++k)
      load_matrices(queries[t][k], ring + (t * 16 + (matrix & 1) * 8 + matrix_row) * kEntryStride + (quarter * 144 + k * 16 + (matrix >> 1) * 8) * 2);
}

// What was summed so far, for the largest scores of now.
template <int HT> __device__ __forceinline__ void shrink_sums(float (&sums)[HT][8][4], const float* shrink, int g) {
#pragma unroll
  for (int t = 0; t < HT; ++t) {
    const float low = shrink[t * 16 + g], high = shrink[t * 16 + 8 + g];
    if (__any_sync(0xffffffffu, low != 1.f || high != 1.f)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) sums[t][n][0] *= low, sums[t][n][1] *= low, sums[t][n][2] *= high, sums[t][n][3] *= high;
    }
  }
}

// Probabilities of 16 tokens, and their latents in a warp's 64 columns. k: which 16 of the tile.
template <int HT>
__device__ __forceinline__ void load_operands(uint32_t (&a)[HT][4], uint32_t (&latents)[4][4], const char* probabilities, uint32_t tile, int k, int warp, int matrix, int matrix_row) {
#pragma unroll
  for (int t = 0; t < HT; ++t)
    load_matrices(a[t], shared_address(probabilities) + (t * 16 + (matrix & 1) * 8 + matrix_row) * kProbStride + (k * 16 + (matrix >> 1) * 8) * 2);
#pragma unroll
  for (int n = 0; n < 4; ++n)
    load_matrices_transposed(latents[n], tile + (k * 16 + (matrix & 1) * 8 + matrix_row) * kEntryStride + (warp * 64 + n * 16 + (matrix >> 1) * 8) * 2);
}

// sums += probabilities . latents, of 16 tokens.
template <class T, int HT> __device__ __forceinline__ void add_latents(float (&sums)[HT][8][4], const uint32_t (&a)[HT][4], const uint32_t (&latents)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int t = 0; t < HT; ++t) mma<T>(sums[t][2 * n], a[t], latents[n][0], latents[n][1]), mma<T>(sums[t][2 * n + 1], a[t], latents[n][2], latents[n][3]);
}

// A warp's share of a tile's scores: a quarter of the products, for half of the tokens.
template <class T, int HT>
__device__ __forceinline__ void multiply_keys(float (&score)[HT][2][4], uint32_t (&keys)[9][4], const uint32_t (&queries)[HT][9][4], uint32_t tile, int quarter, int tokens0, int matrix, int matrix_row) {
#pragma unroll
  for (int k = 0; k < 9; ++k)
    load_matrices(keys[k], tile + (tokens0 + (matrix >> 1) * 8 + matrix_row) * kEntryStride + (quarter * 144 + k * 16 + (matrix & 1) * 8) * 2);
#pragma unroll
  for (int k = 0; k < 9; ++k)
#pragma unroll
    for (int t = 0; t < HT; ++t) mma<T>(score[t][0], queries[t][k], keys[k][0], keys[k][1]), mma<T>(score[t][1], queries[t][k], keys[k][2], keys[k][3]);
}

// To shared memory, where the warps' quarters meet.
template <int HT> __device__ __forceinline__ void store_scores(float* scores, const float (&score)[HT][2][4], int quarter, int tokens0, int g, int part) {
  constexpr int heads_here = 16 * HT;
#pragma unroll
  for (int t = 0; t < HT; ++t)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(scores + (quarter * heads_here + t * 16 + h * 8 + g) * kScoreStride + tokens0 + n * 8 + 2 * part) =
            make_float2(score[t][n][2 * h], score[t][n][2 * h + 1]);
}

// Scores of one head become probabilities, whose sum is added to `total`.
template <class T, int N> __device__ __forceinline__ void exponentiate(T (&probabilities)[N], const float (&scores)[N], float top, float& total) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float e = exp2f(scores[i] - top);
    total += e, probabilities[i] = T(e);
  }
}

// A warp's copies of four rows, of which lane i knows where row i % 4 begins: in bulk, for copies of 16 bytes take as long as the products.
template <class T> __device__ __forceinline__ void copy_rows(uint32_t to, const T* from, uint32_t barrier, int lane) {
  if (lane == 0) expect_bytes(barrier, 4 * kEntry * 2);
  __syncwarp();
  if (lane < 4) copy_bulk(to + lane * kEntryStride, from, kEntry * 2, barrier);
}

// A part's result: of each head the largest score and the sum of its probabilities, and a warp's 64 columns of the sums of latents. These go through
// the warp's share of the ring, whose tiles are done with: then 16 lanes in a row store 256 bytes of a head.
template <int HT> __device__ __forceinline__ void store_part(const Attend& p, char* shared, const float (&sums)[HT][8][4], float largest, float total, int threads_per_head, int head, int token0, int head0, int row, int split, int g, int part, int warp) {
  constexpr int stride = 64 + 8;  // floats: four heads lie in different banks
  static_assert(kWarps * 16 * HT * stride * 4 <= kSlots * kTileBytes);
  for (int o = threads_per_head / 2; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
  if (token0 == 0 && head0 + head < p.heads) p.found[((size_t)row * p.heads + head0 + head) * p.splits + split] = make_float2(largest, total);
  float* own = reinterpret_cast<float*>(shared) + warp * 16 * HT * stride;
#pragma unroll
  for (int t = 0; t < HT; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < 8; ++n) *reinterpret_cast<float2*>(own + (t * 16 + h * 8 + g) * stride + n * 8 + 2 * part) = make_float2(sums[t][n][2 * h], sums[t][n][2 * h + 1]);
  __syncwarp();
  const int lane = threadIdx.x & 31;
  const uint32_t from = shared_address(own + lane / 16 * stride + lane % 16 * 4);
  float* to = p.weighted + ((size_t)row * p.heads * p.splits + split) * kLatent + warp * 64 + lane % 16 * 4;
#pragma unroll
  for (int t = 0; t < HT; ++t) {
    uint4 two_heads[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) two_heads[i] = read16(from + (t * 8 + i) * 2 * stride * 4);
    // Heads past the last have its queries, and its sums.
#pragma unroll
    for (int i = 0; i < 8; ++i) __stcg(reinterpret_cast<uint4*>(to + (size_t)(min(head0 + (t * 8 + i) * 2 + lane / 16, p.heads - 1) * p.splits) * kLatent), two_heads[i]);
  }
}

// A block per 16 * HT heads, part of a row's tokens, and row.
template <class T, int HT> __global__ void __launch_bounds__(kThreads, 1) attend(const T* q, const T* cache, const Attend p) {
  constexpr int heads_here = 16 * HT, per_thread = kTile * heads_here / kThreads, threads_per_head = kTile / per_thread;
  struct __align__(4 * per_thread) Few { float v[per_thread]; };
  struct __align__(2 * per_thread) Probabilities { T v[per_thread]; };
  extern __shared__ __align__(128) char shared[];
  float* scores = reinterpret_cast<float*>(shared + kSlots * kTileBytes);  // [quarter of the products][head][token]
  char* probabilities = reinterpret_cast<char*>(scores + 4 * heads_here * kScoreStride);
  float* shrink = reinterpret_cast<float*>(probabilities + heads_here * kProbStride);
  const uint32_t ring = shared_address(shared), barriers = shared_address(shrink + heads_here);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;
  const int head0 = blockIdx.x * heads_here, split = blockIdx.y, row = blockIdx.z;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) init_barrier(barriers + i * 8, kWarps);
    show_barriers_to_copies();
  }
  __syncthreads();
  if (lane == 0) arrive(barriers);  // as if for a tile 0
  const int length = p.lengths[row * p.lengths_stride], tiles = tiles_of(length, kTile), parts = parts_of(tiles, p.splits);
  const int begin = split < parts ? tiles * split / parts : 0, count = split < parts ? tiles * (split + 1) / parts - begin : 0;

  // Tiles of the cache are 1 .. count, for the queries are in the place of tile 0. A warp copies four rows. Tokens past the end repeat the
  // last: their probability is zero, and zero times what nobody wrote might be NaN.
  const int of_tile = warp * 4 + part;
  struct Place { int block, offset; };
  const auto look_up = [&](int turn) -> Place {
    const int token = min((begin + turn - 1) * kTile + of_tile, length - 1), block = token / p.block_size;
    return {p.table[(row * p.table_width + block) * p.table_stride], token - block * p.block_size};
  };
  const auto request = [&](int turn, Place place) {
    const T* from = cache + ((size_t)place.block * p.block_size + place.offset) * kEntry;
    copy_rows(ring + turn % kSlots * kTileBytes + warp * 4 * kEntryStride, from, barriers + turn % kSlots * 8, lane);
  };
  const auto await = [&](int turn) { wait_for(barriers + turn % kSlots * 8, turn / kSlots & 1); };

  // The newest token was cached before the queries' kernel let this one start, so all of the cache may be read while that ends.
  Place places[kSlots] = {};
#pragma unroll
  for (int turn = 1; turn < kSlots; ++turn)
    if (turn <= count) places[turn] = look_up(turn);
#pragma unroll
  for (int turn = 1; turn < kSlots - 1; ++turn)
    if (turn <= count) request(turn, places[turn]);
  wait_for_predecessor();
  let_successor_start();
  if (count == 0) return;
  ask_for_queries<T, HT>(ring, q + (size_t)row * p.heads * kEntry, head0, p.heads);
  if (kSlots - 1 <= count) request(kSlots - 1, places[kSlots - 1]);
  wait_for_copies<0>();
  show_to_copies();  // that come later, of tiles to the same place
  __syncthreads();

  // This warp's share of the scores: a quarter of the products, for half of the tile's tokens.
  const int quarter = warp & 3, tokens0 = (warp >> 2) * 16;
  uint32_t queries[HT][9][4];
  load_queries<HT>(queries, ring, quarter, matrix, matrix_row);

  float sums[HT][8][4] = {};  // of its 64 columns of the result
  // A head's softmax is the business of 8 or 16 threads, each with a few of a tile's tokens.
  const int head = threadIdx.x / threads_per_head, token0 = threadIdx.x % threads_per_head * per_thread;
  float largest = -INFINITY, total = 0;

  for (int turn = 1; turn <= count; ++turn) {
    const uint32_t tile = ring + turn % kSlots * kTileBytes;
    const bool more = turn + kSlots - 1 <= count;
    const Place next = more ? look_up(turn + kSlots - 1) : Place{};  // a long way off, so asked for before it is needed
    await(turn);
    float score[HT][2][4] = {};
    uint32_t keys[9][4];
    multiply_keys<T, HT>(score, keys, queries, tile, quarter, tokens0, matrix, matrix_row);
    store_scores<HT>(scores, score, quarter, tokens0, g, part);
    __syncthreads();
    Few s = *reinterpret_cast<const Few*>(scores + head * kScoreStride + token0);
    float top = largest;
#pragma unroll
    for (int j = 1; j < 4; ++j) {
      const Few more = *reinterpret_cast<const Few*>(scores + (j * heads_here + head) * kScoreStride + token0);
#pragma unroll
      for (int i = 0; i < per_thread; ++i) s.v[i] += more.v[i];
    }
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      s.v[i] = (begin + turn - 1) * kTile + token0 + i < length ? s.v[i] * p.scale : -INFINITY;
      top = fmaxf(top, s.v[i]);
    }
    for (int o = threads_per_head / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
    const float less = exp2f(largest - top);
    largest = top, total *= less;
    Probabilities prob;
    exponentiate(prob.v, s.v, top, total);
    *reinterpret_cast<Probabilities*>(probabilities + head * kProbStride + token0 * 2) = prob;
    if (token0 == 0) shrink[head] = less;
    __syncthreads();

    shrink_sums<HT>(sums, shrink, g);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      uint32_t a[HT][4], latents[4][4];
      load_operands<HT>(a, latents, probabilities, tile, k, warp, matrix, matrix_row);
      // The slot of the turn before this one is free since the first barrier.
      if (k == kTile / 16 - 1 && more) request(turn + kSlots - 1, next);
      add_latents<T, HT>(sums, a, latents);
    }
  }

  __syncthreads();  // the tiles are done with
  store_part<HT>(p, shared, sums, largest, total, threads_per_head, head, token0, head0, row, split, g, part, warp);
}

template <class T> int launch_attend(const void* q, const void* cache, const Attend& p, int rows, void* s) {
  static SharedMemory shared[2];
  const int tiles = p.heads > 16 ? 2 : 1;
  if (const int fault = shared[tiles - 1].allow(tiles == 2 ? attend<T, 2> : attend<T, 1>, attend_bytes(tiles))) return fault;
  const dim3 grid((p.heads + 16 * tiles - 1) / (16 * tiles), p.splits, rows);
  if (tiles == 2) return start(attend<T, 2>, grid, kThreads, attend_bytes(2), s, (const T*)q, (const T*)cache, p);
  return start(attend<T, 1>, grid, kThreads, attend_bytes(1), s, (const T*)q, (const T*)cache, p);
}

}  // namespace
