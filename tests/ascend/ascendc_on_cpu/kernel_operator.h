/*
 * As much of Ascend C as kernels/ascendc uses, on a CPU: an instruction is a loop over repeats, blocks and lanes.
 *
 * Written from the public interface's documentation for the tests; not CANN's header and no model of the chip's time. What a program may
 * not count on is made to fail:
 *   data that a copy brings into a queue's buffer is there when DeQue gives it, and what leaves one is in memory when FreeTensor takes it;
 *   before a copy, and after FreeTensor, a buffer holds NaN; a buffer is used as its state allows (allocated, queued, dequeued, free);
 *   a vector instruction that touches what another wrote, or writes what another read, without PipeBarrier between, ends the program;
 *   so do a step over a buffer's end, a misaligned block, too many buffers, and an atomic mode that is on when the kernel ends.
 */
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
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
inline uint64_t period = 1, instruction = 0;  // what lies between two barriers; what is being executed
inline uint32_t GetBlockIdx() { return blockIdx; }
inline uint32_t GetBlockNum() { return blockNum; }
template <pipe_t pipe> void PipeBarrier() { period++; }
template <typename T> void SetAtomicAdd() { atomicAdd = true; }
inline void SetAtomicNone() { atomicAdd = false; }
enum class RoundMode { CAST_NONE, CAST_RINT };
enum class TPosition { VECIN, VECOUT, VECCALC };
enum class State { BUFFER, FREE, ALLOCATED, QUEUED, DEQUEUED };

template <typename T> constexpr uint64_t bytes(uint64_t count) { return count * sizeof(T); }
template <> constexpr uint64_t bytes<int4b_t>(uint64_t count) { return count / 2; }

/* A buffer, and who touched each of its bytes last: the instruction, and the period it belongs to. */
struct Memory {
    struct Touched { uint64_t period = 0, instruction = 0; };
    std::vector<uint8_t> storage;
    uint8_t *base = nullptr;
    uint32_t size = 0;
    State state = State::BUFFER;
    TPosition position = TPosition::VECCALC;
    std::vector<Touched> written, read;
    std::vector<std::function<void()>> pending;

    void allocate(uint32_t wanted, TPosition where, State first) {
        REQUIRE(wanted > 0 && wanted % BLOCK_BYTES == 0);
        allocated += wanted;
        REQUIRE(allocated <= UNIFIED_BUFFER);
        size = wanted, position = where, state = first;
        storage.assign(size + BLOCK_BYTES, 0xFF);
        base = storage.data() + (BLOCK_BYTES - uint64_t(storage.data()) % BLOCK_BYTES) % BLOCK_BYTES;
        written.resize(size), read.resize(size);
    }
    void spoil() { memset(base, 0xFF, size); }
    void land() { for (auto &copy : pending) copy(); pending.clear(); }
    static bool clashes(const Touched &before) { return before.period == period && before.instruction != instruction; }
    const uint8_t *look(uint64_t offset, uint64_t count) {
        REQUIRE(offset + count <= size);
        REQUIRE(state == State::BUFFER || state == (position == TPosition::VECIN ? State::DEQUEUED : State::ALLOCATED));
        for (uint64_t i = offset; i < offset + count; i++) {
            REQUIRE(!clashes(written[i]) && "read before a barrier");
            read[i] = {period, instruction};
        }
        return base + offset;
    }
    uint8_t *touch(uint64_t offset, uint64_t count) {
        REQUIRE(offset + count <= size);
        REQUIRE(state == State::BUFFER || (position == TPosition::VECOUT && state == State::ALLOCATED));
        for (uint64_t i = offset; i < offset + count; i++) {
            REQUIRE(!clashes(written[i]) && !clashes(read[i]) && "written before a barrier");
            written[i] = {period, instruction};
        }
        return base + offset;
    }
};

template <typename T> struct LocalTensor {
    Memory *memory = nullptr;
    uint64_t start = 0;
    LocalTensor operator[](uint32_t offset) const { return {memory, start + bytes<T>(offset)}; }
    template <typename U> LocalTensor<U> ReinterpretCast() const { return {memory, start}; }
    uint64_t block(uint64_t number) const { REQUIRE(start % BLOCK_BYTES == 0); return start + number * BLOCK_BYTES; }
    T get(uint64_t offset) const { T value; memcpy(&value, memory->look(offset, sizeof(T)), sizeof(T)); return value; }
    void set(uint64_t offset, T value) const { memcpy(memory->touch(offset, sizeof(T)), &value, sizeof(T)); }
};
template <typename T> struct GlobalTensor {
    T *base = nullptr;
    void SetGlobalBuffer(T *buffer) { base = buffer; }
    GlobalTensor operator[](uint64_t offset) const { return {base + offset}; }
    T GetValue(uint64_t offset) const { return base[offset]; }
};

template <TPosition position> struct TBuf {
    Memory memory;
    template <typename T> LocalTensor<T> Get() { return {&memory, 0}; }
};
template <TPosition position, int depth> struct TQue {
    std::vector<std::unique_ptr<Memory>> memories;
    std::deque<Memory *> idle, full;
    template <typename T> LocalTensor<T> AllocTensor() {
        REQUIRE(!idle.empty());
        Memory *memory = idle.front();
        idle.pop_front();
        memory->state = State::ALLOCATED;
        return {memory, 0};
    }
    template <typename T> void EnQue(const LocalTensor<T> &tensor) {
        REQUIRE(tensor.memory->state == State::ALLOCATED);
        tensor.memory->state = State::QUEUED;
        full.push_back(tensor.memory);
        REQUIRE(int(full.size()) <= depth);
    }
    template <typename T> LocalTensor<T> DeQue() {
        REQUIRE(!full.empty());
        Memory *memory = full.front();
        full.pop_front();
        memory->state = State::DEQUEUED;
        memory->land();
        return {memory, 0};
    }
    template <typename T> void FreeTensor(const LocalTensor<T> &tensor) {
        REQUIRE(tensor.memory->state == State::DEQUEUED);
        tensor.memory->land();
        tensor.memory->spoil();
        tensor.memory->state = State::FREE;
        idle.push_back(tensor.memory);
    }
    ~TQue() { REQUIRE(full.empty() && idle.size() == memories.size()); }
};
struct TPipe {
    TPipe() { allocated = 0, period++; }
    ~TPipe() { REQUIRE(!atomicAdd && "the next kernel finds the atomic mode on"); }
    template <TPosition p> void InitBuffer(TBuf<p> &buffer, uint32_t size) { buffer.memory.allocate(size, p, State::BUFFER); }
    template <TPosition p, int depth> void InitBuffer(TQue<p, depth> &queue, int number, uint32_t size) {
        for (int i = 0; i < number; i++) {
            queue.memories.push_back(std::make_unique<Memory>());
            queue.memories.back()->allocate(size, p, State::FREE);
            queue.idle.push_back(queue.memories.back().get());
        }
    }
};

struct DataCopyParams {
    uint16_t blockCount, blockLen, srcStride, dstStride;
    DataCopyParams(uint16_t count, uint16_t len, uint16_t src, uint16_t dst)
        : blockCount(count), blockLen(len), srcStride(src), dstStride(dst) { REQUIRE(count > 0 && count <= 4095 && len > 0); }
};
/* Bursts of blockLen blocks; strides are gaps between bursts, in blocks. */
template <typename T> void DataCopy(const LocalTensor<T> &dst, const GlobalTensor<T> &src, const DataCopyParams &p) {
    Memory *memory = dst.memory;
    REQUIRE(memory->position == TPosition::VECIN && memory->state == State::ALLOCATED);
    REQUIRE(dst.block(p.blockCount * (p.blockLen + p.dstStride) - p.dstStride) <= memory->size);
    memory->pending.push_back([=] {
        for (uint64_t i = 0; i < p.blockCount; i++)
            memcpy(memory->base + dst.block(i * (p.blockLen + p.dstStride)),
                   (const uint8_t *)src.base + i * (p.blockLen + p.srcStride) * BLOCK_BYTES, p.blockLen * BLOCK_BYTES);
    });
}
template <typename T> void DataCopy(const LocalTensor<T> &dst, const GlobalTensor<T> &src, uint32_t count) {
    REQUIRE(count > 0 && count * sizeof(T) % BLOCK_BYTES == 0);
    DataCopy(dst, src, DataCopyParams(1, count * sizeof(T) / BLOCK_BYTES, 0, 0));
}
template <typename T> void DataCopy(const GlobalTensor<T> &dst, const LocalTensor<T> &src, uint32_t count) {
    Memory *memory = src.memory;
    REQUIRE(count > 0 && count * sizeof(T) % BLOCK_BYTES == 0 && src.block(0) + count * sizeof(T) <= memory->size);
    REQUIRE(memory->position == TPosition::VECOUT && memory->state == State::DEQUEUED);
    memory->pending.push_back([=, add = atomicAdd] {
        const T *values = (const T *)(memory->base + src.start);
        for (uint32_t i = 0; i < count; i++) dst.base[i] = values[i] + (add ? dst.base[i] : T(0));
    });
}

struct BinaryRepeatParams {
    uint8_t dstBlk, src0Blk, src1Blk, dstRep, src0Rep, src1Rep;
    BinaryRepeatParams(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint8_t e, uint8_t f)
        : dstBlk(a), src0Blk(b), src1Blk(c), dstRep(d), src0Rep(e), src1Rep(f) { }
};
/* `mask` lanes of every repeat, each 32-byte block at its own stride: what one vector instruction covers. All is read, then written. */
template <typename T, typename F>
void repeats(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask, uint8_t count,
             const BinaryRepeatParams &p, F f) {
    constexpr uint64_t perBlock = BLOCK_BYTES / sizeof(T);
    REQUIRE(mask > 0 && mask <= 8 * perBlock && count > 0);
    instruction++;
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; i < mask; i++) {
            const uint64_t block = i / perBlock, lane = i % perBlock * sizeof(T), at = d.block(r * p.dstRep + block * p.dstBlk) + lane;
            f(d, at, a.get(a.block(r * p.src0Rep + block * p.src0Blk) + lane), b.get(b.block(r * p.src1Rep + block * p.src1Blk) + lane));
        }
}
#define QK_BINARY(name, expression) \
    template <typename T> void name(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask, \
                                    uint8_t count, const BinaryRepeatParams &p) { \
        repeats(d, a, b, mask, count, p, [](const LocalTensor<T> &dst, uint64_t at, T x, T y) { dst.set(at, expression); }); \
    }
QK_BINARY(Add, x + y)
QK_BINARY(Mul, x * y)
QK_BINARY(And, x & y)
QK_BINARY(MulAddDst, dst.get(at) + x * y)
template <typename T> void Mul(const LocalTensor<T> &d, const LocalTensor<T> &a, const LocalTensor<T> &b, int32_t count) {
    REQUIRE(count > 0);
    instruction++;
    for (int32_t i = 0; i < count; i++) d.set(d.block(0) + i * sizeof(T), a.get(a.block(0) + i * sizeof(T)) * b.get(b.block(0) + i * sizeof(T)));
}
template <typename T> void ShiftLeft(const LocalTensor<T> &d, const LocalTensor<T> &a, const T &by, int32_t count) {
    REQUIRE(count > 0);
    instruction++;
    for (int32_t i = 0; i < count; i++) d.set(d.block(0) + i * sizeof(T), T(uint32_t(a.get(a.block(0) + i * sizeof(T))) << by));
}
template <typename T> void Duplicate(const LocalTensor<T> &d, const T &value, int32_t count) {
    REQUIRE(count > 0);
    instruction++;
    for (int32_t i = 0; i < count; i++) d.set(d.block(0) + i * sizeof(T), value);
}

template <typename T> float element(const LocalTensor<T> &a, uint32_t i) { return float(a.get(a.block(0) + i * sizeof(T))); }
template <> inline float element(const LocalTensor<int4b_t> &a, uint32_t i) {
    const uint8_t byte = *a.memory->look(a.block(0) + i / 2, 1);
    return float(int8_t(i % 2 ? byte & 0xF0 : byte << 4) >> 4);
}
/* Every conversion used here is exact but half to int16, which is so for whole numbers. */
template <typename T, typename U> void Cast(const LocalTensor<T> &d, const LocalTensor<U> &a, RoundMode mode, uint32_t count) {
    REQUIRE(count > 0 && (mode == RoundMode::CAST_RINT) == std::is_integral_v<T>);
    instruction++;
    std::vector<T> values(count);
    for (uint32_t i = 0; i < count; i++) {
        const float value = element(a, i);
        values[i] = T(std::is_integral_v<T> ? std::nearbyint(value) : value);
    }
    for (uint32_t i = 0; i < count; i++) d.set(d.block(0) + i * sizeof(T), values[i]);
}
struct BrcbRepeatParams {
    uint16_t dstBlk, dstRep;
    BrcbRepeatParams(uint16_t blk, uint16_t rep) : dstBlk(blk), dstRep(rep) { }
};
/* Eight values a repeat, each filling a block. */
template <typename T> void Brcb(const LocalTensor<T> &d, const LocalTensor<T> &a, uint8_t count, const BrcbRepeatParams &p) {
    REQUIRE(count > 0);
    instruction++;
    for (uint64_t r = 0; r < count; r++)
        for (uint64_t i = 0; i < 8; i++)
            for (uint64_t lane = 0; lane < BLOCK_BYTES / sizeof(T); lane++)
                d.set(d.block(r * p.dstRep + i * p.dstBlk) + lane * sizeof(T), a.get(a.block(0) + (r * 8 + i) * sizeof(T)));
}
} // namespace AscendC

extern "C" inline __attribute__((used, visibility("default"))) void set_core(uint32_t index, uint32_t number) {
    AscendC::blockIdx = index;
    AscendC::blockNum = number;
}
