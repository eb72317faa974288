// The operators of a decode step between the products, one launch each: norms, activation, rotary embedding.
// Arithmetic is float32 whatever the type of the tensors; results are rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "lanes.cuh"
#include "launch.cuh"

namespace {

using bf16 = __nv_bfloat16;

// normed = weight * t / sqrt(mean(t^2) + eps) with t = x + residual, which is stored in `total`; without a residual t = x. A block per row.
template <class T> __global__ void add_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* total, int h, float eps) {
  // What a thread reads first it keeps; rows of up to 8192 need no more.
  const int at = threadIdx.x * 8;
  Eight<T> kept = {}, gain = {};
  if (at < h) gain = *reinterpret_cast<const Eight<T>*>(weight + at);
  wait_for_predecessor();
  let_successor_start();
  const size_t row = (size_t)blockIdx.x * h;
  const T* source = residual ? total : x;
  float squares = 0;
  for (int i = at; i < h; i += blockDim.x * 8) {
    Eight<T> v = *reinterpret_cast<const Eight<T>*>(x + row + i);
    if (residual) {
      const Eight<T> r = *reinterpret_cast<const Eight<T>*>(residual + row + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) v.set(j, v.get(j) + r.get(j));
      *reinterpret_cast<Eight<T>*>(total + row + i) = v;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += v.get(j) * v.get(j);
    if (i == at) kept = v;
  }
  const float factor = rsqrtf(block_sum(squares) / h + eps);
  for (int i = at; i < h; i += blockDim.x * 8) {
    Eight<T> v = i == at ? kept : *reinterpret_cast<const Eight<T>*>(source + row + i);
    const Eight<T> w = i == at ? gain : *reinterpret_cast<const Eight<T>*>(weight + i);
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

// Pairs (x[2i], x[2i + 1]), or (x[i], x[i + half]), turned by the angle of pair i at the token's position. x has strides over tokens and
// heads; out is contiguous.
template <class T, class Position>
__global__ void rope(const T* x, const Position* positions, const float* cosines, const float* sines, T* out, int tokens, int heads, int half, int interleaved,
                     int64_t token_stride, int64_t head_stride) {
  wait_for_predecessor();
  let_successor_start();
  const int at = blockIdx.x * blockDim.x + threadIdx.x, pair = at % half, head = at / half % heads, token = at / half / heads;
  if (token >= tokens) return;
  const size_t angle = (size_t)positions[token] * half + pair;
  const int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pair + half;
  const T* from = x + token * token_stride + head * head_stride;
  const float a = float(from[first]), b = float(from[second]), c = cosines[angle], s = sines[angle];
  T* to = out + ((size_t)token * heads + head) * 2 * half;
  to[first] = T(a * c - b * s);
  to[second] = T(a * s + b * c);
}

}  // namespace

// dtype everywhere: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_add_rms_norm(const void* x, const void* residual, const void* weight, void* normed, void* total, int dtype, int rows, int h, float eps, void* s) {
  const int threads = h >= 8192 ? 1024 : (h / 8 + 31) / 32 * 32;
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
                       int half, int interleaved, int64_t token_stride, int64_t head_stride, void* s) {
  const int blocks = (tokens * heads * half + 255) / 256;
  const auto run = [&](auto* from, auto* to, auto* at) {
    using T = std::remove_pointer_t<decltype(to)>;
    using Position = std::remove_cv_t<std::remove_pointer_t<decltype(at)>>;
    return start(rope<T, Position>, blocks, 256, 0, s, from, at, cosines, sines, to, tokens, heads, half, interleaved, token_stride,
                 head_stride);
  };
  const auto typed = [&](auto* at) { return dtype == 0 ? run((const bf16*)x, (bf16*)out, at) : run((const __half*)x, (__half*)out, at); };
  return wide_positions ? typed((const int64_t*)positions) : typed((const int*)positions);
}
