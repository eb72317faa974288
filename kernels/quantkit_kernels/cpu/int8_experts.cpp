// A layer's routed experts with int8 weights, in blocks for VNNI (int8.cpp says how they lie), in one call: a token's input becomes codes once for
// all of its experts. To the bit what a loop over the experts gives: what is between two products, and each answer, is rounded to x's dtype, and a
// token's answers are added in the order of its experts' numbers, in float32.

#include <memory>
#include <vector>

#include "int8.h"
#include "silu.h"

namespace {

constexpr int kPairs = 512;  // of a token and an expert, computed together at least: what bounds the room that a long prompt takes

// Gate over up [2 * intermediate, hidden], and down [hidden, intermediate].
struct Expert {
  const int8_t* first;
  const float* first_scale;
  const int32_t* first_sums;
  const int8_t* last;
  const float* last_scale;
  const int32_t* last_sums;
};

struct Layer {
  const Expert* experts;
  int count, hidden, intermediate, first_rows, last_rows;
};

// Pairs in the order of experts, of one expert in that of tokens.
struct Pairs {
  std::vector<int> starts, tokens;  // starts: [experts + 1]
  std::vector<float> weights;
};

Pairs by_expert(const int32_t* ids, const float* weights, int tokens, int top_k, int experts) {
  Pairs pairs{std::vector<int>(experts + 1), {}, {}};
  for (int i = 0; i < tokens * top_k; ++i)
    if (ids[i] >= 0) ++pairs.starts[ids[i] + 1];
  for (int e = 0; e < experts; ++e) pairs.starts[e + 1] += pairs.starts[e];
  std::vector<int> next(pairs.starts.begin(), pairs.starts.end() - 1);
  pairs.tokens.resize(pairs.starts[experts]);
  pairs.weights.resize(pairs.starts[experts]);
  for (int i = 0; i < tokens * top_k; ++i)
    if (ids[i] >= 0) {
      const int at = next[ids[i]]++;
      pairs.tokens[at] = i / top_k;
      pairs.weights[at] = weights[i];
    }
  return pairs;
}

// Experts that were asked for, whose pairs are computed together.
struct Part {
  std::vector<int> experts;
  int begin, end;  // of pairs
};

std::vector<Part> parts(const Pairs& pairs, int experts) {
  std::vector<Part> found;
  for (int e = 0; e < experts; ++e) {
    if (pairs.starts[e] == pairs.starts[e + 1]) continue;
    if (found.empty() || found.back().end - found.back().begin >= kPairs) found.push_back({{}, pairs.starts[e], 0});
    found.back().experts.push_back(e);
    found.back().end = pairs.starts[e + 1];
  }
  return found;
}

inline void gate_row_of(const Bfloat16* x, Bfloat16* to, int width) { gate_row((const Half*)x, (const Half*)x + width, (Half*)to, width); }
inline void gate_row_of(const float* x, float* to, int width) { gate_row(x, x + width, to, width); }

template <class X> void experts(const Layer& layer, const X* x, const int32_t* ids, const float* weights, X* y, int tokens, int top_k, int threads) {
  const int hidden = layer.hidden, intermediate = layer.intermediate, wide = in_fours(hidden), wide_between = in_fours(intermediate);
  const Pairs pairs = by_expert(ids, weights, tokens, top_k, layer.count);
  const std::vector<Part> all = parts(pairs, layer.count);
  int most = 0;
  for (const Part& part : all) most = std::max(most, part.end - part.begin);
  const std::unique_ptr<uint8_t[]> codes(new uint8_t[(int64_t)tokens * wide]), asked(new uint8_t[(int64_t)most * wide]);
  const std::unique_ptr<uint8_t[]> between_codes(new uint8_t[(int64_t)most * wide_between]);
  const std::unique_ptr<float[]> step(new float[tokens]), asked_step(new float[most]), between_step(new float[most]);
  const std::unique_ptr<X[]> between(new X[(int64_t)most * 2 * intermediate]);
  const std::unique_ptr<float[]> sums(new float[(int64_t)tokens * hidden]());
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int token = 0; token < tokens; ++token)
      step[token] = quantize(x + (int64_t)token * hidden, &codes[(int64_t)token * wide], hidden, wide);
    for (const Part& part : all) {
#pragma omp for schedule(static)
      for (int pair = part.begin; pair < part.end; ++pair) {
        const int token = pairs.tokens[pair];
        memcpy(&asked[(int64_t)(pair - part.begin) * wide], &codes[(int64_t)token * wide], wide);
        asked_step[pair - part.begin] = step[token];
      }
      by_blocks(layer.first_rows, [&](auto layout) {
        using Layout = decltype(layout);
        const int blocks = (2 * intermediate + Layout::rows - 1) / Layout::rows;
#pragma omp for schedule(dynamic)
        for (int task = 0; task < (int)part.experts.size() * blocks; ++task) {
          const int expert = part.experts[task / blocks], from = pairs.starts[expert] - part.begin, count = pairs.starts[expert + 1] - pairs.starts[expert];
          const Expert& own = layer.experts[expert];
          const Weight w = {own.first, own.first_scale, own.first_sums, 2 * intermediate, wide};
          X* to = &between[(int64_t)from * 2 * intermediate];
          multiply_block<Layout>(w, &asked[(int64_t)from * wide], &asked_step[from], count, task % blocks * Layout::rows,
                                 [&](int token, int first, int values, const float* found) {
                                   for (int r = 0; r < values; ++r) to[(int64_t)token * 2 * intermediate + first + r] = X(found[r]);
                                 });
        }
      });
#pragma omp for schedule(static)
      for (int pair = 0; pair < part.end - part.begin; ++pair) {
        X* row = &between[(int64_t)pair * 2 * intermediate];
        gate_row_of(row, row, intermediate);
        between_step[pair] = quantize(row, &between_codes[(int64_t)pair * wide_between], intermediate, wide_between);
      }
      // A thread adds up its own columns of all tokens, one expert after the other.
      by_blocks(layer.last_rows, [&](auto layout) {
        using Layout = decltype(layout);
#pragma omp for schedule(static)
        for (int row = 0; row < hidden; row += Layout::rows)
          for (const int expert : part.experts) {
            const int start = pairs.starts[expert], from = start - part.begin;
            const Expert& own = layer.experts[expert];
            const Weight w = {own.last, own.last_scale, own.last_sums, hidden, wide_between};
            multiply_block<Layout>(w, &between_codes[(int64_t)from * wide_between], &between_step[from], pairs.starts[expert + 1] - start, row,
                                   [&](int token, int first, int values, const float* found) {
                                     float* sum = &sums[(int64_t)pairs.tokens[start + token] * hidden + first];
                                     float answer[Layout::rows];
                                     for (int r = 0; r < values; ++r) answer[r] = (float)X(found[r]) * pairs.weights[start + token];
                                     asm("" : "+m"(answer));  // or products are not rounded before they are added: a fused operation does both
                                     for (int r = 0; r < values; ++r) sum[r] += answer[r];
                                   });
          }
      });
    }
#pragma omp for schedule(static)
    for (int token = 0; token < tokens; ++token)
      for (int i = 0; i < hidden; ++i) y[(int64_t)token * hidden + i] = X(sums[(int64_t)token * hidden + i]);
  }
}

}  // namespace

// table [experts]; x and y [tokens, hidden] in bfloat16 or float; ids [tokens, top_k] below `experts`, negative ones of none.
extern "C" void qk_int8_experts(const void* table, const void* x, const int32_t* ids, const float* weights, void* y, int bfloat16, int tokens, int top_k,
                                int count, int hidden, int intermediate, int first_rows, int last_rows, int threads) {
  const Layer layer = {(const Expert*)table, count, hidden, intermediate, first_rows, last_rows};
  if (bfloat16) experts(layer, (const Bfloat16*)x, ids, weights, (Bfloat16*)y, tokens, top_k, threads);
  else experts(layer, (const float*)x, ids, weights, (float*)y, tokens, top_k, threads);
}
