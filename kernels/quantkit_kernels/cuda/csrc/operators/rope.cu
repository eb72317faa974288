// Rotary embedding. Arithmetic is float32; results are rounded once.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

#include "common/launch.cuh"

namespace {

using bf16 = __nv_bfloat16;

// Pairs (x[2i], x[2i + 1]), or (x[i], x[i + half]), rotated by the angle of pair i at the token's position. x has strides over tokens and
// heads; out is contiguous.
template <class T, class Position>
__global__ void rope(const T* x, const Position* positions, const float* cosines, const float* sines, T* out, int tokens, int heads, int half, int interleaved,
                     int64_t token_stride, int64_t head_stride) {
  wait_for_predecessor();
  let_successor_start();
  const int at = blockIdx.x * blockDim.x + threadIdx.x, pair = at % half, head = at / half % heads, token = at / half / heads;
  if (token >= tokens) return;
  const size_t angle = (size_t)positions[token] * half + pair;
  const int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pair + half;
  const T* from = x + token * token_stride + head * head_stride;
  const float a = float(from[first]), b = float(from[second]), c = cosines[angle], s = sines[angle];
  T* to = out + ((size_t)token * heads + head) * 2 * half;
  to[first] = T(a * c - b * s);
  to[second] = T(a * s + b * c);
}

}  // namespace

// dtype: 0 bf16, 1 fp16. positions are int64 with wide_positions, else int32. Returns a cudaError_t.
extern "C" int qk_rope(const void* x, const void* positions, const float* cosines, const float* sines, void* out, int dtype, int wide_positions, int tokens, int heads,
                       int half, int interleaved, int64_t token_stride, int64_t head_stride, void* s) {
  const int blocks = (tokens * heads * half + 255) / 256;
  const auto run = [&](auto* from, auto* to, auto* at) {
    using T = std::remove_pointer_t<decltype(to)>;
    using Position = std::remove_cv_t<std::remove_pointer_t<decltype(at)>>;
    return start(rope<T, Position>, blocks, 256, 0, s, from, at, cosines, sines, to, tokens, heads, half, interleaved, token_stride,
                 head_stride);
  };
  const auto typed = [&](auto* at) { return dtype == 0 ? run((const bf16*)x, (bf16*)out, at) : run((const __half*)x, (__half*)out, at); };
  return wide_positions ? typed((const int64_t*)positions) : typed((const int*)positions);
}
