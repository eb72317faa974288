// What every kernel here is launched with and begins with.
//
// A kernel may start while its predecessor writes its last results (programmatic dependent launch). Until `wait_for_predecessor` it may
// read only what no kernel of the step writes; `let_successor_start` allows the next one to begin as this one's blocks end.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace {

__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <class... Arguments>
int start(void (*kernel)(Arguments...), dim3 grid, int threads, int shared, void* stream, std::type_identity_t<Arguments>... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared, config.stream = (cudaStream_t)stream;
  config.attrs = &early, config.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace
