// What a lane reads at once of a row of 16-bit numbers, and sums over lanes.

#pragma once

#include <stdint.h>

namespace {

template <class T> struct Eight {
  uint4 bits;
  __device__ __forceinline__ float get(int i) const { return float(reinterpret_cast<const T*>(&bits)[i]); }
  __device__ __forceinline__ void set(int i, float value) { reinterpret_cast<T*>(&bits)[i] = T(value); }
};

__device__ __forceinline__ float warp_sum(float v) {
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// Over all threads of a block of at most 1024, which all get it. Once a kernel.
__device__ __forceinline__ float block_sum(float v) {
  __shared__ float sums[32];
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (int w = 0; w < (int)blockDim.x / 32; ++w) v += sums[w];
  return v;
}
__device__ __forceinline__ float block_max(float v) {
  __shared__ float found[32];
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = v;
  __syncthreads();
  v = found[0];
  for (int w = 1; w < (int)blockDim.x / 32; ++w) v = fmaxf(v, found[w]);
  return v;
}

}  // namespace
