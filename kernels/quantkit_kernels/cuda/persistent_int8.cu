// y[M, N] = x[M, K] @ W[N, K]^T in INT8 for many tokens, by blocks that stay on their multiprocessors and go from tile to tile.
//
// The product itself is the tile kernel's: strips of 64 rows of W in registers, 256 tokens in shared memory, sums in registers. What differs:
//   - A block goes on to its next tile at once, whose first stages are on their way while it writes the results of the last. One of its two
//     warpgroups starts two stages behind the other, so that while one writes the other has the tensor cores to itself.
//   - Two blocks of a cluster lie above one another and share their tokens: each copies one half into both.
//   - What is left when the tiles have been dealt out evenly is cut into `parts` along the tokens.
// Tiles of the same rows of W follow one another, for they run at the same time and read W from memory once.

#include <cuda_runtime.h>
#include <stdint.h>

#include "copies.cuh"
#include "launch.cuh"
#include "packed.cuh"
#include "tile_finish.cuh"
#include "tile_params.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kTile = 256, kStages = 4, kLead = 2;
constexpr int kTokenBytes = kTile * 128, kStripBytes = 64 * 128, kStageBytes = kTokenBytes + 2 * kStripBytes;
constexpr int kStagedTokens = 128, kStagedBytes = kStagedTokens * 128;  // of a warpgroup's results on their way out
constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStagedBytes + 2 * kTile * 4 + 2 * kStages * 8;
constexpr int kConsumers = 256, kThreads = kConsumers + 128;

// How the tiles are dealt to the clusters: `whole` tiles one by one, then the rest in `parts`.
struct Deal {
  int whole, parts, units;
};

// What a cluster computes at a time: four strips of W from `strip` on, `width` tokens from `first` on of a tile, `count` of them there.
struct Unit {
  int strip, tile, first, width, count;
};

__device__ __forceinline__ Unit unit_of(const TileParams& p, const Deal& d, int u) {
  const bool whole = u < d.whole;
  const int tile = whole ? u : d.whole + (u - d.whole) / d.parts;
  Unit unit = {tile / p.tiles * 4, tile % p.tiles, 0, kTile, 0};
  if (!whole) unit.width = kTile / d.parts, unit.first = (u - d.whole) % d.parts * unit.width;
  unit.count = min(unit.width, p.m - unit.tile * kTile - unit.first);
  while (unit.width > 64 && unit.count <= unit.width / 2) unit.width /= 2;
  return unit;
}

// The address of `at` in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t address_in(uint32_t at, int block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
__device__ __forceinline__ void arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// To the same place of both blocks, counted at the barrier of each.
__device__ __forceinline__ void copy_to_both(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((uint16_t)3) : "memory");
}

// Where in the ring and in which of its rounds.
struct Place {
  uint32_t slot = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kStages) slot = 0, phase ^= 1;
  }
};

struct Ring {
  uint32_t stages, filled, emptied;  // shared memory: the stages, and the barriers of each
  __device__ __forceinline__ uint32_t stage(uint32_t slot) const { return stages + slot * kStageBytes; }
};

// By one thread of each block.
__device__ __forceinline__ void fill_ring(const TileParams& p, const Deal& d, const Ring& ring, int cluster, int clusters, int block) {
  const int stages = p.k / 128, strips = p.n / 64;
  Place at;
  bool first = true;
  for (int u = cluster; u < d.units; u += clusters) {
    const Unit unit = unit_of(p, d, u);
    if (unit.count <= 0) continue;
    const uint8_t* words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w)  // strips beyond the last repeat it, and are not stored
      words[w] = reinterpret_cast<const uint8_t*>(p.words) + (size_t)min(unit.strip + block * 2 + w, strips - 1) * stages * kStripBytes;
    const int half = unit.width * 64;
    const uint8_t* tokens = p.x + (size_t)unit.tile * stages * kTokenBytes + unit.first * 128 + block * half;
    const auto request_words = [&](int s, const Place& place) {
      const uint32_t barrier = ring.filled + place.slot * 8, to = ring.stage(place.slot) + kTokenBytes;
      wait_for(ring.emptied + place.slot * 8, place.phase ^ 1);
      expect_bytes(barrier, 2 * kStripBytes + 2 * half);
#pragma unroll
      for (int w = 0; w < 2; ++w) copy_bulk(to + w * kStripBytes, words[w] + (size_t)s * kStripBytes, kStripBytes, barrier);
    };
    const auto request_tokens = [&](int s, const Place& place) {
      copy_to_both(ring.stage(place.slot) + block * half, tokens + (size_t)s * kTokenBytes, half, ring.filled + place.slot * 8);
    };
    int s = 0;
    if (first) {
      // Weights were there before the kernel that quantizes the tokens began.
      const int ahead = min(stages, kStages);
      Place place = at;
      for (int i = 0; i < ahead; ++i, place.next()) request_words(i, place);
      wait_for_predecessor();
      for (; s < ahead; ++s, at.next()) request_tokens(s, at);
      first = false;
    }
    for (; s < stages; ++s, at.next()) request_words(s, at), request_tokens(s, at);
  }
}

// A warpgroup's strip of a unit of NT tokens: the product, and its results through `staged` to memory.
template <class T, int NT>
__device__ __forceinline__ void strip_of_unit(const TileParams& p, const Unit& unit, const Ring& ring, Place& at, uint32_t released, char* staged,
                                              float* x_scale, int strip, int warpgroup, bool leads) {
  const int stages = p.k / 128, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x & 31;
  const uint32_t words = kTokenBytes + warpgroup * kStripBytes + warp * 1024 + lane * 16;
  const int row = strip * 64 + warp * 16 + (lane >> 2), q = lane & 3, slot = unit.tile * kTile + unit.first;
  const bool there = strip * 64 < p.n;
  const float scale[2] = {there ? p.row_scale[row] : 0.f, there ? p.row_scale[row + 8] : 0.f};
  if (thread * 4 < NT) copy16(shared_address(x_scale + thread * 4), p.x_scale + slot + thread * 4);
  int acc[NT / 2];
#pragma unroll
  for (int i = 0; i < NT / 2; ++i) acc[i] = 0;
  uint32_t a[2][2][4];
  uint32_t last = 0;
  for (int s = 0; s < stages; ++s) {
    wait_for(ring.filled + at.slot * 8, at.phase);
    const uint32_t stage = ring.stage(at.slot);
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 v = read16(stage + words + turn * 4096 + j * 512);
        a[turn][j][0] = v.x, a[turn][j][1] = v.y, a[turn][j][2] = v.z, a[turn][j][3] = v.w;
      }
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 2; ++j) wgmma<T>(acc, a[turn][j], tokens_at(stage + turn * 64) + j * 2);
      wgmma_commit();
      // The operands of the turn before are free again, and with a stage's first turn all of the stage before.
      wgmma_wait<1>();
      if (turn == 0 && s > 0 && lane < 2) arrive_there(released + last * 8);
    }
    last = at.slot;
    at.next();
    if (leads && s == min(kLead, stages) - 1) asm volatile("bar.arrive 3, %0;" :: "n"(kConsumers) : "memory");
  }
  wgmma_wait<0>();
  if (lane < 2) arrive_there(released + last * 8);
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
  // A token's 64 results are 128 bytes, 16-byte chunk c at place c ^ (token % 8).
  const uint32_t to = shared_address(staged) + ((lane >> 4) * 8 + lane % 8) * 128 + ((warp * 2 + (lane >> 3 & 1)) ^ (lane % 8)) * 16;
#pragma unroll
  for (int from = 0; from < NT; from += kStagedTokens) {
#pragma unroll
    for (int t = 0; t < (NT < kStagedTokens ? NT : kStagedTokens); t += 16) {
      uint32_t m[4];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int i = (from + t) / 8 + b;
        const float2 of = reinterpret_cast<const float2*>(x_scale)[i * 4 + q];
#pragma unroll
        for (int h = 0; h < 2; ++h) m[2 * b + h] = pair_of<T>(float(acc[4 * i + 2 * h]) * scale[h] * of.x, float(acc[4 * i + 2 * h + 1]) * scale[h] * of.y);
      }
      write_turned(to + t * 128, m);
    }
    asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
    const int count = min(unit.count - from, kStagedTokens);
    for (int i = thread; i < count * 8; i += 128) {
      const int t = i / 8, chunk = i % 8, feature = strip * 64 + chunk * 8;
      if (feature < p.out_n) store_run<T, 8>(p, slot + from + t, feature, *reinterpret_cast<const T(*)[8]>(staged + t * 128 + (chunk ^ (t % 8)) * 16));
    }
    asm volatile("bar.sync %0, 128;" :: "r"(1 + warpgroup) : "memory");
  }
}

template <class T> __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(2, 1, 1) persistent_int8(const TileParams p, const Deal d) {
  extern __shared__ __align__(1024) char shared[];  // the ring, results of both warpgroups, their tokens' factors, barriers
  const Ring ring = {shared_address(shared), shared_address(shared + kSharedBytes - 2 * kStages * 8), shared_address(shared + kSharedBytes - kStages * 8)};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, block = blockIdx.x % 2;
  const int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) init_barrier(ring.filled + i * 8), init_barrier(ring.emptied + i * 8, 2 * kConsumers / 32);
    show_barriers_to_copies();
  }
  __syncthreads();
  cluster_barrier();

  if (warp >= kConsumers / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kConsumers / 32 && lane == 0) fill_ring(p, d, ring, cluster, clusters, block);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warpgroup = warp / 4;
    const uint32_t released = address_in(ring.emptied, lane & 1);
    char* staged = shared + kStages * kStageBytes + warpgroup * kStagedBytes;
    float* x_scale = reinterpret_cast<float*>(shared + kStages * kStageBytes + 2 * kStagedBytes) + warpgroup * kTile;
    bool first = true;
    Place at;
    for (int u = cluster; u < d.units; u += clusters) {
      const Unit unit = unit_of(p, d, u);
      if (unit.count <= 0) continue;
      const bool leads = first && warpgroup == 0;
      if (first && warpgroup == 1) asm volatile("bar.sync 3, %0;" :: "n"(kConsumers) : "memory");
      if (first) wait_for_predecessor();
      first = false;
      if (u + clusters >= d.units) let_successor_start();
      const int strip = unit.strip + block * 2 + warpgroup;
      if (unit.width == 256) strip_of_unit<T, 256>(p, unit, ring, at, released, staged, x_scale, strip, warpgroup, leads);
      else if (unit.width == 128) strip_of_unit<T, 128>(p, unit, ring, at, released, staged, x_scale, strip, warpgroup, leads);
      else strip_of_unit<T, 64>(p, unit, ring, at, released, staged, x_scale, strip, warpgroup, leads);
    }
  }
  cluster_barrier();  // the other block has written and arrived here for the last time
}

template <class T> int launch(const TileParams& p, int parts, void* stream) {
  auto kernel = persistent_int8<T>;
  static const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (allowed != cudaSuccess) return (int)allowed;
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int clusters = multiprocessors / 2, tiles = (p.n + 255) / 256 * p.tiles, whole = parts == 1 ? tiles : tiles / clusters * clusters;
  const Deal d = {whole, parts, whole + (tiles - whole) * parts};
  return start(kernel, dim3(2 * (d.units < clusters ? d.units : clusters)), kThreads, kSharedBytes, stream, p, d);
}

}  // namespace

// x in tiles of 256 tokens. dtype: 0 bf16, 1 fp16. parts: 1, 2 or 4. Returns a cudaError_t.
extern "C" int qk_persistent_int8(const TileParams* p, int dtype, int parts, void* stream) {
  return dtype == 0 ? launch<__nv_bfloat16>(*p, parts, stream) : launch<__half>(*p, parts, stream);
}
