/* Instructions of a vector core: loops over repeats, blocks and lanes. All is counted as rates.py wants it. */
#pragma once
#include <cmath>

#include "memory.h"

namespace AscendC {
enum class RoundMode { CAST_NONE, CAST_RINT };

inline void begin(uint64_t repeats) {
    REQUIRE(!core->cube && repeats > 0);
    core->instruction++;
    core->counts.vectorInstructions++;
    core->counts.vectorRepeats += repeats;
}
template <typename T> uint64_t repeatsOf(int64_t count) { REQUIRE(count > 0); return (count * sizeof(T) + 255) / 256; }

struct BinaryRepeatParams {
    uint8_t dstBlk, src0Blk, src1Blk, dstRep, src0Rep, src1Rep;
    BinaryRepeatParams(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint8_t e, uint8_t f)
        : dstBlk(a), src0Blk(b), src1Blk(c), dstRep(d), src0Rep(e), src1Rep(f) { }
};
/* `mask` lanes of every repeat, each 32-byte block at its own stride: what one vector instruction covers. */
template <typename T, typename F>
void repeats(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask, uint8_t count,
             const BinaryRepeatParams &p, F f) {
    constexpr uint64_t perBlock = BLOCK_BYTES / sizeof(T);
    REQUIRE(mask > 0 && mask <= 8 * perBlock);
    begin(count);
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; i < mask; i++) {
            const uint64_t block = i / perBlock, lane = i % perBlock * sizeof(T), at = d.block(r * p.dstRep + block * p.dstBlk) + lane;
            f(d, at, a.get(a.block(r * p.src0Rep + block * p.src0Blk) + lane), b.get(b.block(r * p.src1Rep + block * p.src1Blk) + lane));
        }
}
#define QK_BINARY(name, expression) \
    template <typename T> void name(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask, \
                                    uint8_t count, const BinaryRepeatParams &p) { \
        repeats(d, a, b, mask, count, p, [](const LocalTensor<T> &dst, uint64_t at, T x, T y) { dst.set(at, T(expression)); }); \
    } \
    template <typename T> void name(const LocalTensor<T> &dst, const LocalTensor<T> &a, const LocalTensor<T> &b, int32_t count) { \
        begin(repeatsOf<T>(count)); \
        for (int32_t i = 0; i < count; i++) { \
            const uint64_t at = dst.block(0) + i * sizeof(T); \
            const T x = a.at(i), y = b.at(i); \
            dst.set(at, T(expression)); \
        } \
    }
QK_BINARY(Add, x + y)
QK_BINARY(Sub, x - y)
QK_BINARY(Mul, x * y)
QK_BINARY(Div, x / y)
QK_BINARY(Max, x > y ? x : y)
QK_BINARY(And, x & y)
QK_BINARY(MulAddDst, dst.get(at) + x * y)
#define QK_SCALAR(name, expression) \
    template <typename T> void name(const LocalTensor<T> &d, const LocalTensor<T> &a, const T &s, int32_t count) { \
        begin(repeatsOf<T>(count)); \
        for (int32_t i = 0; i < count; i++) { const T x = a.at(i); d.put(i, T(expression)); } \
    }
QK_SCALAR(Muls, x * s)
QK_SCALAR(Maxs, x > s ? x : s)
QK_SCALAR(ShiftLeft, uint32_t(x) << s)
QK_SCALAR(ShiftRight, x >> s)
template <typename T> void Abs(const LocalTensor<T> &d, const LocalTensor<T> &a, int32_t count) {
    begin(repeatsOf<T>(count));
    for (int32_t i = 0; i < count; i++) d.put(i, std::fabs(a.at(i)));
}
template <typename T> void Duplicate(const LocalTensor<T> &d, const T &value, int32_t count) {
    begin(repeatsOf<T>(count));
    for (int32_t i = 0; i < count; i++) d.put(i, value);
}

/* To whole numbers and to fewer bits with CAST_RINT, to more bits with CAST_NONE. What does not fit a whole number, NaN too,
 * ends the program. */
template <typename T, typename U> void Cast(const LocalTensor<T> &d, const LocalTensor<U> &a, RoundMode mode, uint32_t count) {
    const bool narrows = std::is_same_v<U, float> || (std::is_same_v<U, half> && std::is_integral_v<T>);
    REQUIRE((mode == RoundMode::CAST_RINT) == narrows);
    begin((count + (sizeof(T) == 4 || sizeof(U) == 4 ? 63 : 127)) / (sizeof(T) == 4 || sizeof(U) == 4 ? 64 : 128));
    std::vector<T> values(count);
    for (uint32_t i = 0; i < count; i++) {
        const auto value = a.at(i);
        if constexpr (std::is_integral_v<T>) {
            const float rounded = std::nearbyint(float(value));
            REQUIRE(std::fabs(rounded) <= (sizeof(T) == 1 ? 127.0f : sizeof(T) == 2 ? 32767.0f : 2147483520.0f));
            values[i] = T(rounded);
        } else {
            values[i] = T(value);
        }
    }
    for (uint32_t i = 0; i < count; i++) d.put(i, values[i]);
}
struct BrcbRepeatParams {
    uint16_t dstBlk, dstRep;
    BrcbRepeatParams(uint16_t blk, uint16_t rep) : dstBlk(blk), dstRep(rep) { }
};
/* Eight values a repeat, each filling a block. */
template <typename T> void Brcb(const LocalTensor<T> &d, const LocalTensor<T> &a, uint8_t count, const BrcbRepeatParams &p) {
    begin(count);
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; i < 8; i++)
            for (uint64_t lane = 0; lane < BLOCK_BYTES / sizeof(T); lane++)
                d.set(d.block(r * p.dstRep + i * p.dstBlk) + lane * sizeof(T), a.at(r * 8 + i));
}
/* One value of each of a repeat's eight blocks; dstRep counts such runs of eight. */
template <bool largest, typename T>
void reduceBlocks(const LocalTensor<T> &d, const LocalTensor<T> &a, int32_t count, int32_t mask, int32_t dstRep, int32_t blk, int32_t rep) {
    constexpr int32_t perBlock = BLOCK_BYTES / sizeof(T);
    REQUIRE(mask == 8 * perBlock && count <= 255);
    begin(count);
    for (int32_t r = 0; r < count; r++)
        for (int32_t i = 0; i < 8; i++) {
            T found = a.get(a.block(r * rep + i * blk));
            for (int32_t lane = 1; lane < perBlock; lane++) {
                const T next = a.get(a.block(r * rep + i * blk) + lane * sizeof(T));
                found = largest ? (next > found ? next : found) : found + next;
            }
            d.put((r * dstRep) * 8 + i, found);
        }
}
template <typename T>
void BlockReduceMax(const LocalTensor<T> &d, const LocalTensor<T> &a, int32_t count, int32_t mask, int32_t dstRep, int32_t blk, int32_t rep) {
    reduceBlocks<true>(d, a, count, mask, dstRep, blk, rep);
}
template <typename T>
void BlockReduceSum(const LocalTensor<T> &d, const LocalTensor<T> &a, int32_t count, int32_t mask, int32_t dstRep, int32_t blk, int32_t rep) {
    reduceBlocks<false>(d, a, count, mask, dstRep, blk, rep);
}
} // namespace AscendC
