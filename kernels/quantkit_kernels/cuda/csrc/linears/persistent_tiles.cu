// y[M, N] = x[M, K] @ W[N, K]^T in INT8. A block stays on its multiprocessor and computes one tile after the other.
//
// A tile is `STRIPS` strips of 64 rows of W by `NT` tokens; wgmma reads both from shared memory. The two warpgroups of a block that multiply
// take turns: while one writes its results, the other has the tensor cores alone. The third fills the ring, tile after tile. A barrier distinguishes
// one round of the ring from the next, but not from the one after it, so a warpgroup may look at the ring only when the other has seen all of
// its own stages. The two blocks of a cluster have tiles of the same tokens, or of the same strips; each block copies one half of what they
// share into both.
//
// Tiles of the same rows of W follow one another: they run at the same time, and W is read from memory once. When the tiles have been dealt
// out evenly, those that are left are cut into `parts` along the tokens.

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "common/packed.cuh"
#include "linears/tile_finish.cuh"
#include "linears/tile_params.cuh"
#include "common/wgmma.cuh"

namespace {

constexpr int kThreads = 3 * 128, kStripBytes = 64 * 128;
constexpr int kAhead = 8;  // stages of the first tile's weights that are asked into the L2 cache beyond those of the ring
// What is left of shared memory, as of registers, takes a block of the kernel that quantizes tokens: this one's blocks begin while that still
// runs, and the next one's wait there for this to end.
constexpr int kRoom = (228 << 10) - 2 * 1024 - 256;
constexpr int kBox = 32, kBoxBytes = kBox * 128;  // tokens of a box of results, 64 of each

template <int STRIPS, int NT> struct Shape {
  static constexpr int tokens = NT * 128, words = STRIPS * kStripBytes, stage = tokens + words;
  // Boxes of a warpgroup's results that leave together: all, or as many as take no stage from the ring.
  static constexpr int boxes = NT == 256 ? 2 : STRIPS * NT / kBox < 4 ? STRIPS * NT / kBox : 4, staged = boxes * kBoxBytes;
  // Of each thread at the start, and of those that multiply once the others have handed theirs over.
  static constexpr int registers = STRIPS * NT == 256 ? 160 : 128, more_registers = STRIPS * NT == 256 ? 208 : 0;
  static constexpr int rest = 2 * staged + 2 * NT * 4 + 512;
  static constexpr int stages = (kRoom - rest) / stage < 16 ? (kRoom - rest) / stage : 16;
  static constexpr int bytes = stages * stage + rest;
};

// How the tiles are dealt to the clusters: `whole` pairs of tiles one by one, then the rest in `parts`. A pair has the same tokens, or the
// same strips.
struct Deal {
  int pairs, whole, parts, units;  // `pairs` of the same strips
  int step_along, step_above;      // from a cluster's pair to its next
  bool same_strips;
};

// A cluster's way through the units, without divisions: a warpgroup looks for its next one when it has nothing else to do.
struct Walk {
  int unit, along, above;  // of its pair: which among those of the same strips, and how many such rows lie before it

  __device__ __forceinline__ Walk(const Deal& d, int cluster) : unit(cluster), along(cluster % d.pairs), above(cluster / d.pairs) {}
  __device__ __forceinline__ void next(const Deal& d, int clusters) {
    unit += clusters, along += d.step_along, above += d.step_above;
    if (along >= d.pairs) along -= d.pairs, ++above;
  }
};

// What a block computes at a time: strips from `strip` on, `width` tokens from `first` on of a tile, `count` of them there.
struct Unit {
  int strip, tile, first, width, count;
  bool any;  // of the cluster's two tiles
};

template <int STRIPS, int NT> __device__ __forceinline__ Unit unit_of(const TileParams& p, const Deal& d, const Walk& walk, int block) {
  int along = walk.along, above = walk.above, width = NT, first = 0;
  if (walk.unit >= d.whole && d.parts > 1) {
    const int rest = walk.unit - d.whole, pair = d.whole + rest / d.parts;
    along = pair % d.pairs, above = pair / d.pairs, width = NT / d.parts, first = rest % d.parts * width;
  }
  Unit unit = {d.same_strips ? above * STRIPS : (above * 2 + block) * STRIPS, d.same_strips ? along * 2 : along, first, width, 0, true};
  unit.count = min(unit.width, p.m - unit.tile * NT - unit.first);
  unit.any = unit.count > 0;
  while (unit.width > 32 && unit.width > NT / 4 && unit.count <= unit.width / 2) unit.width /= 2;
  if (d.same_strips && block == 1) {
    if (unit.tile + 1 < p.tiles) unit.tile += 1, unit.count = max(0, min(unit.width, p.m - unit.tile * NT - unit.first));
    else unit.count = 0;
  }
  return unit;
}

__device__ __forceinline__ void ask_into_cache(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

// 64 results of each of `kBox` tokens from shared memory, in chunks as wgmma.cuh has them; what lies beyond the map's sizes is left out.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int feature, int token) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(&map), "r"(feature), "r"(token), "r"(from) : "memory");
}
// Until all that this thread has sent off is read, so that its place may be written again.
__device__ __forceinline__ void wait_for_boxes() {
  asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}

struct Ring {
  uint32_t stages, filled, emptied;  // shared memory: the stages, and the barriers of each
};

// By one thread of each block.
template <int STRIPS, int NT>
__device__ __forceinline__ void fill_ring(const TileParams& p, const Deal& d, const Ring& ring, int cluster, int clusters, int block) {
  using S = Shape<STRIPS, NT>;
  const int stages = p.k / 128, strips = p.n / 64;
  Place<S::stages> at;
  bool first = true;
  for (Walk walk(d, cluster); walk.unit < d.units; walk.next(d, clusters)) {
    const Unit unit = unit_of<STRIPS, NT>(p, d, walk, block);
    if (!unit.any) continue;
    const uint8_t* words[STRIPS];
#pragma unroll
    for (int w = 0; w < STRIPS; ++w)  // strips beyond the last repeat it, and are not stored
      words[w] = reinterpret_cast<const uint8_t*>(p.words) + (size_t)min(unit.strip + w, strips - 1) * stages * kStripBytes;
    const uint32_t rows = max(16, (unit.count + 15) / 16 * 16), half = rows * 64;
    const uint8_t* tokens = p.x + (size_t)unit.tile * stages * S::tokens + unit.first * 128;
    const auto request_words = [&](int s, const Place<S::stages>& place) {
      const uint32_t barrier = ring.filled + place.slot * 8, to = ring.stages + place.slot * S::stage + S::tokens;
      wait_for(ring.emptied + place.slot * 8, place.phase ^ 1);
      expect_bytes(barrier, S::words + 2 * half);
#pragma unroll
      for (int w = 0; w < STRIPS; ++w) {
        constexpr int part = kStripBytes / 2;
        const uint8_t* from = words[w] + (size_t)s * kStripBytes;
        const uint32_t there = to + w * kStripBytes;
        if (d.same_strips) copy_to_both(there + block * part, from + block * part, part, barrier);
        else copy_bulk(there, from, kStripBytes, barrier);
      }
    };
    const auto request_tokens = [&](int s, const Place<S::stages>& place) {
      const uint32_t barrier = ring.filled + place.slot * 8, to = ring.stages + place.slot * S::stage;
      const uint8_t* from = tokens + (size_t)s * S::tokens;
      if (d.same_strips) copy_bulk(to, from, 2 * half, barrier);
      else copy_to_both(to + block * half, from + block * half, half, barrier);
    };
    int s = 0;
    if (first) {
      // Weights were there before the kernel that quantizes the tokens began.
      const int ahead = min(stages, S::stages);
      Place<S::stages> place = at;
      for (int i = 0; i < ahead; ++i, place.next()) request_words(i, place);
      const int more = min(stages - ahead, kAhead);
      if (more > 0 && !(d.same_strips && block == 1))
#pragma unroll
        for (int w = 0; w < STRIPS; ++w) ask_into_cache(words[w] + (size_t)ahead * kStripBytes, more * kStripBytes);
      wait_for_predecessor();
      for (; s < ahead; ++s, at.next()) request_tokens(s, at);
      first = false;
    }
    for (; s < stages; ++s, at.next()) request_words(s, at), request_tokens(s, at);
  }
}

// A warpgroup's tile of W tokens: the product, and its results through `staged` to memory.
template <class T, int STRIPS, int NT, int W>
__device__ __forceinline__ void multiply(const TileParams& p, const CUtensorMap& map, const Unit& unit, const Ring& ring,
                                         Place<Shape<STRIPS, NT>::stages>& at, uint32_t released, char* staged, float* x_scale, uint32_t my_turn,
                                         uint32_t my_phase, uint32_t turn_of_other, int warpgroup) {
  using S = Shape<STRIPS, NT>;
  const int stages = p.k / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x & 31, slot = unit.tile * NT + unit.first;
  if (thread * 4 < W) copy16(shared_address(x_scale + thread * 4), p.x_scale + slot + thread * 4);
  float scale[STRIPS][2];
  int acc[STRIPS][W / 2];
#pragma unroll
  for (int w = 0; w < STRIPS; ++w) {
    const int row = min((unit.strip + w) * 64, p.n - 64) + warp * 16 + (lane >> 2);
    scale[w][0] = p.row_scale[row], scale[w][1] = p.row_scale[row + 8];
#pragma unroll
    for (int i = 0; i < W / 2; ++i) acc[w][i] = 0;
  }
  if (my_turn) wait_for(my_turn, my_phase);
  uint32_t last = 0;
  for (int s = 0; s < stages; ++s) {
    wait_for(ring.filled + at.slot * 8, at.phase);
    const uint32_t stage = ring.stages + at.slot * S::stage, words = stage + S::tokens;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int w = 0; w < STRIPS; ++w) wgmma_int8(acc[w], weights_at(words + w * kStripBytes, j), tokens_at(stage) + j * 2);
    wgmma_commit();
    if (s == stages - 1 && lane == 0) arrive(turn_of_other);
    wgmma_wait<1>();
    if (s > 0 && lane < 2) arrive_there(released + last * 8);
    last = at.slot;
    at.next();
  }
  // The tokens' factors came long ago; to see all of them, meet.
  asm volatile("cp.async.wait_all; bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
  const auto release = [&] {
    wgmma_wait<0>();
    if (lane < 2) arrive_there(released + last * 8);
  };

  // A token's 64 results of a strip are 128 bytes, 16-byte chunk c at place c ^ (token % 8). As many boxes as there is room for are transposed
  // into results first and written at once then: waiting for copies, for one another and for shared memory is what takes long.
  const uint32_t to = shared_address(staged) + ((lane >> 4) * 8 + lane % 8) * 128 + ((warp * 2 + (lane >> 3 & 1)) ^ (lane % 8)) * 16;
  constexpr int of_strip = W / kBox, boxes = STRIPS * of_strip;
  const bool by_copies = p.out_n % 8 == 0;
#pragma unroll
  for (int first = 0; first < boxes; first += S::boxes) {
    constexpr int most = S::boxes < boxes ? S::boxes : boxes;
    const int many = boxes - first < most ? boxes - first : most;
    float2 factors[most * 4];
#pragma unroll
    for (int i = 0; i < many * 4; ++i)
      factors[i] = reinterpret_cast<const float2*>(x_scale)[((first + i / 4) % of_strip * 4 + i % 4) * 4 + (lane & 3)];
    if (first == 0) release();
    uint32_t m[most * 2][4];
#pragma unroll
    for (int i = 0; i < many * 4; ++i) {
      const int w = (first + i / 4) / of_strip, at = ((first + i / 4) % of_strip * 4 + i % 4) * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        m[i / 2][i % 2 * 2 + h] = pair_of<T>(float(acc[w][at + 2 * h]) * scale[w][h] * factors[i].x,
                                             float(acc[w][at + 2 * h + 1]) * scale[w][h] * factors[i].y);
    }
    if (thread == 0) wait_for_boxes();
    asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
#pragma unroll
    for (int i = 0; i < many * 2; ++i) store_matrices_transposed(to + i * 16 * 128, m[i]);
    if (by_copies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
#pragma unroll
    for (int b = 0; b < many; ++b) {
      const int from = (first + b) % of_strip * kBox, feature = (unit.strip + (first + b) / of_strip) * 64;
      const int count = min(unit.count - from, kBox);
      if (by_copies) {
        if (thread == 0 && count > 0) store_box(map, shared_address(staged) + b * kBoxBytes, feature, slot + from);
        continue;
      }
      for (int i = thread; i < count * 64; i += 128) {
        const int t = i / 64, r = i % 64;
        const T y = *reinterpret_cast<const T*>(staged + b * kBoxBytes + t * 128 + ((r / 8) ^ (t % 8)) * 16 + r % 8 * 2);
        if (feature + r < p.out_n) reinterpret_cast<T*>(p.out)[(size_t)(slot + from + t) * p.out_n + feature + r] = y;
      }
    }
  }
}

template <class T, int STRIPS, int NT>
__global__ void __maxnreg__((Shape<STRIPS, NT>::registers)) __cluster_dims__(2, 1, 1)
persistent_tiles(const TileParams p, const Deal d, const __grid_constant__ CUtensorMap map) {
  using S = Shape<STRIPS, NT>;
  extern __shared__ __align__(1024) char shared[];  // the ring; of each warpgroup results and its tokens' factors; barriers
  const uint32_t barriers = shared_address(shared) + S::bytes - 512, turns = barriers + 2 * S::stages * 8;
  const Ring ring = {shared_address(shared), barriers, barriers + S::stages * 8};
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0), lane = threadIdx.x & 31, block = blockIdx.x % 2;
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; ++i) init_barrier(ring.filled + i * 8), init_barrier(ring.emptied + i * 8, 2 * 4);
    for (int i = 0; i < 2; ++i) init_barrier(turns + i * 8, 4);
    show_barriers_to_copies();
  }
  __syncthreads();
  cluster_barrier();

  if (warpgroup == 2) {
    if constexpr (S::more_registers) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(3 * S::registers - 2 * S::more_registers));
    if (threadIdx.x == 2 * 128) fill_ring<STRIPS, NT>(p, d, ring, cluster, clusters, block);
    __syncwarp();
  } else {
    if constexpr (S::more_registers) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(S::more_registers));
    const uint32_t released = address_in(ring.emptied, lane & 1);
    char* staged = shared + S::stages * S::stage + warpgroup * S::staged;
    float* x_scale = reinterpret_cast<float*>(shared + S::stages * S::stage + 2 * S::staged) + warpgroup * NT;
    wait_for_predecessor();
    Place<S::stages> at;
    int turn = 0;
    uint32_t phase = 0;
    for (Walk walk(d, cluster); walk.unit < d.units; walk.next(d, clusters)) {
      const Unit unit = unit_of<STRIPS, NT>(p, d, walk, block);
      if (!unit.any) continue;
      if (turn++ % 2 != warpgroup) {
        at.skip(p.k / 128);
        continue;
      }
      if (walk.unit + clusters >= d.units) let_successor_start();
      const uint32_t mine = turn > 1 ? turns + warpgroup * 8 : 0, other = turns + (warpgroup ^ 1) * 8;
      const auto run = [&]<int W>() {
        multiply<T, STRIPS, NT, W>(p, map, unit, ring, at, released, staged, x_scale, mine, phase, other, warpgroup);
      };
      if (unit.width == NT) run.template operator()<NT>();
      else if (NT > 32 && unit.width == NT / 2) run.template operator()<NT / 2 < 32 ? 32 : NT / 2>();
      else if (NT > 64) run.template operator()<NT / 4 < 32 ? 32 : NT / 4>();
      if (mine) phase ^= 1;
    }
  }
  if (warpgroup < 2 && threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
  __syncwarp();
  cluster_barrier();  // the other block has written and arrived here for the last time
}

// Where boxes of results go.
template <class T> int map_of(const TileParams& p, CUtensorMap& map) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (!encode) return (int)cudaErrorNotSupported;
  constexpr auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[2] = {(cuuint64_t)p.out_n, (cuuint64_t)p.m}, pitch[1] = {(cuuint64_t)p.out_n * 2};
  const cuuint32_t box[2] = {64, kBox}, step[2] = {1, 1};
  const auto fault = encode(&map, type, 2, p.out, sizes, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return fault == CUDA_SUCCESS ? 0 : (int)cudaErrorInvalidValue;
}

template <class T, int STRIPS, int NT> int launch(const TileParams& p, bool same_strips, int parts, void* stream) {
  using S = Shape<STRIPS, NT>;
  auto kernel = persistent_tiles<T, STRIPS, NT>;
  CUtensorMap map = {};
  if (p.out_n % 8 == 0)
    if (const int fault = map_of<T>(p, map)) return fault;
  static SharedMemory shared;
  if (const int fault = shared.allow(kernel, S::bytes)) return fault;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int groups = (p.n / 64 + STRIPS - 1) / STRIPS, pairs = same_strips ? (p.tiles + 1) / 2 : p.tiles;
  const int clusters = multiprocessors / 2, all = (same_strips ? groups : (groups + 1) / 2) * pairs;
  const int whole = parts == 1 ? all : all / clusters * clusters;
  const Deal d = {pairs, whole, parts, whole + (all - whole) * parts, clusters % pairs, clusters / pairs, same_strips};
  return start(kernel, dim3(2 * (d.units < clusters ? d.units : clusters)), kThreads, S::bytes, stream, p, d, map);
}

template <class T> int launch(const TileParams& p, int tokens, int strips, int same_strips, int parts, void* stream) {
  const auto run = [&](auto launcher) { return launcher(p, same_strips, parts, stream); };
  if (strips == 2) return tokens == 128 ? run(launch<T, 2, 128>) : run(launch<T, 2, 64>);
  return tokens == 256 ? run(launch<T, 1, 256>) : tokens == 128 ? run(launch<T, 1, 128>) : run(launch<T, 1, 64>);
}

}  // namespace

// x in tiles of `tokens`: 64, 128 or, with one strip, 256. dtype: 0 bf16, 1 fp16. parts: 1, 2 or, of more than 64 tokens, 4. Returns a
// cudaError_t.
extern "C" int qk_persistent_tiles(const TileParams* p, int dtype, int tokens, int strips, int same_strips, int parts, void* stream) {
  const auto run = [&](auto launcher) { return launcher(*p, tokens, strips, same_strips, parts, stream); };
  return dtype == 0 ? run(launch<__nv_bfloat16>) : run(launch<__half>);
}
