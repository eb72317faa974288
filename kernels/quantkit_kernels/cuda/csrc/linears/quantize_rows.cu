// Rows of activations quantized to int8, for tokens_in_registers.cu.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/launch.cuh"
#include "common/quantize.cuh"

namespace {

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

extern "C" int qk_quantize_rows(const void* x, void* codes, float* scale, int dtype, int rows, int k, void* stream) {
  const int threads = k >= 8192 ? 1024 : 512;
  if (dtype == 0) return start(quantize_rows<bf16>, rows, threads, 0, stream, (const bf16*)x, (int8_t*)codes, scale, k);
  return start(quantize_rows<__half>, rows, threads, 0, stream, (const __half*)x, (int8_t*)codes, scale, k);
}
