/*
 * The cores of a launch as coroutines: what each may count on of the others, and what it did.
 *
 * A core runs until it waits; vector cores, cube cores or both, as `yielding` says, until they set a flag, too. So either side may be as far
 * ahead of the other as flags let it. What a core sends to memory is there for others when a flag of that
 * pipe is set, at SyncAll and at the end; what it reads is read when the buffer is dequeued, or when a flag of its pipe is set. So a flag
 * that is set too early, or not waited for, lets a core read what is not there yet, or what was overwritten. A count that is left over, a
 * core that waits for ever and a flag that SyncAll needs end the program.
 */
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define REQUIRE(condition) do { if (!(condition)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); abort(); } } while (0)

/* A kernel's task type decides which cores it is launched on, and whether they can wait for each other. */
enum TaskType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0, KERNEL_TYPE_MIX_AIC_1_0, KERNEL_TYPE_MIX_AIC_1_1,
                KERNEL_TYPE_MIX_AIC_1_2 };

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX };

namespace AscendC {
/* What a core asked of its parts: the counts that rates.py turns into cycles. */
struct Counts {
    uint64_t vectorInstructions, vectorRepeats, hbmRead, l2Read, l2Written, l1ToL0, cubeSteps, copies;
};

struct Memory;
struct Core {
    uint32_t index, sub, number;  // as GetBlockIdx, GetSubBlockIdx and GetBlockNum tell
    bool cube;
    uint64_t period = 1, instruction = 0;  // what lies between two barriers; what is being executed
    uint32_t unified = 0, l1 = 0, l0a = 0, l0b = 0, l0c = 0;  // bytes taken
    uint32_t events[5][2] = {};  // ids taken of a pair of pipes, by the queue's position (memory.h), there and back
    bool atomicAdd = false, done = false;
    TaskType task = KERNEL_TYPE_AIV_ONLY;  // what a compiler takes where a kernel says nothing
    int flags[16] = {};
    int set[16] = {};  // by this one, not yet by its partners
    uint64_t meetings = 0;
    std::vector<std::pair<pipe_t, std::function<void()>>> outgoing;
    std::vector<Memory *> incoming;
    Counts counts = {};
    ucontext_t context;
    std::vector<uint8_t> stack;
};

inline std::vector<std::unique_ptr<Core>> cores;
inline Core *core = nullptr;
inline ucontext_t scheduler;
inline bool meets = false, batched = false;
inline uint32_t yielding = 0;  // bit 0: vector cores; bit 1: cube cores
inline uint64_t progress = 0;
inline std::function<void()> body;

inline bool isCube() { return core->cube; }
inline uint32_t GetBlockIdx() { return core->index; }
inline uint32_t GetSubBlockIdx() { return core->sub; }
inline uint32_t GetBlockNum() { return core->number; }
inline void setTaskType(TaskType type) {
    bool cubes = false;
    for (auto &other : cores) cubes |= other->cube;
    REQUIRE((type == KERNEL_TYPE_MIX_AIC_1_2) == cubes && "other cores than those it is launched on");
    core->task = type;
}
template <pipe_t pipe> void PipeBarrier() { REQUIRE(pipe == PIPE_V && !core->cube); core->period++; }
template <typename T> void SetAtomicAdd() { core->atomicAdd = true; }
inline void SetAtomicNone() { core->atomicAdd = false; }

inline void yield() { swapcontext(&core->context, &scheduler); }
inline void land(pipe_t pipe, bool all = false) {
    for (auto it = core->outgoing.begin(); it != core->outgoing.end();)
        if (all || it->first == pipe) { it->second(); it = core->outgoing.erase(it); } else ++it;
}
void landIncoming();

/* Both vector cores tell the cube core; the cube core tells both. */
template <uint8_t mode, pipe_t pipe> void CrossCoreSetFlag(uint16_t flag) {
    REQUIRE(core->task == KERNEL_TYPE_MIX_AIC_1_2 && "mode 2 is between a cube core and its two");
    REQUIRE(mode == 2 && flag < 16 && !(meets && flag >= 11 && flag <= 14));
    REQUIRE(pipe == PIPE_MTE2 || (core->cube ? pipe == PIPE_FIX : pipe == PIPE_MTE3));
    land(pipe);
    if (pipe == PIPE_MTE2) landIncoming();
    core->set[flag]++;
    for (auto &other : cores) {
        if (other->cube == core->cube || other->index / (other->cube ? 1 : 2) != core->index / (core->cube ? 1 : 2)) continue;
        if (core->cube) { REQUIRE(++other->flags[flag] < 16); continue; }
        auto &partner = cores[core->index / 2 * 3 + 2 - core->sub];
        if (partner->set[flag] >= core->set[flag]) REQUIRE(++other->flags[flag] < 16);
    }
    progress++;
    if (yielding >> core->cube & 1) yield();
}
template <uint8_t mode = 0, pipe_t pipe = PIPE_S> void CrossCoreWaitFlag(uint16_t flag) {
    while (core->flags[flag] == 0) yield();
    core->flags[flag]--;
    progress++;
}
template <bool vectorsAlone = true> void SyncAll() {
    bool cubes = false;
    for (auto &other : cores) cubes |= other->cube;
    REQUIRE(vectorsAlone == !cubes);
    REQUIRE(core->task != KERNEL_TYPE_AIV_ONLY && core->task != KERNEL_TYPE_AIC_ONLY && "nothing schedules its flags");
    REQUIRE(batched && "another stream's kernel may hold some of the cores for ever: __schedmode__(1)");
    meets = true;
    land(PIPE_S, true);
    landIncoming();
    core->meetings++;
    progress++;
    for (bool all = false; !all;) {
        all = true;
        for (auto &other : cores) all &= other->meetings >= core->meetings;
        if (!all) yield();
    }
}

inline void enter() {
    body();
    land(PIPE_S, true);
    core->done = true;
    progress++;
    swapcontext(&core->context, &scheduler);
}

/* mixed: each of `number` cores is a cube core with two vector cores; else each is a vector core. batch: as __schedmode__(1) says. */
inline void launch(uint32_t number, bool mixed, bool batch, std::function<void()> kernel) {
    cores.clear();
    batched = batch;
    body = std::move(kernel);
    meets = false;
    for (uint32_t i = 0; i < number; i++)
        for (uint32_t part = 0; part < (mixed ? 3 : 1); part++) {
            auto one = std::make_unique<Core>();
            one->cube = mixed && part == 0;
            one->sub = mixed && part ? part - 1 : 0;
            one->index = one->cube || !mixed ? i : 2 * i + one->sub;
            one->number = number;
            one->stack.resize(1 << 20);
            getcontext(&one->context);
            one->context.uc_stack.ss_sp = one->stack.data();
            one->context.uc_stack.ss_size = one->stack.size();
            one->context.uc_link = &scheduler;
            makecontext(&one->context, enter, 0);
            cores.push_back(std::move(one));
        }
    for (bool left = true; left;) {
        left = false;
        const uint64_t before = progress;
        for (auto &one : cores) {
            if (one->done) continue;
            left = true;
            core = one.get();
            swapcontext(&scheduler, &core->context);
        }
        REQUIRE((!left || progress > before) && "all cores wait");
    }
    for (auto &one : cores)
        for (int flag : one->flags) REQUIRE(flag == 0 && "a flag is left set for the next kernel");
}
} // namespace AscendC
