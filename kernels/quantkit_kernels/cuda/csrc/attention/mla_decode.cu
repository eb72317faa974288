// Latent attention of one query per row over the paged cache, absorbed: scores are (q W_UK) . latent, results (p . latent) W_UV
// (arXiv 2405.04434, section 2.1.2). Sizes of DeepSeek-V3: latents of 512 and a rotary key of 64, heads of 128 + 64 and 128.
//
// Three launches. `absorb` multiplies the queries with W_UK and turns their rotary part. `attend` reads each latent once for up to 32 heads:
// a block takes part of a row's tokens, in tiles of 32 that are copied into a ring of four; its eight warps share the 576 products of a score
// four ways and the 512 columns of a result eight ways, so a latent passes from shared memory to the tensor cores twice. `project` merges the
// parts and multiplies with W_UV.
//
// The device shares a row's tokens out, by the length that the row has there, over as many blocks as the grid has for the longest row: a
// captured graph stays right when lengths change, and nothing past a row's end is read.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct MlaDecode {
  const void *q, *kv_b;           // [rows, heads, 192]; [heads, 256, 512]
  const float *cosines, *sines;   // [rows, 32]
  const void* cache;              // [blocks, block_size, 576]
  const int *table, *lengths;     // [rows, table_width], [rows]; strides in ints, 2 for int64
  void* absorbed;                 // [rows, heads, 576], room, as the next two
  float* weighted;                // [rows, heads, splits, 512]
  void* found;                    // [rows, heads, splits] of two floats
  void* out;                      // [rows, heads, 128]
  int table_stride, lengths_stride, table_width, block_size, rows, heads, splits, interleaved;  // splits: at most 256
  float scale;
};

namespace {

constexpr int kLatent = 512, kRope = 64, kEntry = kLatent + kRope, kNope = 128, kValue = 128, kQuery = kNope + kRope;

// --- queries ---------------------------------------------------------------------------------------------------------------

constexpr int kAbsorbColumns = 64, kAbsorbStride = 2 * kAbsorbColumns + 16;  // bytes: eight rows of a matrix lie in different banks

// out[token, head] = [q_nope W_UK, turned q_pe]. A block per head and 64 columns, and one for the rotary part.
template <class T>
__global__ void __launch_bounds__(128) absorb(const T* q, const T* kv_b, const float* cosines, const float* sines, T* out, int tokens, int heads, int interleaved) {
  __shared__ __align__(16) char w[kNope * kAbsorbStride];
  const int head = blockIdx.x, column = blockIdx.y * kAbsorbColumns, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3;
  if (column < kLatent) {
    const T* from = kv_b + (size_t)head * (kNope + kValue) * kLatent + column;
#pragma unroll
    for (int i = 0; i < kNope * kAbsorbColumns / 8 / 128; ++i) {
      const int chunk = i * 128 + threadIdx.x, row = chunk / 8, at = chunk % 8;
      copy16(shared_address(w) + row * kAbsorbStride + at * 16, from + row * kLatent + at * 8);
    }
  }
  wait_for_predecessor();
  let_successor_start();
  if (column == kLatent) {
    for (int i = threadIdx.x; i < tokens * (kRope / 2); i += 128) {
      const int token = i / (kRope / 2), pair = i % (kRope / 2);
      const int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pair + kRope / 2;
      const T* from = q + ((size_t)token * heads + head) * kQuery + kNope;
      T* to = out + ((size_t)token * heads + head) * kEntry + kLatent;
      const float a = float(from[first]), b = float(from[second]), c = cosines[i], s = sines[i];
      to[first] = T(a * c - b * s);
      to[second] = T(a * s + b * c);
    }
    return;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  // A is W_UK transposed: 16 columns of it by all of 128 along the head.
  uint32_t a[kNope / 16][4];
  const uint32_t at = shared_address(w) + ((lane >> 4) * 8 + (lane & 7)) * kAbsorbStride + (warp * 16 + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
  for (int k = 0; k < kNope / 16; ++k) load_matrices_transposed(a[k], at + k * 16 * kAbsorbStride);
  for (int first = 0; first < tokens; first += 8) {
    const int from = min(first + g, tokens - 1);
    const uint32_t* row = reinterpret_cast<const uint32_t*>(q + ((size_t)from * heads + head) * kQuery);
    uint32_t b[kNope / 16][2];
#pragma unroll
    for (int k = 0; k < kNope / 16; ++k) b[k][0] = row[k * 8 + part], b[k][1] = row[k * 8 + 4 + part];
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kNope / 16; ++k) mma<T>(sums, a[k], b[k][0], b[k][1]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int token = first + 2 * part + c % 2;
      if (token < tokens) out[((size_t)token * heads + head) * kEntry + column + warp * 16 + g + 8 * (c / 2)] = T(sums[c]);
    }
  }
}

// --- attention -------------------------------------------------------------------------------------------------------------

struct Attend {
  const int *table, *lengths;  // [rows, table_width], [rows]; strides in ints, 2 for int64
  int table_stride, lengths_stride, table_width, block_size, heads, splits;
  float scale;                 // times log2(e)
  float* weighted;             // [rows, heads, splits, 512]: sum of p latent, p = 2^(score - largest)
  float2* found;               // [rows, heads, splits]: largest score, sum of p
};

constexpr int kWarps = 8, kThreads = 32 * kWarps, kTile = 32, kSlots = 4;
constexpr int kEntryStride = 2 * kEntry + 16, kTileBytes = kTile * kEntryStride;  // bytes
constexpr int kScoreStride = kTile + 8, kProbStride = 2 * kTile + 16;             // floats; bytes
constexpr int attend_bytes(int head_tiles) { return kSlots * kTileBytes + 16 * head_tiles * (4 * kScoreStride * 4 + kProbStride + 4) + kSlots * 8; }

__device__ __forceinline__ int tiles_of(int length) { return (length + kTile - 1) / kTile; }
// A row's tiles are shared out over this many of the grid's splits, none of which is without work. Tiles are fewer than 2^23.
__device__ __forceinline__ int parts_of(int tiles, int splits) { return min(tiles, splits); }

// A warp's quarter of the queries' 576 columns, which lie in the ring as tile 0.
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

// A warp's copies of four rows, of which lane i knows where row i % 4 begins.
template <class T> __device__ __forceinline__ void copy_rows(uint32_t to, const T* from, int lane) {
#pragma unroll
  for (int i = 0; i < kEntry * 2 * 4 / 16 / 32; ++i) {
    const int chunk = i * 32 + lane, which = chunk / (kEntry / 8), at = chunk % (kEntry / 8) * 16;
    const char* source = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, (unsigned long long)from, which)) + at;
    copy16(to + which * kEntryStride + at, source);
  }
}

// A part's result: of each head the largest score and the sum of its probabilities, and a warp's 64 columns of the sums of latents.
template <int HT> __device__ __forceinline__ void store_part(const Attend& p, const float (&sums)[HT][8][4], float largest, float total, int threads_per_head, int head, int token0, int head0, int row, int split, int g, int part, int warp) {
  for (int o = threads_per_head / 2; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
  if (token0 == 0 && head0 + head < p.heads) p.found[((size_t)row * p.heads + head0 + head) * p.splits + split] = make_float2(largest, total);
#pragma unroll
  for (int t = 0; t < HT; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int to = head0 + t * 16 + h * 8 + g;
      if (to >= p.heads) continue;
      float* out = p.weighted + (((size_t)row * p.heads + to) * p.splits + split) * kLatent + warp * 64 + 2 * part;
#pragma unroll
      for (int n = 0; n < 8; ++n) *reinterpret_cast<float2*>(out + n * 8) = make_float2(sums[t][n][2 * h], sums[t][n][2 * h + 1]);
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
    for (int i = 0; i < kSlots; ++i) init_barrier(barriers + i * 8, kThreads);
  }
  __syncthreads();
  const int length = p.lengths[row * p.lengths_stride], tiles = tiles_of(length), parts = parts_of(tiles, p.splits);
  const int begin = split < parts ? tiles * split / parts : 0, count = split < parts ? tiles * (split + 1) / parts - begin : 0;

  // The queries come through the ring as if they were tile 0, tiles of the cache as 1 .. count. A warp copies four rows. Tokens past the end
  // repeat the last: their probability is zero, and zero times what nobody wrote might be NaN. Heads past the last repeat it likewise.
  const int of_tile = warp * 4 + part;
  struct Place { int block, offset; };
  const auto look_up = [&](int turn) -> Place {
    const int token = min((begin + turn - 1) * kTile + of_tile, length - 1), block = token / p.block_size;
    return {p.table[(row * p.table_width + block) * p.table_stride], token - block * p.block_size};
  };
  const auto request = [&](int turn, Place place) {
    const T* from = turn == 0 ? q + ((size_t)row * p.heads + min(head0 + of_tile, p.heads - 1)) * kEntry
                              : cache + ((size_t)place.block * p.block_size + place.offset) * kEntry;
    const uint32_t to = ring + turn % kSlots * kTileBytes + warp * 4 * kEntryStride;
    copy_rows(to, from, lane);
    arrive_after_copies(barriers + turn % kSlots * 8);
  };
  const auto await = [&](int turn) { wait_for(barriers + turn % kSlots * 8, turn / kSlots & 1); };

  // The newest token was cached before the queries' kernel began, so all of the cache may be read while that ends.
  Place places[kSlots] = {};
#pragma unroll
  for (int turn = 1; turn < kSlots; ++turn)
    if (turn <= count) places[turn] = look_up(turn);
#pragma unroll
  for (int turn = 1; turn < kSlots; ++turn)
    if (turn <= count) request(turn, places[turn]);
  wait_for_predecessor();
  let_successor_start();
  if (count == 0) return;
  request(0, places[0]);

  // This warp's share of the scores: a quarter of the products, for half of the tile's tokens.
  const int quarter = warp & 3, tokens0 = (warp >> 2) * 16;
  uint32_t queries[HT][9][4];
  await(0);
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
      // The slot of the turn before this one is free since the first barrier. Copies hold up reads of shared memory, so they are asked
      // for when only the tensor cores have something to do.
      if (k == kTile / 16 - 1 && more) request(turn + kSlots - 1, next);
      add_latents<T, HT>(sums, a, latents);
    }
  }

  store_part<HT>(p, sums, largest, total, threads_per_head, head, token0, head0, row, split, g, part, warp);
}

// --- results ---------------------------------------------------------------------------------------------------------------

constexpr int kMostSplits = 256, kProjectRows = 64, kLatentStride = 2 * kLatent + 16;  // bytes
constexpr int project_bytes(int splits) { return (kProjectRows + 8) * kLatentStride + kWarps * kLatent * 4 + 8 * splits * 4; }

// W_UV . latents: 16 of the values, half of the products.
template <class T>
__device__ __forceinline__ void multiply_values(float (&acc)[2][4], const char* shared, const char* latents, int tile, int half, int g, int part, int matrix, int matrix_row) {
#pragma unroll
  for (int k = 0; k < kLatent / 32; ++k) {
    uint32_t a[4];
    const int column = half * (kLatent / 2) + k * 16;
    load_matrices(a, shared_address(shared) + (tile * 16 + (matrix & 1) * 8 + matrix_row) * kLatentStride + (column + (matrix >> 1) * 8) * 2);
    const uint32_t* b = reinterpret_cast<const uint32_t*>(latents + g * kLatentStride) + column / 2 + part;
    mma<T>(acc[k % 2], a, b[0], b[4]);
  }
}

// The weighed sum of row `row0 + r`'s parts, of which this warp takes every `warps_per_row`th: a lane has 4 of each 128 columns.
__device__ __forceinline__ void merge_parts(float4 (&sum)[4], const Attend& p, const float* shares, int row0, int r, int head, int warp, int lane, int warps_per_row) {
  const int parts = parts_of(tiles_of(p.lengths[(row0 + r) * p.lengths_stride]), p.splits);
  const float4* weighted = reinterpret_cast<const float4*>(p.weighted + ((size_t)(row0 + r) * p.heads + head) * p.splits * kLatent) + lane;
#pragma unroll 4
  for (int s = warp % warps_per_row; s < parts; s += warps_per_row) {
    const float share = shares[r * p.splits + s];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 v = __ldcg(weighted + s * (kLatent / 4) + i * 32);
      sum[i].x += share * v.x, sum[i].y += share * v.y, sum[i].z += share * v.z, sum[i].w += share * v.w;
    }
  }
}

// out[row, head] = (merged parts) W_UV. A block per head, 64 of its values, and eight rows.
template <class T> __global__ void __launch_bounds__(kThreads, 2) project(const T* kv_b, T* out, int rows, const Attend p) {
  extern __shared__ __align__(128) char shared[];
  char* latents = shared + kProjectRows * kLatentStride;
  float* sums = reinterpret_cast<float*>(latents + 8 * kLatentStride);  // [warp][512], then [half of K][64][8]
  float* shares = sums + kWarps * kLatent;                              // [row][split]
  const int head = blockIdx.x, value0 = blockIdx.y * kProjectRows, row0 = blockIdx.z * 8, here = min(8, rows - row0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;

  const T* from = kv_b + ((size_t)head * (kNope + kValue) + kNope + value0) * kLatent;
  for (int i = threadIdx.x; i < kProjectRows * kLatent / 8; i += kThreads) {
    const int r = i / (kLatent / 8), at = i % (kLatent / 8);
    copy16(shared_address(shared) + r * kLatentStride + at * 16, from + r * kLatent + at * 8);
  }
  wait_for_predecessor();
  let_successor_start();

  // What each part weighs.
  if (warp < here) {
    const int parts = parts_of(tiles_of(p.lengths[(row0 + warp) * p.lengths_stride]), p.splits);
    const float2* found = p.found + ((size_t)(row0 + warp) * p.heads + head) * p.splits;
    float2 mine[kMostSplits / 32];
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i) {
      mine[i] = i * 32 + lane < parts ? __ldcg(found + i * 32 + lane) : make_float2(-INFINITY, 0.f);
      top = fmaxf(top, mine[i].x);
    }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i)
      if (i * 32 + lane < parts) mine[i].x = exp2f(mine[i].x - top), total += mine[i].x * mine[i].y;
    for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
#pragma unroll
    for (int i = 0; i < kMostSplits / 32; ++i)
      if (i * 32 + lane < parts) shares[warp * p.splits + i * 32 + lane] = mine[i].x / total;
  }
  __syncthreads();
  // Warps are shared out over the rows, and a row's warps over its parts.
  const int warps_per_row = here > 4 ? 1 : here > 2 ? 2 : here > 1 ? 4 : 8, r = warp / warps_per_row;
  float4 sum[4] = {};
  if (r < here) merge_parts(sum, p, shares, row0, r, head, warp, lane, warps_per_row);
#pragma unroll
  for (int i = 0; i < 4; ++i) *reinterpret_cast<float4*>(sums + warp * kLatent + i * 128 + lane * 4) = sum[i];
  __syncthreads();
  // Rows beyond the last repeat its sums, which costs nothing and is not stored.
  for (int i = threadIdx.x; i < 8 * kLatent; i += kThreads) {
    const int at = i / kLatent, column = i % kLatent;
    const float* first = sums + min(at, here - 1) * warps_per_row * kLatent + column;
    float v = 0;
    for (int w = 0; w < warps_per_row; ++w) v += first[w * kLatent];
    reinterpret_cast<T*>(latents + at * kLatentStride)[column] = T(v);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

  const int tile = warp & 3, half = warp >> 2;  // 16 of the values, half of the products
  float acc[2][4] = {};
  multiply_values<T>(acc, shared, latents, tile, half, g, part, matrix, matrix_row);
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[(half * kProjectRows + tile * 16 + g + 8 * (c / 2)) * 8 + 2 * part + c % 2] = acc[0][c] + acc[1][c];
  __syncthreads();
  for (int i = threadIdx.x; i < here * kProjectRows; i += kThreads) {
    const int at = i / kProjectRows, value = i % kProjectRows;
    out[((size_t)(row0 + at) * p.heads + head) * kValue + value0 + value] = T(sums[value * 8 + at] + sums[(kProjectRows + value) * 8 + at]);
  }
}

template <class Kernel> cudaError_t allow(Kernel kernel, int bytes) { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes); }

template <class T> int launch_attend(const void* q, const void* cache, const Attend& p, int rows, void* s) {
  static const cudaError_t allowed[] = {allow(attend<T, 1>, attend_bytes(1)), allow(attend<T, 2>, attend_bytes(2))};
  const int tiles = p.heads > 16 ? 2 : 1;
  if (allowed[tiles - 1] != cudaSuccess) return (int)allowed[tiles - 1];
  const dim3 grid((p.heads + 16 * tiles - 1) / (16 * tiles), p.splits, rows);
  if (tiles == 2) return start(attend<T, 2>, grid, kThreads, attend_bytes(2), s, (const T*)q, (const T*)cache, p);
  return start(attend<T, 1>, grid, kThreads, attend_bytes(1), s, (const T*)q, (const T*)cache, p);
}

template <class T> int launch_project(const void* kv_b, void* out, const Attend& p, int rows, void* s) {
  static const cudaError_t allowed = allow(project<T>, project_bytes(kMostSplits));
  if (allowed != cudaSuccess) return (int)allowed;
  return start(project<T>, dim3(p.heads, kValue / kProjectRows, (rows + 7) / 8), kThreads, project_bytes(p.splits), s, (const T*)kv_b, (T*)out, rows, p);
}

template <class T> int launch_absorb(const void* q, const void* kv_b, const float* cosines, const float* sines, void* out, int rows, int heads, int interleaved, void* s) {
  return start(absorb<T>, dim3(heads, kLatent / kAbsorbColumns + 1), 128, 0, s, (const T*)q, (const T*)kv_b, cosines, sines, (T*)out, rows, heads, interleaved);
}

using bf16 = __nv_bfloat16;

}  // namespace

// dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_mla_decode(const MlaDecode* m, int dtype, void* s) {
  const Attend p = {m->table, m->lengths, m->table_stride, m->lengths_stride, m->table_width, m->block_size, m->heads, m->splits, m->scale * 1.4426950408889634f, m->weighted, (float2*)m->found};
  int error = dtype == 0 ? launch_absorb<bf16>(m->q, m->kv_b, m->cosines, m->sines, m->absorbed, m->rows, m->heads, m->interleaved, s)
                         : launch_absorb<__half>(m->q, m->kv_b, m->cosines, m->sines, m->absorbed, m->rows, m->heads, m->interleaved, s);
  if (error == 0) error = dtype == 0 ? launch_attend<bf16>(m->absorbed, m->cache, p, m->rows, s) : launch_attend<__half>(m->absorbed, m->cache, p, m->rows, s);
  if (error == 0) error = dtype == 0 ? launch_project<bf16>(m->kv_b, m->out, p, m->rows, s) : launch_project<__half>(m->kv_b, m->out, p, m->rows, s);
  return error;
}
