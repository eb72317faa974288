// Which experts a token goes to: the router's product and the group-limited choice of the best. Arithmetic is float32.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/lanes.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/signals.cuh"

// In no namespace, for a C function that takes a type of an unnamed namespace is not exported.
struct RouteParams {
  const float* bias;  // [n_routed_experts] or null
  int64_t* ids;       // [tokens, num_experts_per_tok + num_joined_experts]
  float* weights;     // as ids
  int n_routed_experts, num_experts_per_tok, n_group, topk_group, softmax, norm_topk_prob, num_joined_experts;
  float routed_scaling_factor;
};

namespace {

// Numbers in the order of the floats they represent. Zero is below all of them.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Scores of one token's logits. Lane l has experts l * per .. l * per + per - 1, per at most PER.
template <int PER> __device__ __forceinline__ void softmax(const RouteParams& r, int per, const float (&logit)[PER], float (&score)[PER]) {
  const int first_expert = (threadIdx.x & 31) * per;
  const auto mine = [&](int i) { return i < per && first_expert + i < r.n_routed_experts; };
  float largest = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < PER; ++i)
    if (mine(i)) largest = fmaxf(largest, logit[i]);
  for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
#pragma unroll
  for (int i = 0; i < PER; ++i)
    if (mine(i)) sum += expf(logit[i] - largest);
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < PER; ++i) score[i] = expf(logit[i] - largest) / sum;
}
__device__ __forceinline__ float sigmoid(float logit) { return 1.f / (1.f + expf(-logit)); }

// One warp chooses for one token, by scores that lie as logits do; a group is those of whole lanes, 1, 2, 4, ... of them. Among equals the
// lower index is better.
template <int PER> __device__ __forceinline__ void choose(const RouteParams& r, int token, int per, const float (&score)[PER], const float (&bias)[PER]) {
  const int lane = threadIdx.x & 31, first_expert = lane * per;
  const auto mine = [&](int i) { return i < per && first_expert + i < r.n_routed_experts; };
  uint32_t key[PER];
  float best = -INFINITY, second = -INFINITY;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const float choice = mine(i) ? score[i] + bias[i] : -INFINITY;
    key[i] = mine(i) ? ordered(choice) : 0;
    second = fmaxf(second, fminf(best, choice));
    best = fmaxf(best, choice);
  }
  if (r.topk_group < r.n_group) {
    const int lanes = r.n_routed_experts / r.n_group / per;
    for (int o = 1; o < lanes; o *= 2) {
      const float other_best = __shfl_xor_sync(0xffffffffu, best, o), other_second = __shfl_xor_sync(0xffffffffu, second, o);
      second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
      best = fmaxf(best, other_best);
    }
    const float mine_score = best + second;
    int rank = 0;
    for (int group = 0; group < r.n_group; ++group) {
      const float other = __shfl_sync(0xffffffffu, mine_score, group * lanes);
      rank += other > mine_score || (other == mine_score && group < lane / lanes);
    }
    if (rank >= r.topk_group) {
#pragma unroll
      for (int i = 0; i < PER; ++i) key[i] = 0;
    }
  }
  __shared__ float chosen_score[32];
  __shared__ int chosen[32];
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < PER; ++i) top = max(top, key[i]);
  for (int k = 0; k < r.num_experts_per_tok; ++k) {
    const uint32_t winner = __reduce_max_sync(0xffffffffu, top);
    if (lane == __ffs(__ballot_sync(0xffffffffu, top == winner)) - 1) {
      int place = 0;
      float value = 0;
#pragma unroll
      for (int i = PER - 1; i >= 0; --i)
        if (key[i] == winner) place = i, value = score[i];
      chosen[k] = first_expert + place, chosen_score[k] = value;
      top = 0;
#pragma unroll
      for (int i = 0; i < PER; ++i) {
        if (i == place) key[i] = 0;
        top = max(top, key[i]);
      }
    }
    __syncwarp();
  }
  const float weight = lane < r.num_experts_per_tok ? chosen_score[lane] : 0.f, total = warp_sum(weight);
  const int id = lane < r.num_experts_per_tok ? chosen[lane] : 0, columns = r.num_experts_per_tok + r.num_joined_experts;
  if (lane < columns) {
    const bool routed = lane < r.num_experts_per_tok;
    r.ids[(size_t)token * columns + lane] = routed ? id : r.n_routed_experts + lane - r.num_experts_per_tok;
    r.weights[(size_t)token * columns + lane] = routed ? (r.norm_topk_prob ? weight / (total + 1e-20f) : weight) * r.routed_scaling_factor : 1.f;
  }
}

// A lane's biases.
template <int PER> __device__ __forceinline__ void load_bias(const RouteParams& r, int per, float (&bias)[PER]) {
  const int first = (threadIdx.x & 31) * per;
#pragma unroll
  for (int i = 0; i < PER; ++i) bias[i] = load_constant(r.bias + first + i, r.bias && i < per && first + i < r.n_routed_experts);
}

template <class T, int PER> __global__ void route(const T* logits, const RouteParams r) {
  const int per = (r.n_routed_experts + 31) / 32, first = (threadIdx.x & 31) * per;
  float logit[PER], bias[PER];
  load_bias(r, per, bias);
  wait_for_predecessor();
  let_successor_start();
#pragma unroll
  for (int i = 0; i < PER; ++i) logit[i] = i < per && first + i < r.n_routed_experts ? float(logits[(size_t)blockIdx.x * r.n_routed_experts + first + i]) : 0.f;
  float score[PER];
  if (r.softmax) {
    softmax(r, per, logit, score);
  } else {
#pragma unroll
    for (int i = 0; i < PER; ++i) score[i] = sigmoid(logit[i]);
  }
  choose(r, blockIdx.x, per, score, bias);
}

// --- with the product, for few tokens ---------------------------------------------------------------------------------------
//
// The router is float32 and x bfloat16: a weight is the sum of three bfloat16 numbers to its last bit, so three products on the tensor
// cores are as exact as one in float32. 16 x 8 blocks share out the experts and K; a block reads its 16 rows' part of K once. Then as many
// blocks as there are tokens wait for the sums of all blocks, add up one token's logits and choose. The others are gone by then, so none
// waits for a place on the device.

constexpr int kExperts = 256, kParts = 8, kWarps = 8, kSteps = 8, kMostTokens = 64;
static_assert(32 * kWarps == kExperts, "a thread for each expert");

// A lane's share of 16 rows of the router over `count` steps of 16 along K, in float32. Its places along K of a step are 4 part .. 4 part + 3.
struct RouterSlice { float4 w[kSteps][2]; };
__device__ __forceinline__ void load_router(RouterSlice& slice, const float* router, int k, int begin, int count) {
  const int lane = threadIdx.x & 31;
  const float* row = router + (size_t)(blockIdx.x * 16 + (lane >> 2)) * k + begin * 16 + 4 * (lane & 3);
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) slice.w[i][h] = load_constant(reinterpret_cast<const float4*>(row + (size_t)h * 8 * k + i * 16), i < count);
}

// Each weight as the sum of three bfloat16 numbers.
__device__ __forceinline__ void split_in_three(const RouterSlice& slice, uint32_t (&a)[kSteps][3][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4& w = slice.w[i][j % 2];
      float2 left = j < 2 ? make_float2(w.x, w.y) : make_float2(w.z, w.w);
#pragma unroll
      for (int term = 0; term < 3; ++term) {
        const __nv_bfloat162 rounded = __floats2bfloat162_rn(left.x, left.y);
        a[i][term][j] = *reinterpret_cast<const uint32_t*>(&rounded);
        left.x -= __low2float(rounded), left.y -= __high2float(rounded);
      }
    }
}

// Else the compiler splits after the wait.
__device__ __forceinline__ void made_before(uint32_t (&a)[kSteps][3][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int term = 0; term < 3; ++term)
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][term][j])::"memory");
}

// A lane's share of 8 tokens from `first` on. The compiler leaves these loads before the work on the weights.
__device__ __forceinline__ void load_eight(uint2 (&b)[kSteps], const __nv_bfloat16* x, int tokens, int first, int k, int begin, int count) {
  const int lane = threadIdx.x & 31;
  const __nv_bfloat16* from = x + (size_t)min(first + (lane >> 2), tokens - 1) * k + begin * 16 + 4 * (lane & 3);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    b[i] = {};
    asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %3, 0; @wanted ld.global.v2.u32 {%0,%1}, [%2];}"
                 : "+r"(b[i].x), "+r"(b[i].y) : "l"(from + i * 16), "r"((int)(i < count)) : "memory");
  }
}

// A warp's products of 8 tokens, to red [token][expert of 16].
__device__ __forceinline__ void multiply(const uint2 (&b)[kSteps], const uint32_t (&a)[kSteps][3][4], float* red) {
  const int lane = threadIdx.x & 31, g = lane >> 2, part = lane & 3;
  float sums[3][4] = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
#pragma unroll
    for (int term = 0; term < 3; ++term) mma<__nv_bfloat16>(sums[term], a[i][term], b[i].x, b[i].y);
#pragma unroll
  for (int c = 0; c < 4; ++c) red[(2 * part + c % 2) * 16 + g + 8 * (c / 2)] = sums[0][c] + (sums[1][c] + sums[2][c]);
}

__global__ void __launch_bounds__(32 * kWarps, 1) moe_gate(const __nv_bfloat16* x, const float* router, int tokens, int k, float* sums, const RouteParams r) {
  __shared__ float red[kWarps][kMostTokens * 16];  // [token][expert]
  __shared__ __align__(16) float scores[kExperts];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int slice = blockIdx.y * kWarps + warp, steps = k / 16;
  const int begin = steps * slice / (kParts * kWarps), count = steps * (slice + 1) / (kParts * kWarps) - begin;
  RouterSlice weights;
  load_router(weights, router, k, begin, count);
  float bias[kExperts / 32];
  load_bias(r, kExperts / 32, bias);
  uint32_t a[kSteps][3][4];
  split_in_three(weights, a);
  made_before(a);
  wait_for_predecessor();
  let_successor_start();

  uint2 b[kSteps];
  load_eight(b, x, tokens, 0, k, begin, count);
  for (int first = 0;;) {
    multiply(b, a, red[warp] + first * 16);
    if ((first += 8) >= tokens) break;
    load_eight(b, x, tokens, first, k, begin, count);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < tokens * 16; i += 32 * kWarps) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kWarps; ++j) sum += red[j][i];
    hand_over(sums + ((size_t)blockIdx.y * tokens + i / 16) * kExperts + blockIdx.x * 16 + i % 16, sum);
  }
  const int token = blockIdx.y * gridDim.x + blockIdx.x;
  if (token >= tokens) return;

  const float logit = take_over(sums + (size_t)token * kExperts + threadIdx.x, (size_t)tokens * kExperts, kParts);
  scores[threadIdx.x] = r.softmax ? logit : sigmoid(logit);
  __syncthreads();
  if (warp > 0) return;
  float score[kExperts / 32];
#pragma unroll
  for (int i = 0; i < kExperts / 32; i += 4) *reinterpret_cast<float4*>(score + i) = *reinterpret_cast<const float4*>(scores + lane * (kExperts / 32) + i);
  if (r.softmax) softmax(r, kExperts / 32, score, score);
  choose(r, token, kExperts / 32, score, bias);
}

}  // namespace

// dtype of the logits: 0 bf16, 1 fp16, 2 float32. At most 512 experts.
extern "C" int qk_route(const void* logits, int dtype, int tokens, const RouteParams* r, void* s) {
  const auto run = [&](auto* from) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
    if (r->n_routed_experts <= 256) return start(route<T, 8>, tokens, 32, 0, s, from, *r);
    return start(route<T, 16>, tokens, 32, 0, s, from, *r);
  };
  return dtype == 0 ? run((const __nv_bfloat16*)logits) : dtype == 1 ? run((const __half*)logits) : run((const float*)logits);
}

// x [tokens, k] bf16, router [256, k] float32; at most 64 tokens, k a multiple of 16 and at most 8192. sums is room for 8 * tokens * 256
// numbers, all of them kNothing between calls.
extern "C" int qk_moe_gate(const void* x, const float* router, int tokens, int k, float* sums, const RouteParams* r, void* s) {
  return start(moe_gate, dim3(kExperts / 16, kParts), 32 * kWarps, 0, s, (const __nv_bfloat16*)x, router, tokens, k, sums, *r);
}
