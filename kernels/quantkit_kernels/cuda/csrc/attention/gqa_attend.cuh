// Grouped-query attention of one query per row over the paged cache, read where it lies: softmax(scale * q k) v.
//
// One launch. A unit is a row's heads that share keys, up to 16 of them. The work is counted in tiles, 64 tokens of a unit each. All tiles of
// all units form one sequence, and every block gets an equal share of that line: many blocks read a long row, and rows of any lengths load the
// device evenly. Each of a block's four warps takes 16 tokens of a tile. It has a ring of copies of its own, which goes on from unit to unit,
// and sums of its own; the warps meet only at the end of a unit. Where a unit lies in several shares, the block that finishes last merges its
// parts, in the order of the tokens.
//
// The kernel reads lengths on the device: a captured graph stays right when they change, and nothing past a row's end, or before its window,
// is read.

#pragma once

#include "attention/gqa_tokens.cuh"
#include "common/launch.cuh"

namespace {

// `Kind` says what the cache holds (gqa_halves.cuh, gqa_codes.cuh): how wide a token lies in the ring, how it is copied there, in which order a
// lane has the queries, how tokens are attended to, and which columns a lane's sums are of.
template <class Kind> struct Ring {
  static constexpr int slot = Kind::slot;  // bytes: keys and values of 16 tokens
  static constexpr int per_sm = Kind::D <= 128 ? 2 : 1, fit = (per_sm == 2 ? 104 : 200) * 1024 / (kWarps * slot), slots = fit < 8 ? fit : 8;
  static constexpr int of_block = kWarps * slots * slot;
};

// A warp's 16 tokens of a tile: how many of them there are, from token `first` of the row on.
struct Tokens { int first, left; };
__device__ __forceinline__ Tokens tokens_of(const Unit& unit, long long tile) {
  const int skipped = int(tile - unit.begin) * kTile + (threadIdx.x >> 5) * kWarpTokens;
  return {unit.span.first + skipped, unit.span.tokens - skipped};
}

// In which row of keys [.., kv_heads] token `lane` of the warp's 16 lies; -1 where there are none. Tokens past the end repeat the last: their
// probability is zero, and zero times unwritten memory might be NaN.
__device__ __forceinline__ int look_up(const GqaDecode& p, const Unit& unit, long long tile) {
  const Tokens tokens = tokens_of(unit, tile);
  if (tokens.left <= 0) return -1;
  const int token = min(tokens.first + (int)(threadIdx.x % kWarpTokens), tokens.first + tokens.left - 1), block = token / p.block_size;
  const int page = p.table[((size_t)unit.row * p.table_width + block) * p.table_stride];
  return (page * p.block_size + token - block * p.block_size) * p.kv_heads + unit.kv_head;
}

// What the warps exchange at the end of a unit: of each head largest score and sum, their share of the block's, and the block's own.
struct Found { float largest[kWarps][kHeads], total[kWarps][kHeads], share[kWarps][kHeads], top[kHeads], sum[kHeads]; };

// The warps' sums as one, in `merged` [16][D + 8]. They are put together in turns; with up to 8 heads by two warps at a time, in two sums of 8
// rows that are still to be added.
template <class Kind, int HALVES> __device__ __forceinline__ void merge_warps(Sums<Kind::D>& sums, Found& found, float* merged) {
  constexpr int D = Kind::D;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, part = lane & 3;
#pragma unroll
  for (int h = 0; h < HALVES; ++h) {
    float total = sums.total[h];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (part == 0) found.largest[warp][g + 8 * h] = sums.largest[h], found.total[warp][g + 8 * h] = total;
  }
  __syncthreads();
  if (threadIdx.x < 8 * HALVES) {
    float top = -INFINITY, sum = 0;  // finite afterwards: the first warp has a token
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, found.largest[w][threadIdx.x]);
    for (int w = 0; w < kWarps; ++w) {
      const float share = exp2f(found.largest[w][threadIdx.x] - top);
      found.share[w][threadIdx.x] = share, sum += share * found.total[w][threadIdx.x];
    }
    found.top[threadIdx.x] = top, found.sum[threadIdx.x] = sum;
  }
  __syncthreads();
  constexpr int at_once = HALVES == 1 ? 2 : 1;
  for (int turn = 0; turn < kWarps / at_once; ++turn) {
    if (warp / at_once == turn) {
#pragma unroll
      for (int h = 0; h < HALVES; ++h) {
        const float share = found.share[warp][g + 8 * h];
        Kind::add_sums(merged + (warp % at_once * 8 + g + 8 * h) * (D + 8), sums, h, share, turn > 0, part);
      }
    }
    __syncthreads();
  }
}

// A part of a unit as a block keeps it: of the first unit in its share, or of the last.
__device__ __forceinline__ int part_floats(const GqaDecode& p) { return kHeads * p.d + 2 * kHeads; }
__device__ __forceinline__ float* part_of(const GqaDecode& p, int block, bool at_the_end) { return p.partial + ((size_t)block * 2 + at_the_end) * part_floats(p); }

// A unit's parts, kept by blocks first .. last, as one result. Of all of them only the first can have begun before the unit.
template <class T> __device__ __forceinline__ void merge_parts(const GqaDecode& p, const Line& line, const Unit& unit, int first, int last, Found& found, T* out) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, parts = last - first + 1, stride = 2 * part_floats(p);
  const float *others = part_of(p, first, false), *foremost = part_of(p, first, line.begin(first) < unit.begin);
  const auto part_at = [&](int i) { return i ? others + (size_t)i * stride : foremost; };
  for (int head = warp; head < unit.heads; head += kWarps) {
    float top = -INFINITY, sum = 0;
    for (int i = lane; i < parts; i += 32) {
      const float* about = part_at(i) + kHeads * p.d + head;
      const float largest = __ldcg(about), total = __ldcg(about + kHeads), both = fmaxf(top, largest);
      sum = sum * exp2f(top - both) + total * exp2f(largest - both), top = both;
    }
    float all = top;
    for (int o = 16; o; o >>= 1) all = fmaxf(all, __shfl_xor_sync(0xffffffffu, all, o));
    sum *= exp2f(top - all);
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane == 0) found.top[head] = all, found.sum[head] = sum;
  }
  __syncthreads();
  for (int at = threadIdx.x * 4; at < unit.heads * p.d; at += kThreads * 4) {
    const int head = at / p.d;
    const float top = found.top[head], less = 1.f / found.sum[head];
    float4 sum = {};
#pragma unroll 8
    for (int i = 0; i < parts; ++i) {
      const float* part = part_at(i);
      const float4 v = __ldcg(reinterpret_cast<const float4*>(part + at));
      const float share = exp2f(__ldcg(part + kHeads * p.d + head) - top);
      sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
    }
    *reinterpret_cast<uint2*>(out + at) = make_uint2(packed<T>(sum.x * less, sum.y * less), packed<T>(sum.z * less, sum.w * less));
  }
}

// What the block found of a unit: its result, where the block's share begin .. end holds all of it.
template <class T, int D, int HALVES>
__device__ __forceinline__ void finish(const GqaDecode& p, const Line& line, const Unit& unit, long long begin, long long end, Found& found, const float* merged) {
  __shared__ bool is_last;
  T* out = (T*)p.out + ((size_t)unit.row * p.kv_heads * p.shared + unit.kv_head * p.shared + unit.head0) * p.d;
  const bool whole = unit.begin >= begin && unit.end <= end;
  float* part = part_of(p, blockIdx.x, begin < unit.begin);
  for (int i = threadIdx.x * 4; i < unit.heads * p.d; i += kThreads * 4) {
    const int head = i / p.d, at = head * (D + 8) + i - head * p.d;
    float4 v = *reinterpret_cast<const float4*>(merged + at);
    if constexpr (HALVES == 1) {
      const float4 w = *reinterpret_cast<const float4*>(merged + 8 * (D + 8) + at);
      v.x += w.x, v.y += w.y, v.z += w.z, v.w += w.w;
    }
    if (whole) {
      const float less = 1.f / found.sum[head];
      *reinterpret_cast<uint2*>(out + i) = make_uint2(packed<T>(v.x * less, v.y * less), packed<T>(v.z * less, v.w * less));
    } else {
      __stcg(reinterpret_cast<float4*>(part + i), v);
    }
  }
  if (whole) return;
  if (threadIdx.x < unit.heads) {
    __stcg(part + kHeads * p.d + threadIdx.x, found.top[threadIdx.x]);
    __stcg(part + kHeads * p.d + kHeads + threadIdx.x, found.sum[threadIdx.x]);
  }
  const int first = line.holder(unit.begin), last = line.holder(unit.end - 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* arrived = p.arrived + (size_t)unit.row * line.per_row + unit.number;
    is_last = atomicAdd(arrived, 1) == last - first;
    if (is_last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  if (is_last) merge_parts<T>(p, line, unit, first, last, found, out);
}

template <class Kind, int HALVES> __global__ void __launch_bounds__(kThreads, Ring<Kind>::per_sm) gqa_decode(const GqaDecode p) {
  using T = typename Kind::T;
  constexpr int D = Kind::D, slots = Ring<Kind>::slots;
  extern __shared__ __align__(128) char shared[];
  __shared__ Found found;
  float* merged = reinterpret_cast<float*>(shared + Ring<Kind>::of_block);
  int *before = reinterpret_cast<int*>(merged + kHeads * (D + 8)), *lengths = before + p.rows + 1;
  const int warp = threadIdx.x >> 5;
  if (warp == 0) count_tiles(p, before, lengths);
  __syncthreads();
  const int groups = (p.shared + kHeads - 1) / kHeads, per_row = p.kv_heads * groups;
  const long long tiles = (long long)before[p.rows] * per_row;
  const Line line = {before, lengths, p.rows, groups, per_row, (int)min((long long)p.blocks, max(1ll, tiles / p.least_tiles)), tiles};
  const bool working = blockIdx.x < line.blocks && tiles > 0;
  const long long begin = working ? line.begin(blockIdx.x) : 0, end = working ? line.begin(blockIdx.x + 1) : 0;
  Unit unit = {}, ahead = {};
  int places[slots + 1];
  if (working) {
    unit = ahead = line.unit_at(p, begin);
#pragma unroll
    for (int i = 0; i <= slots; ++i) {
      if (begin + i >= ahead.end && begin + i < end) ahead = line.unit_at(p, begin + i);
      places[i] = begin + i < end ? look_up(p, ahead, begin + i) : -1;
    }
  }
  wait_for_predecessor();
  let_successor_start();
  // Rows of length 0 are in no share.
  for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
    if (before[row] == before[row + 1])
      for (int i = threadIdx.x; i < p.kv_heads * p.shared * p.d; i += kThreads) ((T*)p.out)[(size_t)row * p.kv_heads * p.shared * p.d + i] = T(0.f);
  if (!working) return;

  const uint32_t ring = shared_address(shared) + warp * slots * Ring<Kind>::slot;
#pragma unroll
  for (int i = 0; i < slots; ++i) {
    if (places[i] >= 0) Kind::request(p, ring + i * Ring<Kind>::slot, places[i]);
    end_copies();
  }
  int next = places[slots], slot = 0;
  uint32_t queries[D / 16][4];
  Kind::template load_queries<HALVES>(queries, p, unit);
  Sums<D> sums;
  sums.clear();
  for (long long tile = begin; tile < end; ++tile) {
    wait_for_copies<slots - 1>();
    __syncwarp();
    const int left = tokens_of(unit, tile).left, place = next;
    if (tile + slots + 1 < end) {  // a long way off, so looked up before it is asked for
      if (tile + slots + 1 >= ahead.end) ahead = line.unit_at(p, tile + slots + 1);
      next = look_up(p, ahead, tile + slots + 1);
    }
    const uint32_t here = ring + slot * Ring<Kind>::slot;
    if (left > 0) Kind::template attend<HALVES>(sums, queries, here, left, p.scale);
    __syncwarp();
    if (tile + slots < end && place >= 0) Kind::request(p, here, place);
    end_copies();
    slot = slot + 1 == slots ? 0 : slot + 1;
    if (tile + 1 < unit.end && tile + 1 < end) continue;
    const Unit done = unit;
    if (tile + 1 < end) {
      unit = line.unit_at(p, tile + 1);
      Kind::template load_queries<HALVES>(queries, p, unit);
    }
    merge_warps<Kind, HALVES>(sums, found, merged);
    sums.clear();
    finish<T, D, HALVES>(p, line, done, begin, end, found, merged);
    __syncthreads();
  }
  wait_for_copies<0>();
}

constexpr int kMostRows = 1024;

template <class Kind, int HALVES> int run(const GqaDecode& p, void* stream) {
  constexpr int fixed = Ring<Kind>::of_block + 4 * kHeads * (Kind::D + 8);
  static SharedMemory shared;
  if (const int fault = shared.allow(gqa_decode<Kind, HALVES>, fixed + 4 * (2 * kMostRows + 1))) return fault;
  return start(gqa_decode<Kind, HALVES>, dim3(p.blocks), kThreads, fixed + 4 * (2 * p.rows + 1), stream, p);
}
template <class Kind> int run(const GqaDecode& p, void* stream) { return p.shared > 8 ? run<Kind, 2>(p, stream) : run<Kind, 1>(p, stream); }

}  // namespace
