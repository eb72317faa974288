// The three launches of latent attention.
#pragma once

#include "attention/mla_absorb.cuh"
#include "attention/mla_project.cuh"

namespace {

__host__ inline Attend attend_of(const MlaDecode& m, int tile, int few) {
  return {m.table, m.lengths, m.table_stride, m.lengths_stride, m.table_width, m.block_size, m.heads, m.splits, m.scale * 1.4426950408889634f, tile, few, m.weighted, (float2*)m.found};
}

// attend: launches what makes of the queries in `absorbed`, in tiles of so many tokens, what `project` merges. few: see `parts_of`.
template <class T, class AttendLaunch> int absorb_attend_project(const MlaDecode& m, int tile, int few, void* s, const AttendLaunch& attend) {
  const Attend p = attend_of(m, tile, few);
  int error = launch_absorb<T>(m.q, m.kv_b, m.cosines, m.sines, m.absorbed, m.rows, m.heads, m.interleaved, s);
  if (error == 0) error = attend(p);
  return error == 0 ? launch_project<T>(m.kv_b, m.out, p, m.rows, s) : error;
}

}  // namespace
