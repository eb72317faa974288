// The last launch of routed experts: the sum over each token's experts.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/launch.cuh"

namespace {

// out[t] = the sum over a token's pairs, which were multiplied with the routing weights before. Sets the `count` counters of
// fused_experts.cu, if there are any, to zero.
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

}  // namespace

using bf16 = __nv_bfloat16;

// dtype of out: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_sum_pairs(const float* pairs, void* out, int dtype, int tokens, int top_k, int hidden, int* counters, int count, void* stream) {
  const dim3 grid(tokens, (hidden / 4 + 255) / 256);
  if (dtype == 0) return start(sum_pairs<bf16>, grid, 256, 0, stream, pairs, (bf16*)out, top_k, hidden, counters, count);
  return start(sum_pairs<__half>, grid, 256, 0, stream, pairs, (__half*)out, top_k, hidden, counters, count);
}
