// The operators of a decode step between the products, one launch each: norms, activation, rotary embedding, routing.
// Arithmetic is float32 whatever the type of the tensors; results are rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "launch.cuh"

namespace {

using bf16 = __nv_bfloat16;

template <class T> struct Eight {
  uint4 bits;
  __device__ __forceinline__ float get(int i) const { return float(reinterpret_cast<const T*>(&bits)[i]); }
  __device__ __forceinline__ void set(int i, float value) { reinterpret_cast<T*>(&bits)[i] = T(value); }
};

__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

// normed = weight * t / sqrt(mean(t^2) + eps) with t = x + residual, which is stored in `total`; without a residual t = x. A block per row.
template <class T> __global__ void add_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* total, int h, float eps) {
  __shared__ float sums[32];
  wait_for_predecessor();
  let_successor_start();
  const size_t row = (size_t)blockIdx.x * h;
  const T* source = residual ? total : x;
  float squares = 0;
  for (int i = threadIdx.x * 8; i < h; i += blockDim.x * 8) {
    Eight<T> v = *reinterpret_cast<const Eight<T>*>(x + row + i);
    if (residual) {
      const Eight<T> r = *reinterpret_cast<const Eight<T>*>(residual + row + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) v.set(j, v.get(j) + r.get(j));
      *reinterpret_cast<Eight<T>*>(total + row + i) = v;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += v.get(j) * v.get(j);
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) squares += sums[w];
  const float factor = rsqrtf(squares / h + eps);
  for (int i = threadIdx.x * 8; i < h; i += blockDim.x * 8) {
    Eight<T> v = *reinterpret_cast<const Eight<T>*>(source + row + i);
    const Eight<T> w = *reinterpret_cast<const Eight<T>*>(weight + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) v.set(j, v.get(j) * factor * w.get(j));
    *reinterpret_cast<Eight<T>*>(normed + row + i) = v;
  }
}

// out[m, i] = silu(x[m, i]) * x[m, width + i].
template <class T> __global__ void silu_and_mul(const T* x, T* out, int width) {
  wait_for_predecessor();
  let_successor_start();
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (at >= width) return;
  const size_t row = (size_t)blockIdx.x * width;
  Eight<T> gate = *reinterpret_cast<const Eight<T>*>(x + 2 * row + at);
  const Eight<T> up = *reinterpret_cast<const Eight<T>*>(x + 2 * row + width + at);
#pragma unroll
  for (int j = 0; j < 8; ++j) gate.set(j, gate.get(j) / (1.f + __expf(-gate.get(j))) * up.get(j));
  *reinterpret_cast<Eight<T>*>(out + row + at) = gate;
}

// Pairs (x[2i], x[2i + 1]) turned by the angle of pair i at the token's position. x has strides over tokens and heads; out is contiguous.
template <class T, class Position>
__global__ void rope(const T* x, const Position* positions, const float* cosines, const float* sines, T* out, int tokens, int heads, int half, int64_t token_stride,
                     int64_t head_stride) {
  wait_for_predecessor();
  let_successor_start();
  const int at = blockIdx.x * blockDim.x + threadIdx.x, pair = at % half, head = at / half % heads, token = at / half / heads;
  if (token >= tokens) return;
  const size_t angle = (size_t)positions[token] * half + pair;
  const T* from = x + token * token_stride + head * head_stride + 2 * pair;
  const float even = float(from[0]), odd = float(from[1]), c = cosines[angle], s = sines[angle];
  T* to = out + ((size_t)token * heads + head) * 2 * half + 2 * pair;
  to[0] = T(even * c - odd * s);
  to[1] = T(even * s + odd * c);
}

struct Route {
  const float* bias;  // or null
  int64_t* ids;
  float* weights;
  int experts, top_k, n_group, topk_group, softmax, normalize;
  float scale;
};

// A better candidate has the higher score, among equals the lower index.
__device__ __forceinline__ bool better(float score, int index, float than, int than_index) {
  return score > than || (score == than && index < than_index);
}

// One warp per token.
template <class T> __global__ void route(const T* logits, Route r) {
  extern __shared__ float shared[];  // scores, and the choice they make
  float *scores = shared, *choice = shared + r.experts;
  __shared__ float group_score[32];
  wait_for_predecessor();
  let_successor_start();
  const int lane = threadIdx.x, size = r.experts / r.n_group;
  const T* row = logits + (size_t)blockIdx.x * r.experts;
  float largest = -INFINITY, sum = 0;
  if (r.softmax) {
    for (int e = lane; e < r.experts; e += 32) largest = fmaxf(largest, float(row[e]));
    for (int o = 16; o; o >>= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, o));
    for (int e = lane; e < r.experts; e += 32) sum += expf(float(row[e]) - largest);
    sum = warp_sum(sum);
  }
  for (int e = lane; e < r.experts; e += 32) {
    scores[e] = r.softmax ? expf(float(row[e]) - largest) / sum : 1.f / (1.f + expf(-float(row[e])));
    choice[e] = scores[e] + (r.bias ? r.bias[e] : 0.f);
  }
  __syncwarp();
  if (r.topk_group < r.n_group) {
    if (lane < r.n_group) {
      float first = -INFINITY, second = -INFINITY;
      for (int i = 0; i < size; ++i) {
        const float c = choice[lane * size + (i + lane) % size];  // rotated, so that lanes do not meet in a bank
        second = fmaxf(second, fminf(first, c));
        first = fmaxf(first, c);
      }
      group_score[lane] = first + second;
    }
    __syncwarp();
    bool dropped = false;
    if (lane < r.n_group) {
      int rank = 0;
      for (int g = 0; g < r.n_group; ++g) rank += better(group_score[g], g, group_score[lane], lane);
      dropped = rank >= r.topk_group;
    }
    const unsigned out = __ballot_sync(0xffffffffu, dropped);
    for (int e = lane; e < r.experts; e += 32)
      if (out >> (e / size) & 1) choice[e] = -INFINITY;
    __syncwarp();
  }
  float total = 0, mine = 0;
  int mine_id = 0;
  for (int k = 0; k < r.top_k; ++k) {
    float best = -INFINITY;
    int best_id = r.experts;
    for (int e = lane; e < r.experts; e += 32)
      if (better(choice[e], e, best, best_id)) best = choice[e], best_id = e;
    for (int o = 16; o; o >>= 1) {
      const float other = __shfl_xor_sync(0xffffffffu, best, o);
      const int other_id = __shfl_xor_sync(0xffffffffu, best_id, o);
      if (better(other, other_id, best, best_id)) best = other, best_id = other_id;
    }
    if (lane == best_id % 32) choice[best_id] = -INFINITY;
    if (lane == k) mine = scores[best_id], mine_id = best_id;
    total += scores[best_id];
    __syncwarp();
  }
  if (lane < r.top_k) {
    const size_t at = (size_t)blockIdx.x * r.top_k + lane;
    r.ids[at] = mine_id;
    r.weights[at] = (r.normalize ? mine / (total + 1e-20f) : mine) * r.scale;
  }
}

}  // namespace

// dtype everywhere: 0 bf16, 1 fp16, 2 float32 (route only). Returns a cudaError_t.
extern "C" int qk_add_rms_norm(const void* x, const void* residual, const void* weight, void* normed, void* total, int dtype, int rows, int h, float eps, void* s) {
  const int threads = h >= 4096 ? 512 : 256;
  if (dtype == 0)
    return start(add_rms_norm<bf16>, rows, threads, 0, s, (const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)normed, (bf16*)total, h, eps);
  return start(add_rms_norm<__half>, rows, threads, 0, s, (const __half*)x, (const __half*)residual, (const __half*)weight, (__half*)normed, (__half*)total, h, eps);
}

extern "C" int qk_silu_and_mul(const void* x, void* out, int dtype, int rows, int width, void* s) {
  const dim3 grid(rows, (width / 8 + 127) / 128);
  if (dtype == 0) return start(silu_and_mul<bf16>, grid, 128, 0, s, (const bf16*)x, (bf16*)out, width);
  return start(silu_and_mul<__half>, grid, 128, 0, s, (const __half*)x, (__half*)out, width);
}

extern "C" int qk_rope(const void* x, const void* positions, const float* cosines, const float* sines, void* out, int dtype, int wide_positions, int tokens, int heads,
                       int half, int64_t token_stride, int64_t head_stride, void* s) {
  const int blocks = (tokens * heads * half + 255) / 256;
  const auto run = [&](auto* from, auto* to, auto* at) {
    using T = std::remove_pointer_t<decltype(to)>;
    using Position = std::remove_cv_t<std::remove_pointer_t<decltype(at)>>;
    return start(rope<T, Position>, blocks, 256, 0, s, from, at, cosines, sines, to, tokens, heads, half, token_stride, head_stride);
  };
  const auto typed = [&](auto* at) { return dtype == 0 ? run((const bf16*)x, (bf16*)out, at) : run((const __half*)x, (__half*)out, at); };
  return wide_positions ? typed((const int64_t*)positions) : typed((const int*)positions);
}

extern "C" int qk_route(const void* logits, const float* bias, int64_t* ids, float* weights, int dtype, int tokens, int experts, int top_k, int n_group, int topk_group,
                        int softmax, int normalize, float scale, void* s) {
  const Route r = {bias, ids, weights, experts, top_k, n_group, topk_group, softmax, normalize, scale};
  const int bytes = 2 * experts * 4;
  if (dtype == 0) return start(route<bf16>, tokens, 32, bytes, s, (const bf16*)logits, r);
  if (dtype == 1) return start(route<__half>, tokens, 32, bytes, s, (const __half*)logits, r);
  return start(route<float>, tokens, 32, bytes, s, (const float*)logits, r);
}
