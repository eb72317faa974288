// The last launch of routed experts: the sum over each token's experts.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <string.h>

#include "common/launch.cuh"

namespace {

__device__ __forceinline__ float4 four_of(const float* from) { return *reinterpret_cast<const float4*>(from); }
template <class T> __device__ __forceinline__ float4 four_of(const T* from) {
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  T four[4];
  memcpy(four, &words, 8);
  return {float(four[0]), float(four[1]), float(four[2]), float(four[3])};
}

// out[t] = the sum over a token's pairs, which were multiplied with the routing weights before. ids: of the pairs, `stride` ints apart; where
// one is negative nothing was computed. Null: there is none. Sets the `count` counters of fused_experts.cu, if there are any, to zero.
template <class From, class T>
__global__ void sum_pairs(const From* pairs, T* out, const int* ids, int stride, int top_k, int hidden, int* counters, int count) {
  wait_for_predecessor();
  let_successor_start();
  const int threads = gridDim.x * gridDim.y * blockDim.x, thread = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  for (int i = thread; i < count; i += threads) counters[i] = 0;
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (at >= hidden) return;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  const From* from = pairs + (size_t)blockIdx.x * top_k * hidden + at;
#pragma unroll 8
  for (int k = 0; k < top_k; ++k) {
    if (ids && ids[((size_t)blockIdx.x * top_k + k) * stride] < 0) continue;
    const float4 one = four_of(from + (size_t)k * hidden);
    sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
  }
  T* to = out + (size_t)blockIdx.x * hidden + at;
  to[0] = T(sum.x), to[1] = T(sum.y), to[2] = T(sum.z), to[3] = T(sum.w);
}

template <class From, class T>
int launch(const void* pairs, void* out, const int* ids, int stride, int tokens, int top_k, int hidden, int* counters, int count, void* stream) {
  const dim3 grid(tokens, (hidden / 4 + 255) / 256);
  return start(sum_pairs<From, T>, grid, 256, 0, stream, (const From*)pairs, (T*)out, ids, stride, top_k, hidden, counters, count);
}

}  // namespace

using bf16 = __nv_bfloat16;

// dtype of out: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_sum_pairs(const float* pairs, void* out, const int* ids, int stride, int dtype, int tokens, int top_k, int hidden, int* counters,
                            int count, void* stream) {
  const auto run = [&](auto launcher) { return launcher(pairs, out, ids, stride, tokens, top_k, hidden, counters, count, stream); };
  return dtype == 0 ? run(launch<float, bf16>) : run(launch<float, __half>);
}

// The same of pairs that were rounded to the dtype of out.
extern "C" int qk_sum_rounded_pairs(const void* pairs, void* out, const int* ids, int stride, int dtype, int tokens, int top_k, int hidden,
                                    void* stream) {
  const auto run = [&](auto launcher) { return launcher(pairs, out, ids, stride, tokens, top_k, hidden, nullptr, 0, stream); };
  return dtype == 0 ? run(launch<bf16, bf16>) : run(launch<__half, __half>);
}
