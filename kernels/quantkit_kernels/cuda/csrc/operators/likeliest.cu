// The largest of each row of logits, the first of equal ones, in one launch: blocks share out a row, and the last of them to end writes its place.

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/launch.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 4;

// Larger for larger numbers, and among equals for earlier places. As torch has it, no number is larger than NaN, and zeros are equal.
__device__ __forceinline__ unsigned long long key_of(float v, unsigned place) {
  const unsigned bits = __float_as_uint(v + 0.f), ordered = v != v ? 0xffffffffu : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
  return (unsigned long long)ordered << 32 | (0xffffffffu - place);
}

// best [rows], arrived [rows]: zero, and zero again behind it.
__global__ void __launch_bounds__(kThreads) likeliest(const float* logits, int64_t* out, unsigned long long* best, unsigned* arrived, int width) {
  __shared__ unsigned long long found[kThreads / 32];
  const int row = blockIdx.y, fours = width / 4;
  wait_for_predecessor();
  let_successor_start();
  const float4* from = reinterpret_cast<const float4*>(logits + (size_t)row * width);
  unsigned long long key = 0;
  for (int first = blockIdx.x * kThreads + threadIdx.x; first < fours; first += gridDim.x * kThreads * kAtOnce) {
    float4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) v[i] = from[min(first + i * (int)gridDim.x * kThreads, fours - 1)];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned place = 4u * min(first + i * (int)gridDim.x * kThreads, fours - 1);
      key = max(max(key, max(key_of(v[i].x, place), key_of(v[i].y, place + 1))), max(key_of(v[i].z, place + 2), key_of(v[i].w, place + 3)));
    }
  }
  for (int o = 16; o; o >>= 1) key = max(key, __shfl_xor_sync(0xffffffffu, key, o));
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x) return;
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) key = max(key, found[w]);
  atomicMax(best + row, key);
  __threadfence();
  if (atomicInc(arrived + row, gridDim.x - 1) == gridDim.x - 1) out[row] = 0xffffffffu - (unsigned)atomicExch(best + row, 0ull);
}

}  // namespace

// logits [rows, width] float32, width a multiple of 4; out [rows]; room: 3 * rows words of 32 bits, an even number of them before, zero
// between calls. blocks: for a row. Returns a cudaError_t.
extern "C" int qk_likeliest(const float* logits, int64_t* out, void* room, int rows, int width, int blocks, void* s) {
  auto* best = (unsigned long long*)room;
  return start(likeliest, dim3(blocks, rows), kThreads, 0, s, logits, out, best, (unsigned*)(best + rows), width);
}
