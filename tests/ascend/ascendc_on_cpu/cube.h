/* Instructions of a cube core on int8: rows to fractals, fractals to the operands' buffers, the product, and its way out. */
#pragma once
#include "memory.h"

namespace AscendC {
constexpr uint32_t FRACTAL_BYTES = 512;

struct Nd2NzParams {
    uint16_t ndNum, nValue, dValue, srcNdMatrixStride, srcDValue, dstNzC0Stride, dstNzNStride, dstNzMatrixStride;
};
/* nValue rows of dValue values, srcDValue apart, to runs of 32 bytes: those of a row dstNzC0Stride runs apart, rows dstNzNStride. */
inline void DataCopy(const LocalTensor<int8_t> &dst, const GlobalTensor<int8_t> &src, const Nd2NzParams &p) {
    Memory *memory = dst.memory;
    REQUIRE(memory->position == TPosition::A1 && memory->state == State::ALLOCATED && p.ndNum == 1 && p.dValue % 32 == 0);
    REQUIRE(p.nValue > 0 && dst.block((p.dValue / 32 - 1) * p.dstNzC0Stride + (p.nValue - 1) * p.dstNzNStride + 1) <= memory->size);
    src.counts(uint64_t(p.nValue) * p.dValue);
    core->incoming.push_back(memory);
    memory->pending.push_back([=] {
        for (uint64_t row = 0; row < p.nValue; row++)
            for (uint64_t run = 0; run < p.dValue / 32; run++)
                memcpy(memory->base + dst.block(run * p.dstNzC0Stride + row * p.dstNzNStride), src.base + row * p.srcDValue + run * 32, 32);
    });
}

struct LoadData2DParams {
    uint16_t startIndex;
    uint8_t repeatTimes;
    uint16_t srcStride;
    uint8_t sid;
    uint16_t dstGap;
    bool ifTranspose;
    uint8_t addrMode;
};
inline void LoadData(const LocalTensor<int8_t> &dst, const LocalTensor<int8_t> &src, const LoadData2DParams &p) {
    Memory *to = dst.memory;
    REQUIRE(to->position == (src.memory->position == TPosition::A1 ? TPosition::A2 : TPosition::B2) && to->state == State::ALLOCATED);
    REQUIRE(p.repeatTimes > 0 && !p.ifTranspose && p.addrMode == 0 && dst.start % FRACTAL_BYTES == 0);
    core->counts.l1ToL0 += p.repeatTimes * FRACTAL_BYTES;
    for (uint64_t i = 0; i < p.repeatTimes; i++) {
        const uint8_t *from = src.memory->look(src.start + (p.startIndex + i * p.srcStride) * FRACTAL_BYTES, FRACTAL_BYTES);
        const uint64_t at = dst.start + i * (1 + p.dstGap) * FRACTAL_BYTES;
        REQUIRE(at + FRACTAL_BYTES <= to->size);
        to->pending.push_back([=, fractal = std::vector<uint8_t>(from, from + FRACTAL_BYTES)] {
            memcpy(to->base + at, fractal.data(), FRACTAL_BYTES);
        });
    }
}

struct MmadParams {
    uint16_t m = 0, n = 0, k = 0;
    bool cmatrixInitVal = true;
};
/* c = a b: a in fractals of 16 x 32, those of a row of fractals together; b of 32 x 16, columns together; c of 16 x 16, columns of them
 * together. With cmatrixInitVal c begins at zero. */
inline void Mmad(const LocalTensor<int32_t> &c, const LocalTensor<int8_t> &a, const LocalTensor<int8_t> &b, const MmadParams &p) {
    REQUIRE(core->cube && p.m % 16 == 0 && p.n % 16 == 0 && p.k % 32 == 0 && p.m > 0 && p.n > 0 && p.k > 0);
    REQUIRE(a.memory->position == TPosition::A2 && b.memory->position == TPosition::B2 && c.memory->position == TPosition::CO1);
    REQUIRE(c.memory->state == State::ALLOCATED);
    const int8_t *left = (const int8_t *)a.memory->look(a.start, p.m * p.k), *right = (const int8_t *)b.memory->look(b.start, p.k * p.n);
    int32_t *out = (int32_t *)c.memory->touch(c.start, p.m * p.n * 4);
    core->counts.cubeSteps += p.m / 16 * (p.n / 16) * (p.k / 32);
    for (uint32_t m = 0; m < p.m; m++)
        for (uint32_t n = 0; n < p.n; n++) {
            int32_t &sum = out[(n / 16 * p.m + m) * 16 + n % 16];
            if (p.cmatrixInitVal) sum = 0;
            for (uint32_t k = 0; k < p.k; k++)
                sum += left[(m / 16 * (p.k / 32) + k / 32) * 512 + m % 16 * 32 + k % 32] *
                       right[(k / 32 * (p.n / 16) + n / 16) * 512 + n % 16 * 32 + k % 32];
        }
}

struct FixpipeParamsV220 {
    uint16_t nSize = 0, mSize = 0, srcStride = 0;
    uint32_t dstStride = 0;
};
/* To rows of memory, dstStride values apart. */
inline void Fixpipe(const GlobalTensor<int32_t> &dst, const LocalTensor<int32_t> &src, const FixpipeParamsV220 &p) {
    REQUIRE(src.memory->position == TPosition::CO1 && src.start % 64 == 0 && p.nSize % 16 == 0 && p.mSize > 0 && p.srcStride % 16 == 0);
    core->counts.l2Written += p.mSize * p.nSize * 4;
    core->counts.copies++;
    for (uint64_t m = 0; m < p.mSize; m++) {
        std::vector<int32_t> row;
        for (uint64_t n = 0; n < p.nSize; n++) row.push_back(src.at((n / 16 * p.srcStride + m) * 16 + n % 16));
        core->outgoing.emplace_back(PIPE_FIX, [=] { memcpy(dst.base + m * p.dstStride, row.data(), row.size() * 4); });
    }
}
} // namespace AscendC
