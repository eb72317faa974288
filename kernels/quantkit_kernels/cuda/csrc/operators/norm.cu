// RMSNorm, and the sum with the residual before it. Arithmetic is float32 whatever the type of the tensors; results are rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/lanes.cuh"
#include "common/launch.cuh"

namespace {

using bf16 = __nv_bfloat16;

// normed = weight * t / sqrt(mean(t^2) + eps) with t = x + residual, which is stored in `total`; without a residual t = x. A block per row.
template <class T> __global__ void add_rms_norm(const T* x, const T* residual, const T* weight, T* normed, T* total, int h, float eps) {
  // What a thread reads first it keeps; rows of up to 8192 need no more.
  const int at = threadIdx.x * 8;
  Eight<T> kept = {}, gain = {};
  if (at < h) gain = *reinterpret_cast<const Eight<T>*>(weight + at);
  // One block, or a few: the next kernel may ask for its weights while this one waits.
  let_successor_start();
  wait_for_predecessor();
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

}  // namespace

// dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_add_rms_norm(const void* x, const void* residual, const void* weight, void* normed, void* total, int dtype, int rows, int h, float eps, void* s) {
  const int threads = h >= 8192 ? 1024 : (h / 8 + 31) / 32 * 32;
  if (dtype == 0)
    return start(add_rms_norm<bf16>, rows, threads, 0, s, (const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)normed, (bf16*)total, h, eps);
  return start(add_rms_norm<__half>, rows, threads, 0, s, (const __half*)x, (const __half*)residual, (const __half*)weight, (__half*)normed, (__half*)total, h, eps);
}
