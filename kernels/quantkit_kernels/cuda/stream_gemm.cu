// y[M, N] = x[M, K] @ W[N, K]^T for a packed W and few tokens M, dense or for routed experts.
//
// Few tokens make this a problem of memory bandwidth: every weight is read once and multiplied with all the tokens that need it. So W is
// the A operand (16 rows) of mma.sync and the tokens are the B operand (8 columns), and nothing is staged in shared memory: `prepare` stores
// W in the order in which a warp's lanes consume it, so that each lane's share of a 16 x 64 tile is one 16-byte load (int8: two), and the
// order of K inside a tile is chosen so that its share of x is one or two 16-byte loads of the plain row-major activations.
//
// A block is 8 warps, `wn` of them side by side along N (each 32 rows) and the others along K; blocks may split K further (`split`). Partial
// sums meet in shared memory, and those of several blocks in a workspace that the last block to arrive adds up in a fixed order: results do
// not depend on timing.
//
// Tiles, g = lane / 4, q = lane % 4:
//   4 bit   word j of 4: nibble h + 2b at bit 4(h + 2b) + 16e is W[8h + g, 32(j/2) + 8q + 4(j%2) + 2b + e]   (FP4: bits scattered, below)
//   8 bit   byte e of word 4j + h + 2b is W[8h + g, 16q + 8j + 4b + e]
// INT4: a 16-bit scale for rows g and 8 + g in one word per group, and one byte with both zero points. FP4: one word per lane pair with the
// four scales it needs. Every row has a float32 factor besides.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kWarps = 8;
constexpr int kRowTiles = 2;                // 16-row tiles of a warp
constexpr int kWarpRows = 16 * kRowTiles;   // rows of a warp
constexpr int kMaxListed = 1024;            // token-expert pairs that a block can look through by itself

enum Format { kInt4 = 0, kFp4 = 1, kInt8 = 2 };
enum Epilogue { kStore = 0, kSiluMul = 1, kWeigh = 2 };

struct Params {
  const uint4* words;         // [experts][N/16][K/64] tiles
  const uint32_t* scales;     // INT4 [experts][N/16][K/group][8]; FP4 [experts][N/16][K/64][16]; INT8 none
  const uint8_t* zeros;       // INT4 [experts][N/16][K/group][8] or null
  const float* row_scale;     // [experts][N]
  const void* x;              // [rows, K] bf16 or fp16; INT8: int8
  const float* x_scale;       // INT8 [rows]
  void* out;                  // kStore [M, N], kSiluMul [pairs, N/2] in T; kWeigh [pairs, N] float
  const int* ids;             // [pairs] expert of each token-expert pair, null for a dense linear; stride in ints
  const float* pair_weights;  // [pairs], kWeigh
  float* partial;             // [tiles][split][rows of a block][tokens of a block]
  int* arrived;               // [tiles], zero between calls
  int ids_stride, pairs, top_k, by_expert;
  int m, n, k, out_n;         // n is padded to whole tiles, out_n is what is stored
  int wn, split, epilogue;
};

template <class T> struct Pair;
template <> struct Pair<__nv_bfloat16> { using type = __nv_bfloat162; };
template <> struct Pair<__half> { using type = __half2; };

__device__ __forceinline__ uint4 load_weights(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

template <class T> __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> __device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

template <class T> __device__ __forceinline__ uint32_t subtract2(uint32_t a, uint32_t b) {
  using P = typename Pair<T>::type;
  P r = __hsub2(*reinterpret_cast<P*>(&a), *reinterpret_cast<P*>(&b));
  return *reinterpret_cast<uint32_t*>(&r);
}
template <class T> __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
  using P = typename Pair<T>::type;
  P r = __hmul2(*reinterpret_cast<P*>(&a), *reinterpret_cast<P*>(&b));
  return *reinterpret_cast<uint32_t*>(&r);
}

// A nibble c placed in the mantissa of 128 (bf16) or 1024 (fp16) makes the number 128 + c; subtracting 128 + 8 + zero leaves the code exactly.
template <class T> struct Magic;
template <> struct Magic<__nv_bfloat16> { static constexpr uint32_t value = 0x43004300u; };
template <> struct Magic<__half> { static constexpr uint32_t value = 0x64006400u; };

template <class T> __device__ __forceinline__ void decode_int4(uint32_t word, uint32_t zero_lo, uint32_t zero_hi, uint32_t (&a)[4]) {
  constexpr uint32_t mask = 0x000f000fu, magic = Magic<T>::value;
  a[0] = subtract2<T>(and_or(word, mask, magic), zero_lo);
  a[1] = subtract2<T>(and_or(word >> 4, mask, magic), zero_hi);
  a[2] = subtract2<T>(and_or(word >> 8, mask, magic), zero_lo);
  a[3] = subtract2<T>(and_or(word >> 12, mask, magic), zero_hi);
}

// E2M1 (sign, two exponent bits, one mantissa bit) has the bit order of any float: with the sign at bit 15 and the rest at the low exponent
// bits and the first mantissa bit the number is value * 2^-126 (bf16) or 2^-14 (fp16), which the scale corrects. In each half of a word the
// fields of pair 0, 1, 2 lie 3 bits apart, ready to be shifted and masked; pair 3 has the bits that are left: 14, 13, 11, 10 as e e m s.
template <class T> struct Fp4Bits;
template <> struct Fp4Bits<__nv_bfloat16> {
  static constexpr uint32_t mask = 0x81c081c0u;
  static __device__ __forceinline__ uint32_t last(uint32_t w) {
    return ((w >> 6) & 0x01800180u) | and_or(w >> 5, 0x00400040u, (w << 5) & 0x80008000u);
  }
};

template <class T> __device__ __forceinline__ void decode_fp4(uint32_t word, uint32_t scale_lo, uint32_t scale_hi, uint32_t (&a)[4]) {
  a[0] = multiply2<T>(word & Fp4Bits<T>::mask, scale_lo);
  a[1] = multiply2<T>((word << 3) & Fp4Bits<T>::mask, scale_hi);
  a[2] = multiply2<T>((word << 6) & Fp4Bits<T>::mask, scale_lo);
  a[3] = multiply2<T>(Fp4Bits<T>::last(word), scale_hi);
}

// Byte `index` of four e5m3 scales as a pair of bf16 with 224 added to the exponent: scale * 2^(97 - 127 + ...), see `pack_fp4` for the bias.
template <int index> __device__ __forceinline__ uint32_t fp4_scale(uint32_t four) {
  return (__byte_perm(four, 0, 0x4040 + 0x0101 * index) << 4) | 0x70007000u;
}

// What a warp reads ahead for one step of 64 along K.
template <int FMT, int MT> struct Step {
  uint4 w[kRowTiles][FMT == kInt8 ? 2 : 1];
  uint32_t scale[kRowTiles][2];
  uint32_t zero[kRowTiles][2];
  uint4 x[MT][FMT == kInt8 ? 1 : 2];
};

// Where a lane's loads of step 0 are.
template <int MT> struct Bases {
  const uint4* w[kRowTiles];
  const uint32_t* scale[kRowTiles];
  const uint8_t* zero[kRowTiles];
  const char* x[MT];
};

template <int FMT, int G, int MT> __device__ __forceinline__ void find_weights(Bases<MT>& base, const Params& p, size_t tile0, int lane) {
#pragma unroll
  for (int nt = 0; nt < kRowTiles; ++nt) {
    const size_t tile = tile0 + (size_t)nt * (p.k / 64);
    // Tiles of a row follow each other, so the index of a group is the tile's, scaled.
    const size_t group = G == 32 ? tile * 2 : G == 64 ? tile : tile / 2;
    base.w[nt] = p.words + tile * (FMT == kInt8 ? 64 : 32) + lane;
    if constexpr (FMT == kFp4) base.scale[nt] = p.scales + tile * 16 + (lane >> 1);
    if constexpr (FMT == kInt4) {
      base.scale[nt] = p.scales + group * 8 + (lane >> 2);
      base.zero[nt] = p.zeros ? p.zeros + group * 8 + (lane >> 2) : nullptr;
    }
  }
}

template <int FMT, int G, int MT> __device__ __forceinline__ void load_step(Step<FMT, MT>& s, const Bases<MT>& base, int kt) {
#pragma unroll
  for (int nt = 0; nt < kRowTiles; ++nt) {
    if constexpr (FMT == kInt8) {
      s.w[nt][0] = load_weights(base.w[nt] + kt * 64);
      s.w[nt][1] = load_weights(base.w[nt] + kt * 64 + 32);
    } else {
      s.w[nt][0] = load_weights(base.w[nt] + kt * 32);
    }
    if constexpr (FMT == kFp4) s.scale[nt][0] = __ldg(base.scale[nt] + kt * 16);
    if constexpr (FMT == kInt4) {
#pragma unroll
      for (int half = 0; half < (G == 32 ? 2 : 1); ++half) {
        const int at = (G == 32 ? kt * 2 + half : G == 64 ? kt : kt / 2) * 8;
        s.scale[nt][half] = __ldg(base.scale[nt] + at);
        s.zero[nt][half] = base.zero[nt] ? (uint32_t)__ldg(base.zero[nt] + at) : 0x88u;
      }
    }
  }
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
    s.x[mt][0] = __ldg(reinterpret_cast<const uint4*>(base.x[mt] + kt * (FMT == kInt8 ? 64 : 128)));
    if constexpr (FMT != kInt8) s.x[mt][1] = __ldg(reinterpret_cast<const uint4*>(base.x[mt] + kt * 128 + 64));
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

template <int FMT, class T, int G, int MT, class Acc>
__device__ __forceinline__ void compute_step(const Step<FMT, MT>& s, Acc (&acc)[kRowTiles][MT][4]) {
#pragma unroll
  for (int nt = 0; nt < kRowTiles; ++nt) {
    if constexpr (FMT == kInt8) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int mt = 0; mt < MT; ++mt)
          mma_s8(acc[nt][mt], s.w[nt][j].x, s.w[nt][j].y, s.w[nt][j].z, s.w[nt][j].w, word_of(s.x[mt][0], 2 * j), word_of(s.x[mt][0], 2 * j + 1));
    } else if constexpr (FMT == kFp4) {
      const uint32_t four = s.scale[nt][0];
      const uint32_t lo[2] = {fp4_scale<0>(four), fp4_scale<1>(four)}, hi[2] = {fp4_scale<2>(four), fp4_scale<3>(four)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
        decode_fp4<T>(word_of(s.w[nt][0], j), lo[j / 2], hi[j / 2], a);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) mma<T>(acc[nt][mt], a, word_of(s.x[mt][j / 2], 2 * (j % 2)), word_of(s.x[mt][j / 2], 2 * (j % 2) + 1));
      }
    } else {
      float part[MT][4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int half = G == 32 ? j / 2 : 0;
        const uint32_t zero = s.zero[nt][half];
        const uint32_t zero_lo = Magic<T>::value | (zero & 15) * 0x00010001u, zero_hi = Magic<T>::value | (zero >> 4) * 0x00010001u;
        uint32_t a[4];
        decode_int4<T>(word_of(s.w[nt][0], j), zero_lo, zero_hi, a);
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) mma<T>(part[mt], a, word_of(s.x[mt][j / 2], 2 * (j % 2)), word_of(s.x[mt][j / 2], 2 * (j % 2) + 1));
        if (j == 3 || (G == 32 && j == 1)) {
          const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&s.scale[nt][half]));
#pragma unroll
          for (int mt = 0; mt < MT; ++mt) {
            acc[nt][mt][0] += scale.x * part[mt][0];
            acc[nt][mt][1] += scale.x * part[mt][1];
            acc[nt][mt][2] += scale.y * part[mt][2];
            acc[nt][mt][3] += scale.y * part[mt][3];
            part[mt][0] = part[mt][1] = part[mt][2] = part[mt][3] = 0.f;
          }
        }
      }
    }
  }
}

// The token-expert pairs of one expert, in order. Returns their number; the list is complete after the block's next barrier.
__device__ int list_pairs(const Params& p, int expert, int* list, int* counts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int total = 0;
  for (int base = 0; base < p.pairs; base += kWarps * 32) {
    const int pair = base + threadIdx.x;
    const bool mine = pair < p.pairs && p.ids[(size_t)pair * p.ids_stride] == expert;
    const unsigned ballot = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) counts[warp] = __popc(ballot);
    __syncthreads();
    int before = total;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += counts[w];
      total += counts[w];
    }
    if (mine) list[before + __popc(ballot & ((1u << lane) - 1))] = pair;
    __syncthreads();
  }
  return total;
}

template <class T> __device__ __forceinline__ void store(void* out, size_t at, float value) { reinterpret_cast<T*>(out)[at] = T(value); }

// Sums over warps along K are in `red` [kWarps][rows of a warp][tokens]; what they become is the epilogue's business.
template <int FMT, class T, int MT, class Acc>
__device__ void finish_tile(const Params& p, Acc* red, int block_n, int part, int expert, int tile_id, const int* tokens, int count) {
  constexpr int tokens_per_tile = 8 * MT;
  const int rows = p.wn * kWarpRows, wk = kWarps / p.wn, outputs = rows * tokens_per_tile;
  __shared__ int last;
  // The sum over this block's warps goes to the first warp's place.
  for (int i = threadIdx.x; i < outputs; i += kWarps * 32) {
    Acc sum = 0;
    for (int w = 0; w < wk; ++w) sum += red[w * outputs + i];
    red[i] = sum;
  }
  __syncthreads();
  if (p.split > 1) {
    Acc* mine = reinterpret_cast<Acc*>(p.partial) + ((size_t)tile_id * p.split + part) * outputs;
    for (int i = threadIdx.x; i < outputs; i += kWarps * 32) __stcg(mine + i, red[i]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(p.arrived + tile_id, 1) == p.split - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    const Acc* all = reinterpret_cast<const Acc*>(p.partial) + (size_t)tile_id * p.split * outputs;
    for (int i = threadIdx.x; i < outputs; i += kWarps * 32) {
      Acc sum = 0;
      for (int s = 0; s < p.split; ++s) sum += __ldcg(all + (size_t)s * outputs + i);
      red[i] = sum;
    }
    if (threadIdx.x == 0) p.arrived[tile_id] = 0;
    __syncthreads();
  }
  const float* row_scale = p.row_scale + (size_t)expert * p.n + (size_t)block_n * rows;
  const int produced = p.epilogue == kSiluMul ? rows / 2 : rows;
  for (int i = threadIdx.x; i < produced * count; i += kWarps * 32) {
    const int r = i % produced, t = i / produced, token = tokens[t];
    const float x_scale = FMT == kInt8 ? p.x_scale[p.epilogue == kSiluMul ? token / p.top_k : token] : 1.f;
    if (p.epilogue == kSiluMul) {
      // Rows come as 8 of gate, 8 of up.
      const int gate = (r / 8) * 16 + r % 8;
      const float a = float(red[gate * tokens_per_tile + t]) * row_scale[gate] * x_scale;
      const float b = float(red[(gate + 8) * tokens_per_tile + t]) * row_scale[gate + 8] * x_scale;
      const int feature = block_n * produced + r;
      if (feature < p.out_n) store<T>(p.out, (size_t)token * p.out_n + feature, a / (1.f + __expf(-a)) * b);
    } else {
      const int feature = block_n * produced + r;
      const float y = float(red[r * tokens_per_tile + t]) * row_scale[r] * x_scale;
      if (feature >= p.out_n) continue;
      if (p.epilogue == kWeigh) reinterpret_cast<float*>(p.out)[(size_t)token * p.out_n + feature] = y * p.pair_weights[token];
      else store<T>(p.out, (size_t)token * p.out_n + feature, y);
    }
  }
}

template <int FMT, class T, int G, int MT>
__global__ void __launch_bounds__(kWarps * 32, MT <= 2 ? 2 : 1) stream_gemm(const Params p) {
  using Acc = std::conditional_t<FMT == kInt8, int, float>;
  constexpr int tokens_per_tile = 8 * MT;
  constexpr int ahead = MT == 1 ? 3 : 2;
  __shared__ Acc red[kWarps * kWarpRows * tokens_per_tile];
  __shared__ int list[kMaxListed];
  __shared__ int counts[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
  const int block_n = blockIdx.x / p.split, part = blockIdx.x % p.split;
  const int warp_n = warp % p.wn, warp_k = warp / p.wn, wk = kWarps / p.wn;

  int expert = 0, first = 0, total;
  if (p.ids) {
    expert = p.by_expert ? blockIdx.y : p.ids[(size_t)blockIdx.y * p.ids_stride];
    total = list_pairs(p, expert, list, counts);
    // Without a block per expert there is one per pair, and an expert belongs to its first pair.
    if (total == 0 || (!p.by_expert && list[0] != (int)blockIdx.y)) return;
  } else {
    first = blockIdx.y * tokens_per_tile;
    total = min(p.m, first + tokens_per_tile);
  }

  const int steps = p.k / 64;
  const int begin = steps * part / p.split + warp_k, end = steps * (part + 1) / p.split;
  const size_t tile0 = ((size_t)expert * (p.n / 16) + (size_t)(block_n * p.wn + warp_n) * kRowTiles) * steps;
  Bases<MT> base;
  find_weights<FMT, G, MT>(base, p, tile0, lane);
  const size_t row_bytes = (size_t)p.k * (FMT == kInt8 ? 1 : 2);

  for (; first < total; first += tokens_per_tile) {
    if (!p.ids) {
      if (threadIdx.x < tokens_per_tile) list[threadIdx.x] = first + threadIdx.x;
      __syncthreads();
    }
    const int* tokens = p.ids ? list + first : list;
    const int count = min(tokens_per_tile, total - first);
    // A column of the product depends on its own token only, so places without a token repeat the first and are not stored.
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int token = tokens[mt * 8 + g < count ? mt * 8 + g : 0];
      base.x[mt] = reinterpret_cast<const char*>(p.x) + row_bytes * (p.epilogue == kSiluMul ? token / p.top_k : token) + q * 16;
    }
    Acc acc[kRowTiles][MT][4] = {};
    Step<FMT, MT> ring[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i)
      if (begin + i * wk < end) load_step<FMT, G, MT>(ring[i], base, begin + i * wk);
    for (int kt = begin; kt < end; kt += ahead * wk) {
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        const int now = kt + i * wk;
        if (now >= end) break;
        compute_step<FMT, T, G, MT, Acc>(ring[i], acc);
        if (now + ahead * wk < end) load_step<FMT, G, MT>(ring[i], base, now + ahead * wk);
      }
    }
    // red[warp_k][row of the block][token]
    Acc* mine = red + ((size_t)warp_k * p.wn + warp_n) * kWarpRows * tokens_per_tile;
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int c = 0; c < 4; ++c) mine[(nt * 16 + (c / 2) * 8 + g) * tokens_per_tile + mt * 8 + q * 2 + c % 2] = acc[nt][mt][c];
    __syncthreads();
    const int tile_id = blockIdx.y * (gridDim.x / p.split) + block_n;
    finish_tile<FMT, T, MT, Acc>(p, red, block_n, part, expert, tile_id, tokens, count);
    __syncthreads();
  }
}

// W[N, K] in T from the 4-bit layout, for products with so many tokens that torch's own matmul is faster. One warp per tile.
template <int FMT, class T, int G> __global__ void expand(const Params p, T* out) {
  const int steps = p.k / 64, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const size_t tile = (size_t)blockIdx.x * (blockDim.x / 32) + (threadIdx.x >> 5);
  const int row_tile = tile / steps, kt = tile % steps;
  if (row_tile * 16 >= p.n) return;
  const uint4 words = load_weights(p.words + tile * 32 + lane);
  const float row_lo = p.row_scale[row_tile * 16 + g], row_hi = p.row_scale[row_tile * 16 + 8 + g];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T rows[2][8];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t a[4];
      float2 scale = {1.f, 1.f};
      if constexpr (FMT == kFp4) {
        const uint32_t four = p.scales[tile * 16 + (lane >> 1)];
        decode_fp4<T>(word_of(words, 2 * half + j), half ? fp4_scale<1>(four) : fp4_scale<0>(four), half ? fp4_scale<3>(four) : fp4_scale<2>(four), a);
      } else {
        const size_t group = G == 32 ? tile * 2 + half : G == 64 ? tile : tile / 2;
        const uint32_t zero = p.zeros ? p.zeros[group * 8 + g] : 0x88u;
        scale = __half22float2(*reinterpret_cast<const __half2*>(p.scales + group * 8 + g));
        decode_int4<T>(word_of(words, 2 * half + j), Magic<T>::value | (zero & 15) * 0x00010001u, Magic<T>::value | (zero >> 4) * 0x00010001u, a);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* pair = reinterpret_cast<const T*>(&a[i]);
        const float factor = i % 2 ? scale.y * row_hi : scale.x * row_lo;
        rows[i % 2][4 * j + 2 * (i / 2)] = T(float(pair[0]) * factor);
        rows[i % 2][4 * j + 2 * (i / 2) + 1] = T(float(pair[1]) * factor);
      }
    }
    const size_t at = (size_t)(row_tile * 16 + g) * p.k + kt * 64 + 32 * half + 8 * q;
    if (row_tile * 16 + g < p.out_n) *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<uint4*>(rows[0]);
    if (row_tile * 16 + 8 + g < p.out_n) *reinterpret_cast<uint4*>(out + at + (size_t)8 * p.k) = *reinterpret_cast<uint4*>(rows[1]);
  }
}

// out[t] = sum over a token's pairs, which kWeigh has already weighed.
template <class T> __global__ void sum_pairs(const float* pairs, T* out, int top_k, int hidden) {
  const int at = blockIdx.y * blockDim.x + threadIdx.x;
  if (at >= hidden) return;
  float sum = 0;
  for (int k = 0; k < top_k; ++k) sum += pairs[((size_t)blockIdx.x * top_k + k) * hidden + at];
  out[(size_t)blockIdx.x * hidden + at] = T(sum);
}

// Symmetric int8 per row: scale = max|x| / 127, or 1 for a row of zeros. One block per row; K is a multiple of 8.
template <class T> __global__ void quantize_rows(const T* x, int8_t* codes, float* scale, int k) {
  __shared__ float warp_max[32];
  const T* row = x + (size_t)blockIdx.x * k;
  float largest = 0;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i);
    const T* e = reinterpret_cast<const T*>(&v);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(float(e[j])));
  }
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
  if ((threadIdx.x & 31) == 0) warp_max[threadIdx.x >> 5] = largest;
  __syncthreads();
  largest = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) largest = fmaxf(largest, warp_max[w]);
  const float step = largest == 0 ? 1.f : largest / 127.f;
  if (threadIdx.x == 0) scale[blockIdx.x] = step;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i);
    const T* e = reinterpret_cast<const T*>(&v);
    int8_t c[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) c[j] = (int8_t)max(-127, min(127, __float2int_rn(__fdiv_rn(float(e[j]), step))));
    *reinterpret_cast<uint2*>(codes + (size_t)blockIdx.x * k + i) = *reinterpret_cast<uint2*>(c);
  }
}

template <int FMT, class T, int G> int launch(const Params& p, int token_tiles, dim3 grid, cudaStream_t stream) {
  if (token_tiles == 1) stream_gemm<FMT, T, G, 1><<<grid, kWarps * 32, 0, stream>>>(p);
  else if (token_tiles == 2) stream_gemm<FMT, T, G, 2><<<grid, kWarps * 32, 0, stream>>>(p);
  else stream_gemm<FMT, T, G, 4><<<grid, kWarps * 32, 0, stream>>>(p);
  return (int)cudaGetLastError();
}

}  // namespace

// dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_stream_gemm(const Params* p, int format, int dtype, int group, int token_tiles, int grid_y, void* stream) {
  const dim3 grid(p->n / (p->wn * kWarpRows) * p->split, grid_y);
  cudaStream_t s = (cudaStream_t)stream;
  using bf16 = __nv_bfloat16;
  if (format == kInt4) {
    if (dtype == 0) return group == 32 ? launch<kInt4, bf16, 32>(*p, token_tiles, grid, s) : group == 64 ? launch<kInt4, bf16, 64>(*p, token_tiles, grid, s) : launch<kInt4, bf16, 128>(*p, token_tiles, grid, s);
    return group == 32 ? launch<kInt4, __half, 32>(*p, token_tiles, grid, s) : group == 64 ? launch<kInt4, __half, 64>(*p, token_tiles, grid, s) : launch<kInt4, __half, 128>(*p, token_tiles, grid, s);
  }
  if (format == kFp4) return launch<kFp4, bf16, 16>(*p, token_tiles, grid, s);
  return dtype == 0 ? launch<kInt8, bf16, 0>(*p, token_tiles, grid, s) : launch<kInt8, __half, 0>(*p, token_tiles, grid, s);
}

extern "C" int qk_expand(const Params* p, int format, int dtype, int group, void* out, void* stream) {
  const int tiles = p->n / 16 * (p->k / 64);
  const dim3 grid((tiles + 7) / 8);
  cudaStream_t s = (cudaStream_t)stream;
  using bf16 = __nv_bfloat16;
  if (format == kFp4) expand<kFp4, bf16, 16><<<grid, 256, 0, s>>>(*p, (bf16*)out);
  else if (dtype == 0 && group == 32) expand<kInt4, bf16, 32><<<grid, 256, 0, s>>>(*p, (bf16*)out);
  else if (dtype == 0 && group == 64) expand<kInt4, bf16, 64><<<grid, 256, 0, s>>>(*p, (bf16*)out);
  else if (dtype == 0) expand<kInt4, bf16, 128><<<grid, 256, 0, s>>>(*p, (bf16*)out);
  else if (group == 32) expand<kInt4, __half, 32><<<grid, 256, 0, s>>>(*p, (__half*)out);
  else if (group == 64) expand<kInt4, __half, 64><<<grid, 256, 0, s>>>(*p, (__half*)out);
  else expand<kInt4, __half, 128><<<grid, 256, 0, s>>>(*p, (__half*)out);
  return (int)cudaGetLastError();
}

extern "C" int qk_sum_pairs(const float* pairs, void* out, int dtype, int tokens, int top_k, int hidden, void* stream) {
  const dim3 grid(tokens, (hidden + 255) / 256);
  if (dtype == 0) sum_pairs<<<grid, 256, 0, (cudaStream_t)stream>>>(pairs, (__nv_bfloat16*)out, top_k, hidden);
  else sum_pairs<<<grid, 256, 0, (cudaStream_t)stream>>>(pairs, (__half*)out, top_k, hidden);
  return (int)cudaGetLastError();
}

extern "C" int qk_quantize_rows(const void* x, void* codes, float* scale, int dtype, int rows, int k, void* stream) {
  const int threads = k >= 8192 ? 1024 : 512;
  if (dtype == 0) quantize_rows<<<rows, threads, 0, (cudaStream_t)stream>>>((const __nv_bfloat16*)x, (int8_t*)codes, scale, k);
  else quantize_rows<<<rows, threads, 0, (cudaStream_t)stream>>>((const __half*)x, (int8_t*)codes, scale, k);
  return (int)cudaGetLastError();
}
