// How every kernel is launched, and what it calls first.
//
// A kernel may start while its predecessor writes its last results (programmatic dependent launch). Until `wait_for_predecessor` it may
// read only what no kernel of the step writes; `let_successor_start` allows the next one to begin as this one's blocks end. A kernel that
// allows it before its own wait lets the next one begin while its predecessor runs: what that may read does not change, for its wait is for this
// kernel's end, which is after the predecessor's.

#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

namespace {

__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Of what no kernel of the step writes, where `wanted`, else zeros: for what is read before `wait_for_predecessor`. Loads by ld.global.nc or
// __ldg will not do there: ptxas moves them past griddepcontrol.wait, as it may, and they begin when the predecessor has ended.
__device__ __forceinline__ float load_constant(const float* p, bool wanted) {
  float v = 0.f;
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %2, 0; @wanted ld.global.f32 %0, [%1];}" : "+f"(v) : "l"(p), "r"((int)wanted) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_constant(const float4* p, bool wanted) {
  float4 v = {};
  asm volatile("{.reg .pred wanted; setp.ne.b32 wanted, %5, 0; @wanted ld.global.v4.f32 {%0,%1,%2,%3}, [%4];}"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w) : "l"(p), "r"((int)wanted) : "memory");
  return v;
}

// Whether a kernel may have more than 48 KB of dynamic shared memory, which CUDA keeps for every device by itself. One for each kernel, static.
class SharedMemory {
 public:
  // Of the current device. Returns a cudaError_t.
  template <class Kernel> int allow(Kernel kernel, int bytes) {
    int device;
    if (const cudaError_t fault = cudaGetDevice(&device)) return (int)fault;
    if (device < kDevices && allowed_[device]) return 0;
    if (const cudaError_t fault = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return (int)fault;
    if (device < kDevices) allowed_[device] = true;
    return 0;
  }

 private:
  static constexpr int kDevices = 64;  // a device beyond them is asked each time
  std::atomic<bool> allowed_[kDevices] = {};
};

// `cluster` blocks along x share their shared memory.
template <class... Arguments>
int start_clusters(void (*kernel)(Arguments...), dim3 grid, int threads, int shared, int cluster, void* stream, std::type_identity_t<Arguments>... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = (cudaStream_t)stream;
  config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class... Arguments>
int start(void (*kernel)(Arguments...), dim3 grid, int threads, int shared, void* stream, std::type_identity_t<Arguments>... arguments) {
  return start_clusters(kernel, grid, threads, shared, 1, stream, arguments...);
}

}  // namespace
