// Rows of activations, before a product and after it.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "launch.cuh"
#include "quantize.cuh"

namespace {

// out[t] = sum over a token's pairs, which have been weighed already. Counters that their kernel needed, if any, are zero again afterwards.
template <class T> __global__ void sum_pairs(const float* pairs, T* out, int top_k, int hidden, int* counters, int count) {
  wait_for_predecessor();
  let_successor_start();
  const int threads = gridDim.x * gridDim.y * blockDim.x, thread = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  for (int i = thread; i < count; i += threads) counters[i] = 0;
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (at >= hidden) return;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  const float* from = pairs + (size_t)blockIdx.x * top_k * hidden + at;
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) {
    const float4 one = *reinterpret_cast<const float4*>(from + (size_t)k * hidden);
    sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
  }
  T* to = out + (size_t)blockIdx.x * hidden + at;
  to[0] = T(sum.x), to[1] = T(sum.y), to[2] = T(sum.z), to[3] = T(sum.w);
}

// One block per row; K is a multiple of 8.
template <class T> __global__ void quantize_rows(const T* x, int8_t* codes, float* scale, int k) {
  wait_for_predecessor();
  let_successor_start();
  const T* row = x + (size_t)blockIdx.x * k;
  float largest = 0;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i);
    const T* e = reinterpret_cast<const T*>(&v);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(float(e[j])));
  }
  const float step = step_of(largest), reciprocal = __frcp_rn(step);
  if (threadIdx.x == 0) scale[blockIdx.x] = step;
  for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + i);
    const T* e = reinterpret_cast<const T*>(&v);
    const uint2 c = {codes_of(e, step, reciprocal), codes_of(e + 4, step, reciprocal)};
    *reinterpret_cast<uint2*>(codes + (size_t)blockIdx.x * k + i) = c;
  }
}

}  // namespace

using bf16 = __nv_bfloat16;

extern "C" int qk_sum_pairs(const float* pairs, void* out, int dtype, int tokens, int top_k, int hidden, int* counters, int count, void* stream) {
  const dim3 grid(tokens, (hidden / 4 + 255) / 256);
  if (dtype == 0) return start(sum_pairs<bf16>, grid, 256, 0, stream, pairs, (bf16*)out, top_k, hidden, counters, count);
  return start(sum_pairs<__half>, grid, 256, 0, stream, pairs, (__half*)out, top_k, hidden, counters, count);
}

extern "C" int qk_quantize_rows(const void* x, void* codes, float* scale, int dtype, int rows, int k, void* stream) {
  const int threads = k >= 8192 ? 1024 : 512;
  if (dtype == 0) return start(quantize_rows<bf16>, rows, threads, 0, stream, (const bf16*)x, (int8_t*)codes, scale, k);
  return start(quantize_rows<__half>, rows, threads, 0, stream, (const __half*)x, (int8_t*)codes, scale, k);
}
