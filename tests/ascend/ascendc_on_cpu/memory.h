/* Buffers of a core, queues of them, and tensors over both and over memory. */
#pragma once
#include <cstring>
#include <deque>
#include <type_traits>

#include "cores.h"

using half = _Float16;
struct bfloat16_t {
    uint16_t bits = 0;
    bfloat16_t() = default;
    explicit bfloat16_t(float value) {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        bits = uint16_t((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
    }
    operator float() const { uint32_t wide = uint32_t(bits) << 16; float value; memcpy(&value, &wide, 4); return value; }
};

namespace AscendC {
constexpr uint32_t BLOCK_BYTES = 32;
enum class TPosition { VECIN, VECOUT, VECCALC, A1, B1, A2, B2, CO1 };
enum class State { BUFFER, FREE, ALLOCATED, QUEUED, DEQUEUED };

/* A buffer, and who touched each of its bytes last: the instruction, and the period it belongs to. */
struct Memory {
    struct Touched { uint64_t period = 0, instruction = 0; };
    std::vector<uint8_t> storage;
    uint8_t *base = nullptr;
    uint32_t size = 0;
    State state = State::BUFFER;
    bool event = false;  // taken when it was freed
    TPosition position = TPosition::VECCALC;
    std::vector<Touched> written, read;
    std::vector<std::function<void()>> pending;

    void allocate(uint32_t wanted, TPosition where, State first) {
        REQUIRE(wanted > 0 && wanted % BLOCK_BYTES == 0);
        const bool cubes = where >= TPosition::A1;
        REQUIRE(cubes == core->cube);
        uint32_t &taken = !cubes ? core->unified : where <= TPosition::B1 ? core->l1 : where == TPosition::A2 ? core->l0a
                        : where == TPosition::B2 ? core->l0b : core->l0c;
        taken += wanted;
        REQUIRE(taken <= (!cubes ? 192u : where <= TPosition::B1 ? 512u : where == TPosition::CO1 ? 128u : 64u) * 1024);
        size = wanted, position = where, state = first;
        storage.assign(size + 512, 0xFF);
        base = storage.data() + (512 - uint64_t(storage.data()) % 512) % 512;
        written.resize(size), read.resize(size);
    }
    bool arrives() const { return position != TPosition::VECOUT && position != TPosition::CO1; }
    void spoil() { memset(base, 0xFF, size); }
    void settle() { for (auto &copy : pending) copy(); pending.clear(); }
    bool clashes(const Touched &before) const { return before.period == core->period && before.instruction != core->instruction; }
    const uint8_t *look(uint64_t offset, uint64_t count) {
        REQUIRE(offset + count <= size);
        REQUIRE(state == State::BUFFER || state == (arrives() || core->cube ? State::DEQUEUED : State::ALLOCATED));
        for (uint64_t i = offset; i < offset + count && !core->cube; i++) {
            REQUIRE(!clashes(written[i]) && "read before a barrier");
            read[i] = {core->period, core->instruction};
        }
        return base + offset;
    }
    uint8_t *touch(uint64_t offset, uint64_t count) {
        REQUIRE(offset + count <= size);
        REQUIRE(state == State::BUFFER || (!arrives() && state == State::ALLOCATED));
        for (uint64_t i = offset; i < offset + count && !core->cube; i++) {
            REQUIRE(!clashes(written[i]) && !clashes(read[i]) && "written before a barrier");
            written[i] = {core->period, core->instruction};
        }
        return base + offset;
    }
};
inline void landIncoming() {
    for (Memory *memory : core->incoming) memory->settle();
    core->incoming.clear();
}

template <typename T> struct LocalTensor {
    Memory *memory = nullptr;
    uint64_t start = 0;
    LocalTensor operator[](uint32_t offset) const { return {memory, start + offset * sizeof(T)}; }
    template <typename U> LocalTensor<U> ReinterpretCast() const { return {memory, start}; }
    uint64_t block(uint64_t number) const { REQUIRE(start % BLOCK_BYTES == 0); return start + number * BLOCK_BYTES; }
    T get(uint64_t offset) const { T value; memcpy(&value, memory->look(offset, sizeof(T)), sizeof(T)); return value; }
    void set(uint64_t offset, T value) const { memcpy(memory->touch(offset, sizeof(T)), &value, sizeof(T)); }
    T at(uint64_t i) const { return get(start + i * sizeof(T)); }
    void put(uint64_t i, T value) const { set(start + i * sizeof(T), value); }
};
enum class CacheMode { CACHE_MODE_DISABLE, CACHE_MODE_NORMAL };
template <typename T> struct GlobalTensor {
    T *base = nullptr;
    CacheMode mode = CacheMode::CACHE_MODE_NORMAL;
    void SetGlobalBuffer(T *buffer) { base = buffer; }
    void SetL2CacheHint(CacheMode hint) { mode = hint; }
    GlobalTensor operator[](uint64_t offset) const { return {base + offset, mode}; }
    T GetValue(uint64_t offset) const { return base[offset]; }
    void counts(uint64_t bytes) const {
        (mode == CacheMode::CACHE_MODE_DISABLE ? core->counts.hbmRead : core->counts.l2Read) += bytes;
        core->counts.copies++;
    }
};

template <TPosition position> struct TBuf {
    Memory memory;
    template <typename T> LocalTensor<T> Get() { return {&memory, 0}; }
};
/* Who fills a queue's buffer and who reads it wait for each other by event ids, eight of each pair of pipes and direction. A buffer takes one
 * from EnQue to DeQue, and one from FreeTensor until it is allocated again, or FreeAllEvent. */
constexpr uint32_t EVENT_IDS = 8;
inline uint32_t *eventsOf(TPosition position) {
    return core->events[position == TPosition::VECIN ? 0 : position == TPosition::VECOUT ? 1 : position <= TPosition::B1 ? 2
                        : position == TPosition::CO1 ? 4 : 3];
}
template <TPosition position, int depth> struct TQue {
    std::vector<std::unique_ptr<Memory>> memories;
    std::deque<Memory *> idle, full;
    template <typename T> LocalTensor<T> AllocTensor() {
        REQUIRE(!idle.empty());
        Memory *memory = idle.front();
        idle.pop_front();
        memory->state = State::ALLOCATED;
        release(memory);
        return {memory, 0};
    }
    template <typename T> void EnQue(const LocalTensor<T> &tensor) {
        REQUIRE(tensor.memory->state == State::ALLOCATED);
        tensor.memory->state = State::QUEUED;
        full.push_back(tensor.memory);
        REQUIRE(int(full.size()) <= depth);
        REQUIRE(++eventsOf(position)[0] <= EVENT_IDS && "event ids");
    }
    template <typename T> LocalTensor<T> DeQue() {
        REQUIRE(!full.empty());
        Memory *memory = full.front();
        full.pop_front();
        memory->state = State::DEQUEUED;
        eventsOf(position)[0]--;
        memory->settle();
        return {memory, 0};
    }
    template <typename T> void FreeTensor(const LocalTensor<T> &tensor) {
        REQUIRE(tensor.memory->state == State::DEQUEUED);
        tensor.memory->settle();
        tensor.memory->spoil();
        tensor.memory->state = State::FREE;
        idle.push_back(tensor.memory);
        tensor.memory->event = true;
        REQUIRE(++eventsOf(position)[1] <= EVENT_IDS && "event ids: FreeAllEvent gives them back");
    }
    void FreeAllEvent() { for (auto &memory : memories) release(memory.get()); }
    void release(Memory *memory) {
        eventsOf(position)[1] -= memory->event;
        memory->event = false;
    }
    ~TQue() { REQUIRE(full.empty() && idle.size() == memories.size()); }
};
struct TPipe {
    TPipe() { eventsOf(TPosition::A2)[1] += core->cube ? 3 : 0; }  // the high-level product's own
    ~TPipe() {
        memset(core->events, 0, sizeof(core->events));
        REQUIRE(!core->atomicAdd && "the next kernel finds the atomic mode on");
    }
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
    REQUIRE(memory->arrives() && memory->position != TPosition::A2 && memory->position != TPosition::B2);
    REQUIRE(memory->state == State::ALLOCATED);
    REQUIRE(dst.block(p.blockCount * (p.blockLen + p.dstStride) - p.dstStride) <= memory->size);
    src.counts(p.blockCount * p.blockLen * BLOCK_BYTES);
    core->incoming.push_back(memory);
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
/* The buffer is read when it is freed; memory is written when the core's MTE3 is waited for. */
template <typename T> void DataCopy(const GlobalTensor<T> &dst, const LocalTensor<T> &src, const DataCopyParams &p) {
    Memory *memory = src.memory;
    REQUIRE(memory->position == TPosition::VECOUT && memory->state == State::DEQUEUED);
    REQUIRE(src.block(p.blockCount * (p.blockLen + p.srcStride) - p.srcStride) <= memory->size);
    core->counts.l2Written += p.blockCount * p.blockLen * BLOCK_BYTES;
    core->counts.copies++;
    memory->pending.push_back([=, owner = core, add = core->atomicAdd] {
        const uint64_t run = p.blockLen * BLOCK_BYTES / sizeof(T);
        for (uint64_t i = 0; i < p.blockCount; i++) {
            const T *from = (const T *)(memory->base + src.block(i * (p.blockLen + p.srcStride)));
            T *to = dst.base + i * (p.blockLen + p.dstStride) * BLOCK_BYTES / sizeof(T);
            owner->outgoing.emplace_back(PIPE_MTE3, [=, values = std::vector<T>(from, from + run)] {
                for (uint64_t j = 0; j < run; j++) to[j] = add ? T(float(values[j]) + float(to[j])) : values[j];
            });
        }
    });
}
template <typename T> void DataCopy(const GlobalTensor<T> &dst, const LocalTensor<T> &src, uint32_t count) {
    REQUIRE(count > 0 && count * sizeof(T) % BLOCK_BYTES == 0);
    DataCopy(dst, src, DataCopyParams(1, count * sizeof(T) / BLOCK_BYTES, 0, 0));
}
} // namespace AscendC
