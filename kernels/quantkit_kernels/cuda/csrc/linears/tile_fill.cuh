// The warp of a block of tile_per_block.cu that fills the ring.

#pragma once

#include <stdint.h>

#include "common/copies.cuh"
#include "common/launch.cuh"
#include "linears/tile.cuh"
#include "linears/tile_params.cuh"
#include "linears/tile_and_share.cuh"

namespace {

// `filled` and `emptied`: barriers of each place of the ring. Tokens and words come by bulk copies, which two lanes start for the tokens and one
// for each strip. Scales and zero points are few, and all lanes copy them in pieces of 16 bytes. The stages of a share come before the block's
// own. This warp finds out which slice of the share the block adds up before it asks for the last stage, for which the other warps wait; the
// block has at least as many stages of its own as the ring has places.
template <int FMT, int G, int NT, int WGS, bool SHARES>
__device__ __forceinline__ void fill(const TileParams& p, uint32_t ring, uint32_t factors, uint32_t filled, uint32_t emptied, int expert, int block_n, int tile,
                                     int count, int begin, int stages, const Shares& shares, const Share& share, Slice* slice) {
  using S = Tile<FMT, G, NT, WGS>;
  const int lane = threadIdx.x & 31, strips = p.n / 64, all = p.k / 128;
  const uint8_t* from = nullptr;
  uint32_t to = 0, bytes = 0;
  const bool tokens = lane < 2;
  if (tokens) {
    constexpr int blocks = S::x / (NT * 128);
    const int groups = (count + 7) / 8;
    to = lane * NT * 128;
    bytes = groups * 8 == NT ? (lane == 0 ? S::x : 0) : lane < blocks ? groups * 1024 : 0;
  } else if (lane < 2 + WGS) {
    to = S::words_at + (lane - 2) * S::words, bytes = S::words;
  }
  const int step = tokens ? S::x : S::words;
  const uint32_t total = __reduce_add_sync(0xffffffffu, bytes);

  constexpr int of_scales = S::scales / 16, of_strip = S::scales ? of_scales + S::zeros / 16 : 1, rounds = S::scales ? (WGS * of_strip + 31) / 32 : 0;
  const uint8_t* piece[rounds + 1];
  uint32_t place[rounds + 1];
  // To where stage 0 of a tile would be, if its first is `begin`.
  const auto aim = [&](int block_n, int begin) {
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
  };
  if (SHARES && share.stages) aim(share.block_n, share.begin);
  else aim(block_n, begin);
  const auto request = [&](int slot, int index, uint32_t extra) {
    if (lane == 0) expect_bytes(filled + slot * 8, total + extra);
    if (!tokens && bytes) copy_bulk(ring + slot * S::stage + to, from + (int64_t)index * step, bytes, filled + slot * 8);
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const int at = (r * 32 + lane) % of_strip;
      if (piece[r]) copy16(ring + slot * S::stage + place[r], piece[r] + (int64_t)index * (at < of_scales ? S::scales : S::zeros));
    }
    if (rounds) arrive_after_copies(filled + slot * 8);
  };
  const auto request_tokens = [&](int slot, int index) {
    if (tokens && bytes) copy_bulk(ring + slot * S::stage + to, from + (int64_t)index * step, bytes, filled + slot * 8);
  };

  // The factors come with the first stage.
  const uint32_t row_bytes = min(S::rows, p.n - block_n * S::rows) * 4, token_bytes = FMT == kInt8 ? NT * 4 : 0;
  const int all_stages = share.stages + stages, first = min(SHARES && share.stages ? share.stages : stages, S::stages);
  for (int s = 0; s < first; ++s) request(s, s, s == 0 ? row_bytes + token_bytes : 0);
  if (lane == 0) copy_bulk(factors, p.row_scale + (size_t)expert * p.n + (size_t)block_n * S::rows, row_bytes, filled);
  wait_for_predecessor();
  for (int s = 0; s < first; ++s) request_tokens(s, s);
  if (token_bytes && lane == 0) copy_bulk(factors + S::rows * 4, p.x_scale + (size_t)tile * NT, token_bytes, filled);
  for (int s = first, slot = SHARES ? first % S::stages : 0, phase = slot != 0; s < all_stages; ++s) {
    if (SHARES && s == share.stages) aim(block_n, begin - share.stages);
    if (!SHARES || s >= S::stages) wait_for(emptied + slot * 8, phase);
    if (SHARES && share.stages && lane == 0) {
      if (s == share.stages + S::stages - 1) slice->last = tell_handed(shares, share);
      if (s == all_stages - 1) slice->number = claim_slice(shares, share);
    }
    request(slot, s, 0);
    request_tokens(slot, s);
    if (++slot == S::stages) slot = 0, phase ^= 1;
  }
  __syncwarp();
}

}  // namespace
