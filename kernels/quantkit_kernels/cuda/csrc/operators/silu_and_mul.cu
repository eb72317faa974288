// The activation of a gated MLP. Arithmetic is float32; results are rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "common/lanes.cuh"
#include "common/launch.cuh"

namespace {

using bf16 = __nv_bfloat16;

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

}  // namespace

// dtype: 0 bf16, 1 fp16. Returns a cudaError_t.
extern "C" int qk_silu_and_mul(const void* x, void* out, int dtype, int rows, int width, void* s) {
  const dim3 grid(rows, (width / 8 + 127) / 128);
  if (dtype == 0) return start(silu_and_mul<bf16>, grid, 128, 0, s, (const bf16*)x, (bf16*)out, width);
  return start(silu_and_mul<__half>, grid, 128, 0, s, (const __half*)x, (__half*)out, width);
}
