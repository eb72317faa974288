/* One core, or one cube core with its two, that breaks a rule, and beside each the same that keeps it: `launch` ends the process or not. */
#include <functional>
#include <optional>

#include "harness.h"

using namespace AscendC;

namespace {
GlobalTensor<float> data;

struct Vector {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    TBuf<TPosition::VECCALC> sum;
    Vector() {
        pipe.InitBuffer(in, 1, 256);
        pipe.InitBuffer(out, 1, 256);
        pipe.InitBuffer(sum, 256);
    }
    LocalTensor<float> read(uint32_t at = 0) {
        LocalTensor<float> arrived = in.AllocTensor<float>();
        DataCopy(arrived, data[at], 64);
        in.EnQue(arrived);
        return in.DeQue<float>();
    }
    void write(const LocalTensor<float> &from, uint32_t at, bool barrier = true) {
        LocalTensor<float> to = out.AllocTensor<float>();
        Add(to, from, from, 64);
        if (barrier) PipeBarrier<PIPE_V>();
        Muls(to, to, 1.0f, 64);
        PipeBarrier<PIPE_V>();
        out.EnQue(to);
        to = out.DeQue<float>();
        DataCopy(data[at], to, 64);
        out.FreeTensor(to);
    }
};

void copied(bool good) {
    Vector core;
    LocalTensor<float> arrived = core.in.AllocTensor<float>();
    DataCopy(arrived, data, 64);
    core.in.EnQue(arrived);
    if (good) arrived = core.in.DeQue<float>();
    core.write(arrived, 64);
    if (!good) arrived = core.in.DeQue<float>();
    core.in.FreeTensor(arrived);
}
void freed(bool good) {
    Vector core;
    LocalTensor<float> arrived = core.read();
    if (!good) core.in.FreeTensor(arrived);
    core.write(arrived, 64);
    if (good) core.in.FreeTensor(arrived);
}
void barrier(bool good) {
    Vector core;
    LocalTensor<float> arrived = core.read();
    core.write(arrived, 64, good);
    core.in.FreeTensor(arrived);
}
void atomic(bool good) {
    Vector core;
    LocalTensor<float> arrived = core.read();
    SetAtomicAdd<float>();
    core.write(arrived, 64);
    if (good) SetAtomicNone();
    core.in.FreeTensor(arrived);
}
void returned(bool good) {
    Vector core;
    LocalTensor<float> arrived = core.read();
    if (good) core.in.FreeTensor(arrived);
}
void end(bool good) {
    Vector core;
    LocalTensor<float> arrived = core.read();
    Muls(core.sum.Get<float>()[good ? 0 : 8], arrived, 2.0f, 64);
    core.in.FreeTensor(arrived);
}
void room(bool good) {
    TPipe pipe;
    TBuf<TPosition::VECCALC> all;
    pipe.InitBuffer(all, 192 * 1024 + (good ? 0 : 32));
}
/* The cube core's part only counts; vector cores send to memory and tell. */
void flags(bool good, bool left) {
    if ASCEND_IS_AIV {
        CrossCoreSetFlag<2, PIPE_MTE3>(1);
        if (!left || good) CrossCoreWaitFlag(2);
    } else {
        CrossCoreWaitFlag(1);
        if (left || good) CrossCoreSetFlag<2, PIPE_MTE2>(2);
    }
}
void both(bool good) {
    if ASCEND_IS_AIV {
        if (good || GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(1);
    } else {
        CrossCoreWaitFlag(1);
    }
}
void reserved(bool good) {
    SyncAll<false>();
    if ASCEND_IS_AIV CrossCoreSetFlag<2, PIPE_MTE3>(good ? 10 : 12);
    else CrossCoreWaitFlag(good ? 10 : 12);
}
void everybody(bool good) { if (good || ASCEND_IS_AIV) SyncAll<false>(); }
/* Nine buffers, of which the first is not used again. */
void ids(bool good) {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> first;
    TQue<TPosition::VECIN, 8> others;
    pipe.InitBuffer(first, 1, 256);
    pipe.InitBuffer(others, 8, 256);
    for (uint32_t i = 0; i < 9; i++) {
        auto pass = [](auto &queue) {
            queue.EnQue(queue.template AllocTensor<float>());
            queue.FreeTensor(queue.template DeQue<float>());
        };
        if (i == 0) pass(first);
        else pass(others);
        if (good && i == 0) first.FreeAllEvent();
    }
}

/* type: another than what the kernel needs. batch: whether it is in batch mode all the same. */
struct Rule {
    bool mixed;
    std::function<void(bool)> body;
    std::optional<TaskType> type = {};
    bool batch = true;
};
const std::vector<Rule> rules = {
    {false, copied}, {false, freed}, {false, barrier}, {false, atomic}, {false, returned}, {false, end}, {false, room},
    {true, [](bool good) { flags(good, false); }}, {true, [](bool good) { flags(good, true); }}, {true, both}, {true, reserved},
    {true, everybody}, {false, ids}, {false, [](bool) { SyncAll(); }, KERNEL_TYPE_AIV_ONLY},
    {true, [](bool) { SyncAll<false>(); }, KERNEL_TYPE_MIX_AIC_1_1}, {false, [](bool) { SyncAll(); }, {}, false},
};
} // namespace

EXPORT void launch(uint32_t rule, bool good, uint8_t **p, const uint32_t *) {
    data.SetGlobalBuffer((float *)p[0]);
    const Rule &one = rules[rule];
    const TaskType right = one.mixed ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_MIX_AIV_1_0;
    AscendC::launch(1, one.mixed, good || one.batch, [&] {
        setTaskType(good ? right : one.type.value_or(right));
        one.body(good);
    });
}
/* What was sent is in memory at the end, and not before: a core reads its own old value. */
EXPORT void late(float *values) {
    data.SetGlobalBuffer(values);
    AscendC::launch(1, false, false, [] {
        Vector core;
        LocalTensor<float> arrived = core.read();
        core.write(arrived, 64);
        core.in.FreeTensor(arrived);
        arrived = core.read(64);
        core.write(arrived, 128);
        core.in.FreeTensor(arrived);
    });
}
