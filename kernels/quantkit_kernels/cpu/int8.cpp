// y[M, N] = (codes[M, K] @ W[N, K]^T) * step[M] * scale[N] for an int8 weight: every token's activations become int8 codes, steps of
// max|x| / 127 apart, halves to even. Sums are exact, in 32 bits. A weight is read as its holder lays it out:
//   rows    int8 [N][K], for any processor
//   blocks  int8 [N/B][K/4][B][4], B of 16 to 64 rows: for VNNI, which multiplies four unsigned bytes by four signed ones and adds them up, and
//           oneDNN's own. The activations' codes are 128 more there, and the sums of the weight's rows take that off

#include <memory>

#include "int8.h"

namespace {

template <class Layout, class X> void multiply(const Weight& w, const X* x, X* y, int m, int inputs, int threads) {
  using Code = typename Layout::Code;
  const std::unique_ptr<Code[]> codes(new Code[(int64_t)m * w.k]);
  const std::unique_ptr<float[]> step(new float[m]);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int token = 0; token < m; ++token) step[token] = quantize(x + (int64_t)token * inputs, &codes[(int64_t)token * w.k], inputs, w.k);
#pragma omp for schedule(static)
    for (int row = 0; row < w.n; row += Layout::rows)
      multiply_block<Layout>(w, codes.get(), step.get(), m, row, [&](int token, int first, int count, const float* values) {
        for (int r = 0; r < count; ++r) y[(int64_t)token * w.n + first + r] = X(values[r]);
      });
  }
}

template <class X> void quantize_tokens(const X* x, uint8_t* codes, float* step, int m, int k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int token = 0; token < m; ++token) step[token] = quantize(x + (int64_t)token * k, codes + (int64_t)token * k, k, k);
}

}  // namespace

// x [m, k] and y [m, n] in bfloat16 or float, contiguous.
extern "C" void qk_int8_rows(const void* codes, const float* scale, const void* x, void* y, int m, int n, int k, int bfloat16, int threads) {
  const Weight w = {(const int8_t*)codes, scale, nullptr, n, k};
  if (bfloat16) multiply<Rows>(w, (const Bfloat16*)x, (Bfloat16*)y, m, k, threads);
  else multiply<Rows>(w, (const float*)x, (float*)y, m, k, threads);
}

#if defined(__AVX512VNNI__)
// The same for blocks of 16 to 64 rows; where k is no multiple of 4, the last four are made up with zeros.
extern "C" void qk_int8_blocks(
    const void* codes, const float* scale, const int32_t* sums, const void* x, void* y, int m, int n, int k, int rows, int bfloat16, int threads) {
  const Weight w = {(const int8_t*)codes, scale, sums, n, in_fours(k)};
  by_blocks(rows, [&](auto layout) {
    using Layout = decltype(layout);
    if (bfloat16) multiply<Layout>(w, (const Bfloat16*)x, (Bfloat16*)y, m, k, threads);
    else multiply<Layout>(w, (const float*)x, (float*)y, m, k, threads);
  });
}
#endif

// x [m, k] -> unsigned codes [m, k] and step [m].
extern "C" void qk_int8_quantize(const void* x, uint8_t* codes, float* step, int m, int k, int bfloat16, int threads) {
  if (bfloat16) quantize_tokens((const Bfloat16*)x, codes, step, m, k, threads);
  else quantize_tokens((const float*)x, codes, step, m, k, threads);
}
