// The warp of a block of tile_per_block.cu that fills the ring.

#pragma once

#include <stdint.h>

#include "common/cluster.cuh"
#include "common/copies.cuh"
#include "common/launch.cuh"
#include "linears/tile.cuh"
#include "linears/tile_params.cuh"
#include "linears/tile_and_share.cuh"

namespace {

// The copies of a stage: tokens and words come by bulk copies, which two lanes start for the tokens and one for each strip. Scales and zero
// points are few, and all lanes copy them in pieces of 16 bytes. `filled`: barriers of each place of the ring. PAIR: of the tokens, which both
// blocks of a cluster need, each copies a half into both.
template <int FMT, int G, int NT, int WGS, bool PAIR = false> struct Copies {
  using S = Tile<FMT, G, NT, WGS>;
  static constexpr int of_scales = S::scales / 16, of_strip = S::scales ? of_scales + S::zeros / 16 : 1;
  static constexpr int rounds = S::scales ? (WGS * of_strip + 31) / 32 : 0;
  const TileParams& p;
  const uint32_t ring, filled;
  const int lane = threadIdx.x & 31;
  const bool tokens = lane < 2;
  const uint8_t* from = nullptr;
  uint32_t to = 0, bytes = 0, total = 0;
  const uint8_t* piece[rounds + 1];
  uint32_t place[rounds + 1];

  __device__ __forceinline__ Copies(const TileParams& p, uint32_t ring, uint32_t filled) : p(p), ring(ring), filled(filled) {}

  // A tile with `count` tokens.
  __device__ __forceinline__ void hold(int count) {
    if (tokens) {
      constexpr int blocks = S::x / (NT * 128);
      const int groups = (count + 7) / 8;
      if (PAIR && blocks == 1) to = lane * ((groups + 1) / 2) * 1024, bytes = (groups + 1 - lane) / 2 * 1024;
      else if (PAIR || groups * 8 != NT) to = lane * NT * 128, bytes = lane < blocks ? groups * 1024 : 0;
      else to = 0, bytes = lane == 0 ? S::x : 0;
    } else if (lane < 2 + WGS) {
      to = S::words_at + (lane - 2) * S::words, bytes = S::words;
    }
    total = __reduce_add_sync(0xffffffffu, bytes);
  }
  // To where stage 0 of a tile would be, if its first is `begin`.
  __device__ __forceinline__ void aim(int expert, int block_n, int tile, int begin) {
    const int strips = p.n / 64, all = p.k / 128;
    // Strips beyond the last repeat it, and are not stored.
    const auto start_of = [&](int strip) { return ((int64_t)expert * strips + min(block_n * WGS + strip, strips - 1)) * all + begin; };
    if (tokens) from = p.x + ((int64_t)tile * all + begin) * S::x + to;
    else if (bytes) from = reinterpret_cast<const uint8_t*>(p.words) + start_of(lane - 2) * S::words;
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const int i = r * 32 + lane, strip = i / of_strip, at = i % of_strip;
      piece[r] = nullptr;
      if (strip < WGS && at < of_scales) piece[r] = p.scales + start_of(strip) * S::scales + at * 16, place[r] = S::scales_at + strip * S::scales + at * 16;
      if (strip < WGS && at >= of_scales && p.zeros)
        piece[r] = p.zeros + start_of(strip) * S::zeros + (at - of_scales) * 16, place[r] = S::zeros_at + strip * S::zeros + (at - of_scales) * 16;
    }
  }
  // `extra`: bytes that come to the same barrier besides.
  __device__ __forceinline__ void request(int slot, int index, uint32_t extra) const {
    if (lane == 0) expect_bytes(filled + slot * 8, total + extra);
    if (!tokens && bytes) copy_bulk(ring + slot * S::stage + to, from + (int64_t)index * S::words, bytes, filled + slot * 8);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const int at = (r * 32 + lane) % of_strip;
      if (piece[r]) copy16(ring + slot * S::stage + place[r], piece[r] + (int64_t)index * (at < of_scales ? S::scales : S::zeros));
    }
    if (rounds) arrive_after_copies(filled + slot * 8);
  }
  __device__ __forceinline__ void request_tokens(int slot, int index) const {
    if (!tokens || !bytes) return;
    if (!PAIR) copy_bulk(ring + slot * S::stage + to, from + (int64_t)index * S::x, bytes, filled + slot * 8);
    else if (lane == blockIdx.x % 2) copy_to_both(ring + slot * S::stage + to, from + (int64_t)index * S::x, bytes, filled + slot * 8);
  }
};

// `emptied`: barriers of each place of the ring, as `filled`. The stages of a share come before the block's own. This warp finds out which
// slice of the share the block adds up before it asks for the last stage, for which the other warps wait; the block has at least as many
// stages of its own as the ring has places.
template <int FMT, int G, int NT, int WGS, bool SHARES>
__device__ __forceinline__ void fill(const TileParams& p, uint32_t ring, uint32_t factors, uint32_t filled, uint32_t emptied, int expert, int block_n, int tile,
                                     int count, int begin, int stages, const Shares& shares, const Share& share, Slice* slice) {
  using S = Tile<FMT, G, NT, WGS>;
  Copies<FMT, G, NT, WGS> copies(p, ring, filled);
  const int lane = copies.lane;
  copies.hold(count);
  if (SHARES && share.stages) copies.aim(expert, share.block_n, tile, share.begin);
  else copies.aim(expert, block_n, tile, begin);

  // The factors come with the first stage.
  const uint32_t row_bytes = min(S::rows, p.n - block_n * S::rows) * 4, token_bytes = FMT == kInt8 ? NT * 4 : 0;
  const int all_stages = share.stages + stages, first = min(SHARES && share.stages ? share.stages : stages, S::stages);
  for (int s = 0; s < first; ++s) copies.request(s, s, s == 0 ? row_bytes + token_bytes : 0);
  if (lane == 0) copy_bulk(factors, p.row_scale + (size_t)expert * p.n + (size_t)block_n * S::rows, row_bytes, filled);
  wait_for_predecessor();
  for (int s = 0; s < first; ++s) copies.request_tokens(s, s);
  if (token_bytes && lane == 0) copy_bulk(factors + S::rows * 4, p.x_scale + (size_t)tile * NT, token_bytes, filled);
  for (int s = first, slot = SHARES ? first % S::stages : 0, phase = slot != 0; s < all_stages; ++s) {
    if (SHARES && s == share.stages) copies.aim(expert, block_n, tile, begin - share.stages);
    if (!SHARES || s >= S::stages) wait_for(emptied + slot * 8, phase);
    if (SHARES && share.stages && lane == 0) {
      if (s == share.stages + S::stages - 1) slice->last = tell_handed(shares, share);
      if (s == all_stages - 1) slice->number = claim_slice(shares, share);
    }
    copies.request(slot, s, 0);
    copies.request_tokens(slot, s);
    if (++slot == S::stages) slot = 0, phase ^= 1;
  }
  __syncwarp();
}

}  // namespace
