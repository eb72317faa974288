// Scores and weighted sums of latents in 8 bits. A block takes part of a row's tokens for up to 32 heads, in tiles of 64. Its two warpgroups take
// tiles in turns, each through a ring of its own, with sums of its own, and meet only at the end.
//
// Products are wgmma's with tokens, then latent columns, as the 64 rows: codes become fp16 operands in registers, exactly, and queries and
// probabilities lie in shared memory. A word that ldmatrix brings has four codes along a latent: the queries' columns lie there in the order in
// which lanes have them. Transposed it has two codes of each of two tokens, of an even column and the odd one after it, which are rows g and g + 8.
//
// The scale of a token multiplies its scores. Of the sum of latents it is part of the probability, as a logarithm, so that what is rounded to 16
// bits lies in 0 .. 1. The rotary key is stored divided by the scale and needs no more; its products are of the model's own type.
#pragma once

#include "attention/mla_sizes.cuh"
#include "common/codes.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct MlaCodes {
  const void *codes, *keys;  // [.., 512] bytes, [.., 64]
  const float* scales;       // [..]
};

namespace {

constexpr int kGroup = 128, kCodeTile = 64, kCodeHeads = 32, kCodeSlots = 2, kBlocksOfQueries = kEntry / 64;
constexpr int kCodeStride = kLatent + 16, kKeyStride = 2 * kRope + 16;  // bytes: eight rows of a matrix lie in different banks
constexpr int kKeysAt = kCodeTile * kCodeStride, kScalesAt = kKeysAt + kCodeTile * kKeyStride, kCodeTileBytes = kScalesAt + kCodeTile * 4;
// Of shared memory: queries as 9 blocks of [32][64], probabilities [32][64] of each group, tiles, largest scores of each group's warps, barriers.
constexpr int kProbabilitiesAt = kBlocksOfQueries * kCodeHeads * 128, kTilesAt = kProbabilitiesAt + 2 * kCodeHeads * 128;
constexpr int kTopsAt = kTilesAt + 2 * kCodeSlots * kCodeTileBytes, kBarriersAt = kTopsAt + 2 * 4 * kCodeHeads * 4, kCodeBytes = kBarriersAt + 2 * kCodeSlots * 8;

__device__ __forceinline__ void group_barrier(int group) { asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory"); }
// Where wgmma looks for byte b of row r of a block of rows of 128 bytes.
__device__ __forceinline__ int swizzled(int r, int b) { return r * 128 + ((b / 16 ^ r % 8) * 16) + b % 16; }

// Four columns of a head's query, in a block of 64 of them.
template <class T> __device__ __forceinline__ void store_query(char* block, const uint2& four, int head, int column) {
  if (column < kLatent) {  // of 16 columns a lane has 4q .. 4q + 3, as 2q, 2q + 1 and 8 + 2q, 8 + 2q + 1
    const int at = column % 64 / 16 * 32 + column % 16;
    *reinterpret_cast<uint32_t*>(block + swizzled(head, at)) = two_queries<T>(four.x);
    *reinterpret_cast<uint32_t*>(block + swizzled(head, at + 16)) = two_queries<T>(four.y);
  } else {
    const T* v = reinterpret_cast<const T*>(&four);
    struct __align__(8) { T v[4]; } less = {T(float(v[0]) / kQueryStep), T(float(v[1]) / kQueryStep), T(float(v[2]) / kQueryStep), T(float(v[3]) / kQueryStep)};
    *reinterpret_cast<uint2*>(block + swizzled(head, column % 64 * 2)) = *reinterpret_cast<const uint2*>(&less);
  }
}

// The queries of 32 heads, divided by kQueryStep; heads past the last repeat it.
template <class T> __device__ __forceinline__ void store_queries(char* to, const T* row, int head0, int heads) {
  // So many loads at once: the compiler moves none before a store to shared memory.
  constexpr int turns = kCodeHeads * (kEntry / 4) / kThreads, at_once = turns / 2;
  static_assert(turns * kThreads == kCodeHeads * (kEntry / 4) && turns % at_once == 0);
  for (int turn = 0; turn < turns; turn += at_once) {
    uint2 fours[at_once];
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      const int i = (turn + j) * kThreads + threadIdx.x, head = i / (kEntry / 4), column = i % (kEntry / 4) * 4;
      fours[j] = *reinterpret_cast<const uint2*>(row + (size_t)min(head0 + head, heads - 1) * kEntry + column);
    }
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      const int i = (turn + j) * kThreads + threadIdx.x, head = i / (kEntry / 4), column = i % (kEntry / 4) * 4;
      store_query<T>(to + column / 64 * (kCodeHeads * 128), fours[j], head, column);
    }
  }
}

// A warp's copies of 16 tokens of a tile, of which lane i knows where token i % 16 lies.
__device__ __forceinline__ void copy_codes(uint32_t tile, int row0, const MlaCodes& cache, int place, int lane) {
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const size_t from = __shfl_sync(0xffffffffu, place, i);
    copy16(tile + (row0 + i) * kCodeStride + lane * 16, (const char*)cache.codes + from * kLatent + lane * 16);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = i * 4 + lane / 8;
    const size_t from = __shfl_sync(0xffffffffu, place, token);
    copy16(tile + kKeysAt + (row0 + token) * kKeyStride + lane % 8 * 16, (const char*)cache.keys + from * kRope * 2 + lane % 8 * 16);
  }
  if (lane < 16) copy4(tile + kScalesAt + (row0 + lane) * 4, cache.scales + place);
}

// score[4i + 2h + e] = of the warp's token 8h + g with head 8i + 2q + e.
template <class T, class Code> __device__ __forceinline__ void multiply_codes(float (&score)[16], uint32_t tile, uint32_t queries, int row0, int matrix, int matrix_row) {
  const uint32_t from = tile + (row0 + (matrix & 1) * 8 + matrix_row) * kCodeStride + (matrix >> 1) * 16;
  uint32_t words[2][4], a[2][4][4];
  load_matrices(words[0], from), load_matrices(words[1], from + 32);
#pragma unroll
  for (int block = 0; block < kLatent / 64; ++block) {
    auto& operand = a[block % 2];
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = words[k / 2][k % 2 * 2 + h];
        operand[k][h] = two_codes<Code, 0, 1>(word), operand[k][2 + h] = two_codes<Code, 2, 3>(word);
      }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<__half>(score, operand[k], tokens_at(queries + block * (kCodeHeads * 128)) + k * 2);
    wgmma_commit();
    if (block + 1 < kLatent / 64) load_matrices(words[0], from + (block + 1) * 64), load_matrices(words[1], from + (block + 1) * 64 + 32);
    wgmma_wait<1>();
  }
  const uint32_t keys = tile + kKeysAt + (row0 + (matrix & 1) * 8 + matrix_row) * kKeyStride + (matrix >> 1) * 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) load_matrices(a[0][k], keys + k * 32);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T>(score, a[0][k], tokens_at(queries + kLatent / 64 * (kCodeHeads * 128)) + k * 2);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_done(score);
}

// sums[m][4i + 2h + e] += of column 64m + 16 warp + 2g + h with head 8i + 2q + e, over the tile's 64 tokens.
template <class Code> __device__ __forceinline__ void add_codes(float (&sums)[8][16], uint32_t tile, uint32_t probabilities, int warp, int matrix, int matrix_row) {
  const uint32_t from = tile + ((matrix >> 1) * 16 + (matrix & 1) * 8 + matrix_row) * kCodeStride + warp * 16;
  uint32_t words[2][4], a[2][4][4];
  load_matrices_transposed(words[0], from), load_matrices_transposed(words[1], from + 32 * kCodeStride);
#pragma unroll
  for (int m = 0; m < 8; ++m) {
    auto& operand = a[m % 2];
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const uint32_t word = words[k / 2][k % 2 * 2 + b];
        operand[k][2 * b] = two_codes<Code, 0, 2>(word), operand[k][2 * b + 1] = two_codes<Code, 1, 3>(word);
      }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<__half>(sums[m], operand[k], tokens_at(probabilities) + k * 2);
    wgmma_commit();
    if (m + 1 < 8) load_matrices_transposed(words[0], from + (m + 1) * 64), load_matrices_transposed(words[1], from + (m + 1) * 64 + 32 * kCodeStride);
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < 8; ++m) wgmma_done(sums[m]);
}

// What a lane knows of its eight heads 8i + 2q + e, at [2i + e]: the largest score, the same in the whole group, and the sum of its own tokens'.
struct Softmax {
  float largest[8], total[8];

  // Scores become probabilities in shared memory, over the largest score of now. left: tokens of the tile that count. Returns whether sums shrink.
  __device__ __forceinline__ bool step(float (&score)[16], float (&less)[8], const float* scales, float scale, int left, char* probabilities, float* tops, int group, int warp, int lane) {
    const int g = lane >> 2, part = lane & 3, token = warp * 16 + g;
    float logs[2], top[8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float own = scales[token + 8 * h];
      logs[h] = __log2f(own);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& s = score[j / 2 * 4 + 2 * h + j % 2];
        s = token + 8 * h < left ? s * (scale * own) : -INFINITY;
        top[j] = h ? fmaxf(top[j], s + logs[h]) : s + logs[h];
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
      for (int o = 4; o < 32; o <<= 1) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], o));
    if (g == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<float2*>(tops + warp * kCodeHeads + i * 8 + 2 * part) = make_float2(top[2 * i], top[2 * i + 1]);
    }
    group_barrier(group);
    bool shrinks = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 both = make_float2(largest[2 * i], largest[2 * i + 1]);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = *reinterpret_cast<const float2*>(tops + w * kCodeHeads + i * 8 + 2 * part);
        both.x = fmaxf(both.x, other.x), both.y = fmaxf(both.y, other.y);
      }
      less[2 * i] = exp2f(largest[2 * i] - both.x), less[2 * i + 1] = exp2f(largest[2 * i + 1] - both.y);
      largest[2 * i] = both.x, largest[2 * i + 1] = both.y;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) shrinks |= less[j] != 1.f, total[j] *= less[j];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {  // of heads 8i .. and tokens 8h ..
        const int i = pair * 2 + n / 2, h = n % 2;
        const float low = score[4 * i + 2 * h], high = score[4 * i + 2 * h + 1];
        total[2 * i] += exp2f(low - largest[2 * i]), total[2 * i + 1] += exp2f(high - largest[2 * i + 1]);
        const __half2 both = __floats2half2_rn(exp2f(low + logs[h] - largest[2 * i]), exp2f(high + logs[h] - largest[2 * i + 1]));
        packed[n] = *reinterpret_cast<const uint32_t*>(&both);
      }
      const int n = lane >> 3, row = (pair * 2 + n / 2) * 8 + (lane & 7);
      store_matrices_transposed(shared_address(probabilities) + swizzled(row, (2 * warp + n % 2) * 16), packed);
    }
    show_to_copies();
    group_barrier(group);
    return shrinks;
  }

  // The sums of all of the group's tokens.
  __device__ __forceinline__ void gather(float* sums, int group, int warp, int lane) {
    const int g = lane >> 2, part = lane & 3;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      for (int o = 4; o < 32; o <<= 1) total[j] += __shfl_xor_sync(0xffffffffu, total[j], o);
    if (g == 0) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[warp * kCodeHeads + j / 2 * 8 + 2 * part + j % 2] = total[j];
    }
    group_barrier(group);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      total[j] = 0;
      for (int w = 0; w < 4; ++w) total[j] += sums[w * kCodeHeads + j / 2 * 8 + 2 * part + j % 2];
    }
  }
};

// The second group's results, which the first adds to its own. room: [8 * 16 + 16][128] floats.
__device__ __forceinline__ void hand_over(float* room, const float (&sums)[8][16], const Softmax& softmax, int thread) {
#pragma unroll
  for (int m = 0; m < 8; ++m)
#pragma unroll
    for (int i = 0; i < 16; ++i) room[(m * 16 + i) * kGroup + thread] = sums[m][i];
#pragma unroll
  for (int j = 0; j < 8; ++j) room[(128 + j) * kGroup + thread] = softmax.largest[j], room[(136 + j) * kGroup + thread] = softmax.total[j];
}
__device__ __forceinline__ void take_over(const float* room, float (&sums)[8][16], Softmax& softmax, int thread) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float theirs = room[(128 + j) * kGroup + thread], top = fmaxf(softmax.largest[j], theirs);
    const float own = exp2f(softmax.largest[j] - top), share = exp2f(theirs - top);
    softmax.largest[j] = top, softmax.total[j] = softmax.total[j] * own + room[(136 + j) * kGroup + thread] * share;
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = j / 2 * 4 + 2 * h + j % 2;
        sums[m][i] = sums[m][i] * own + room[(m * 16 + i) * kGroup + thread] * share;
      }
  }
}

template <class T, class Code> __global__ void __launch_bounds__(kThreads, 1) attend_codes(const T* q, const MlaCodes cache, const Attend p) {
  extern __shared__ __align__(1024) char memory[];
  const int thread = threadIdx.x % kGroup, group = threadIdx.x / kGroup, warp = thread >> 5, lane = threadIdx.x & 31;
  const int g = lane >> 2, part = lane & 3, matrix = lane >> 3, matrix_row = lane & 7;
  const int head0 = blockIdx.x * kCodeHeads, split = blockIdx.y, row = blockIdx.z;
  char* own_tiles = memory + kTilesAt + group * kCodeSlots * kCodeTileBytes;
  char* probabilities = memory + kProbabilitiesAt + group * kCodeHeads * 128;
  float* tops = reinterpret_cast<float*>(memory + kTopsAt) + group * 4 * kCodeHeads;
  const uint32_t barriers = shared_address(memory + kBarriersAt) + group * kCodeSlots * 8;

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * kCodeSlots; ++i) init_barrier(shared_address(memory + kBarriersAt) + i * 8, kGroup);
  }
  __syncthreads();
  const int length = p.lengths[row * p.lengths_stride], tiles = tiles_of(length, kCodeTile), parts = parts_of(tiles, p);
  const int begin = split < parts ? tiles * split / parts : 0, count = split < parts ? tiles * (split + 1) / parts - begin : 0;
  const int turns = (count + 1 - group) / 2;

  // Tokens past the end repeat the last: their probability is zero, and zero times unwritten memory might be NaN.
  const auto first_token = [&](int turn) { return (begin + group + 2 * turn) * kCodeTile; };
  const auto look_up = [&](int turn) {
    const int token = min(first_token(turn) + warp * 16 + lane % 16, length - 1), block = token / p.block_size;
    return p.table[(row * p.table_width + block) * p.table_stride] * p.block_size + token - block * p.block_size;
  };
  const auto request = [&](int turn, int place) {
    copy_codes(shared_address(own_tiles) + turn % kCodeSlots * kCodeTileBytes, warp * 16, cache, place, lane);
    arrive_after_copies(barriers + turn % kCodeSlots * 8);
  };
  // The newest token was cached before the queries' kernel began, so all of the cache may be read while that ends.
  for (int turn = 0; turn < min(turns, kCodeSlots); ++turn) request(turn, look_up(turn));
  wait_for_predecessor();
  let_successor_start();
  if (count == 0) return;
  store_queries(memory, q + (size_t)row * p.heads * kEntry, head0, p.heads);
  show_to_copies();
  __syncthreads();

  float sums[8][16] = {};
  Softmax softmax;
#pragma unroll
  for (int j = 0; j < 8; ++j) softmax.largest[j] = -INFINITY, softmax.total[j] = 0;
  for (int turn = 0; turn < turns; ++turn) {
    char* tile = own_tiles + turn % kCodeSlots * kCodeTileBytes;
    const bool more = turn + kCodeSlots < turns;
    const int next = more ? look_up(turn + kCodeSlots) : 0;  // a long way off, so asked for before it is needed
    wait_for(barriers + turn % kCodeSlots * 8, turn / kCodeSlots & 1);
    float score[16] = {}, less[8];
    multiply_codes<T, Code>(score, shared_address(tile), shared_address(memory), warp * 16, matrix, matrix_row);
    const float* scales = reinterpret_cast<const float*>(tile + kScalesAt);
    const bool shrinks = softmax.step(score, less, scales, p.scale * kQueryStep, length - first_token(turn), probabilities, tops, group, warp, lane);
    if (__any_sync(0xffffffffu, shrinks)) {
#pragma unroll
      for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[m][i] *= less[i / 4 * 2 + i % 2];
    }
    add_codes<Code>(sums, shared_address(tile), shared_address(probabilities), warp, matrix, matrix_row);
    group_barrier(group);  // everyone is done with the tile
    if (more) request(turn + kCodeSlots, next);
  }
  softmax.gather(tops, group, warp, lane);
  float* room = reinterpret_cast<float*>(memory + kTilesAt);
  __syncthreads();
  if (group == 1) hand_over(room, sums, softmax, thread);
  __syncthreads();
  if (group == 1) return;
  take_over(room, sums, softmax, thread);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int head = head0 + j / 2 * 8 + 2 * part + j % 2;
    if (head >= p.heads) continue;
    const size_t at = ((size_t)row * p.heads + head) * p.splits + split;
    if (warp == 0 && g == 0) p.found[at] = make_float2(softmax.largest[j], softmax.total[j]);
    const float share = 1.f / softmax.total[j];
    T* out = reinterpret_cast<T*>(p.weighted) + at * kLatent + warp * 16 + 2 * g;
#pragma unroll
    for (int m = 0; m < 8; ++m) *reinterpret_cast<uint32_t*>(out + m * 64) = pair_of<T>(sums[m][j / 2 * 4 + j % 2] * share, sums[m][j / 2 * 4 + 2 + j % 2] * share);
  }
}

template <class T, class Code> int launch_attend_codes(const void* q, const MlaCodes& cache, const Attend& p, int rows, void* s) {
  static SharedMemory shared;
  if (const int fault = shared.allow(attend_codes<T, Code>, kCodeBytes)) return fault;
  return start(attend_codes<T, Code>, dim3((p.heads + kCodeHeads - 1) / kCodeHeads, p.splits, rows), kThreads, kCodeBytes, s, (const T*)q, cache, p);
}

}  // namespace
