/*
 * As much of Ascend C as kernels/ascendc uses, on a CPU: tensors are memory, an instruction is a loop over repeats, blocks and lanes.
 *
 * Written from the public interface's documentation for the tests; not CANN's header and no model of the chip: no timing, no pipes in
 * parallel, no missing synchronisation. What is checked: unified buffer sizes, 32-byte alignment, queue depths; fresh memory holds NaN.
 */
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <type_traits>
#include <vector>

#define __aicore__
#define __global__
#define __gm__
#define GM_ADDR uint8_t *
#define KERNEL_TASK_TYPE_DEFAULT(type)
#define REQUIRE(condition) do { if (!(condition)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); abort(); } } while (0)

using half = _Float16;
struct bfloat16_t {
    uint16_t bits;
    operator float() const { uint32_t wide = uint32_t(bits) << 16; float value; memcpy(&value, &wide, 4); return value; }
};
enum pipe_t { PIPE_V };

namespace AscendC {
constexpr uint32_t BLOCK_BYTES = 32, UNIFIED_BUFFER = 192 * 1024;
struct int4b_t { };
inline uint32_t blockIdx = 0, blockNum = 1, allocated = 0;
inline bool atomicAdd = false;
inline uint32_t GetBlockIdx() { return blockIdx; }
inline uint32_t GetBlockNum() { return blockNum; }
template <pipe_t pipe> void PipeBarrier() { }
template <typename T> void SetAtomicAdd() { atomicAdd = true; }
inline void SetAtomicNone() { atomicAdd = false; }
enum class RoundMode { CAST_NONE, CAST_RINT };
enum class TPosition { VECIN, VECOUT, VECCALC };

template <typename T> constexpr uint64_t bytes(uint64_t count) { return count * sizeof(T); }
template <> constexpr uint64_t bytes<int4b_t>(uint64_t count) { return count / 2; }

template <typename T> struct LocalTensor {
    uint8_t *base = nullptr;
    LocalTensor operator[](uint32_t offset) const { return {base + bytes<T>(offset)}; }
    template <typename U> LocalTensor<U> ReinterpretCast() const { return {base}; }
    T *at(uint64_t offset) const { REQUIRE(uint64_t(base) % BLOCK_BYTES == 0); return (T *)(base + offset); }
};
template <typename T> struct GlobalTensor {
    T *base = nullptr;
    void SetGlobalBuffer(T *buffer) { base = buffer; }
    GlobalTensor operator[](uint64_t offset) const { return {base + offset}; }
    T GetValue(uint64_t offset) const { return base[offset]; }
};

struct Memory {
    uint8_t *base = nullptr;
    void allocate(uint32_t size) {
        REQUIRE(size % BLOCK_BYTES == 0);
        allocated += size;
        REQUIRE(allocated <= UNIFIED_BUFFER);
        base = (uint8_t *)aligned_alloc(BLOCK_BYTES, size);
        memset(base, 0xFF, size);
    }
    ~Memory() { free(base); }
};
template <TPosition position> struct TBuf {
    Memory memory;
    template <typename T> LocalTensor<T> Get() { return {memory.base}; }
};
template <TPosition position, int depth> struct TQue {
    std::vector<std::unique_ptr<Memory>> memories;
    std::deque<uint8_t *> idle, full;
    template <typename T> LocalTensor<T> AllocTensor() { REQUIRE(!idle.empty()); auto *p = idle.front(); idle.pop_front(); return {p}; }
    template <typename T> void EnQue(const LocalTensor<T> &tensor) { full.push_back(tensor.base); REQUIRE(int(full.size()) <= depth); }
    template <typename T> LocalTensor<T> DeQue() { REQUIRE(!full.empty()); auto *p = full.front(); full.pop_front(); return {p}; }
    template <typename T> void FreeTensor(const LocalTensor<T> &tensor) { idle.push_back(tensor.base); }
};
struct TPipe {
    TPipe() { allocated = 0; }
    template <TPosition p> void InitBuffer(TBuf<p> &buffer, uint32_t size) { buffer.memory.allocate(size); }
    template <TPosition p, int depth> void InitBuffer(TQue<p, depth> &queue, int number, uint32_t size) {
        for (int i = 0; i < number; i++) {
            queue.memories.push_back(std::make_unique<Memory>());
            queue.memories.back()->allocate(size);
            queue.idle.push_back(queue.memories.back()->base);
        }
    }
};

struct DataCopyParams {
    uint16_t blockCount, blockLen, srcStride, dstStride;
    DataCopyParams(uint16_t count, uint16_t len, uint16_t src, uint16_t dst)
        : blockCount(count), blockLen(len), srcStride(src), dstStride(dst) { }
};
/* Bursts of blockLen blocks; strides are gaps between bursts, in blocks. */
template <typename T> void DataCopy(const LocalTensor<T> &dst, const GlobalTensor<T> &src, const DataCopyParams &p) {
    for (uint64_t i = 0; i < p.blockCount; i++)
        memcpy(dst.at(i * (p.blockLen + p.dstStride) * BLOCK_BYTES),
               (const uint8_t *)src.base + i * (p.blockLen + p.srcStride) * BLOCK_BYTES, p.blockLen * BLOCK_BYTES);
}
template <typename T> void DataCopy(const LocalTensor<T> &dst, const GlobalTensor<T> &src, uint32_t count) {
    REQUIRE(count * sizeof(T) % BLOCK_BYTES == 0);
    memcpy(dst.at(0), src.base, count * sizeof(T));
}
template <typename T> void DataCopy(const GlobalTensor<T> &dst, const LocalTensor<T> &src, uint32_t count) {
    REQUIRE(count * sizeof(T) % BLOCK_BYTES == 0);
    for (uint32_t i = 0; i < count; i++) dst.base[i] = src.at(0)[i] + (atomicAdd ? dst.base[i] : T(0));
}

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
    REQUIRE(mask <= 8 * perBlock);
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; i < mask; i++) {
            const uint64_t block = i / perBlock, lane = i % perBlock;
            T *dst = d.at((r * p.dstRep + block * p.dstBlk) * BLOCK_BYTES) + lane;
            f(*dst, a.at((r * p.src0Rep + block * p.src0Blk) * BLOCK_BYTES)[lane],
              b.at((r * p.src1Rep + block * p.src1Blk) * BLOCK_BYTES)[lane]);
        }
}
#define QK_BINARY(name, expression) \
    template <typename T> void name(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask, \
                                    uint8_t count, const BinaryRepeatParams &p) { \
        repeats(d, a, b, mask, count, p, [](T &dst, T x, T y) { dst = expression; }); \
    }
QK_BINARY(Add, x + y)
QK_BINARY(Mul, x * y)
QK_BINARY(And, x & y)
QK_BINARY(MulAddDst, dst + x * y)
template <typename T> void Mul(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, int32_t count) {
    for (int32_t i = 0; i < count; i++) d.at(0)[i] = a.at(0)[i] * b.at(0)[i];
}
template <typename T> void ShiftLeft(const LocalTensor<T> &d, const LocalTensor<T> &a, const T &by, int32_t count) {
    for (int32_t i = 0; i < count; i++) d.at(0)[i] = T(uint32_t(a.at(0)[i]) << by);
}
template <typename T> void Duplicate(const LocalTensor<T> &d, const T &value, int32_t count) {
    for (int32_t i = 0; i < count; i++) d.at(0)[i] = value;
}

template <typename T> float element(const LocalTensor<T> &a, uint32_t i) { return float(a.at(0)[i]); }
template <> inline float element(const LocalTensor<int4b_t> &a, uint32_t i) {
    const uint8_t byte = ((const uint8_t *)a.at(0))[i / 2];
    return float(int8_t(i % 2 ? byte & 0xF0 : byte << 4) >> 4);
}
/* Every conversion used here is exact but half to int16, which is so for whole numbers. */
template <typename T, typename U> void Cast(const LocalTensor<T> &d, const LocalTensor<U> &a, RoundMode mode, uint32_t count) {
    REQUIRE((mode == RoundMode::CAST_RINT) == std::is_integral_v<T>);
    for (uint32_t i = 0; i < count; i++) {
        const float value = element(a, i);
        d.at(0)[i] = T(std::is_integral_v<T> ? std::nearbyint(value) : value);
    }
}
struct BrcbRepeatParams {
    uint16_t dstBlk, dstRep;
    BrcbRepeatParams(uint16_t blk, uint16_t rep) : dstBlk(blk), dstRep(rep) { }
};
/* Eight values a repeat, each filling a block. */
template <typename T> void Brcb(const LocalTensor<T> &d, const LocalTensor<T> &a, uint8_t count, const BrcbRepeatParams &p) {
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; i < 8; i++)
            for (uint64_t lane = 0; lane < BLOCK_BYTES / sizeof(T); lane++)
                d.at((r * p.dstRep + i * p.dstBlk) * BLOCK_BYTES)[lane] = a.at(0)[r * 8 + i];
}
} // namespace AscendC

extern "C" inline __attribute__((used, visibility("default"))) void set_core(uint32_t index, uint32_t number) {
    AscendC::blockIdx = index;
    AscendC::blockNum = number;
}
