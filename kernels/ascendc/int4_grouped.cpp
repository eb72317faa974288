/*
 * y[r] = x[r] @ W[expert of r].T for int4 weights with a scale and a zero point for every 128 k: the two vector cores of an AI core decode
 * tiles to int8 while its cube core multiplies those before.
 *
 * NEVER COMPILED FOR A DEVICE, NEVER RUN ON ONE. Its calls follow the declarations in Ascend C's public headers. What was executed is this
 * source over the tests' own CPU version of those instructions (tests/ascend/ascendc_on_cpu), cube, flags and all, which gives the bits of
 * int4_grouped.py, a NumPy twin. Synchronisation was executed with every core as a coroutine, in four orders. Speed is unproven.
 *
 * A vector core of a 910B reaches the cube by memory alone, that is by the L2: of a decoded weight every byte is written and read there. So
 * weights go as int8, half of what 16 bits would take, and activations are two int8 digits of their group's largest value:
 *   x = s (d1 + d0 / 128), s = max|x| / 127 over 128 k: at most 3.1e-5 of the group's largest off.
 * Digits times codes are added exactly, in int32. A group's sum comes back to the vector cores, which take off the zero point and multiply
 * by both scales: y += (t1 + t0 / 128 - 16 zero X) (s / 16) scale, X the sum of the group's digits; codes come 16 fold, in the high nibble.
 *
 * Phases: all vector cores make digits, s / 16 and X of rows; SyncAll; then items of at most eight rows of an expert by 256 n, a group of
 * 128 k a step. Digits d1 are the upper eight rows of a fractal, d0 the lower. Slots between the cores are FULL when both vector cores have
 * written, FREE when the cube core has read; sums are DONE and TAKEN. Who waits for FREE and TAKEN finds them set at the beginning, and
 * takes what is left of them at the end, so that the next kernel finds none. Vector cores are LAG groups ahead of the sums they take.
 *
 * A vector core decodes 128 of the 256 n: 8 KB in one run, the groups of a column tile one after the other. A byte is that of
 *   k = 32 K1 + K0, K1 of 0 and 1 in high nibbles, of 2 and 3 in low ones        n = 256 N3 + 128 half + 16 N1 + N0
 * at K1, N1, N0, K0, slowest first: both nibbles decode to fractals of 32 k by 16 n as the cube reads them. Codes are two's complement.
 * Weights and their scales pass by the L2, which is for slots, sums and digits.
 *
 *   x           bf16  [R, K], sorted by expert; K a multiple of 128 up to 8192
 *   weight      int4  [E, N / 256, K / 128, 2, 8192 bytes], as above
 *   parameters  fp16  [E, N / 256, K / 128, 2, 2, 128]: 16 times the zero points, and the scales
 *   group_list  int64 [E], where each expert's rows end
 *   digits      int8  [R, 2, K], factors fp32 [R, 2, K / 128, 8]: anything
 *   slots       int8  [cores, 4, 32768], sums int32 [cores, 2, 16, 256]: anything
 *   y           bf16  [R, N]
 */
#include "kernel_operator.h"

#include "row_blocks.h"

using namespace AscendC;

namespace {
constexpr uint32_t GROUP = 128;
constexpr uint32_t TILE_N = 256;
constexpr uint32_t HALF_N = TILE_N / 2;
constexpr uint32_t PACKED = GROUP * HALF_N / 2;         // bytes of a vector core's share of a group
constexpr uint32_t WORDS = PACKED / 2;                  // 16 bits each
constexpr uint32_t SLOT = GROUP * TILE_N;               // bytes
constexpr uint32_t RUN = 4096;                          // 32 k by HALF_N: of a slot, contiguous
constexpr uint32_t MAX_ROWS = 8;
constexpr uint32_t FRACTAL_ROWS = 16;
constexpr uint32_t SUMS = FRACTAL_ROWS * TILE_N;
constexpr uint32_t SLOTS = 4;
constexpr uint32_t SUM_SLOTS = 2;
constexpr uint32_t LAG = 2;
constexpr uint32_t CHUNK = 2048;                        // values whose digits are made at a time
constexpr uint32_t CHUNK_GROUPS = CHUNK / GROUP;
constexpr uint16_t NIBBLES = 0xF0F0;
constexpr float LEAST = 1e-30f;
constexpr float RADIX = 128.0f;
constexpr uint16_t FULL = 0, FREE = 4, DONE = 8, TAKEN = 15;  // 11 to 14 are SyncAll's; TAKEN and TAKEN - 5
constexpr uint16_t TAKEN_STEP = 5;
} // namespace

struct Int4GroupedTiling {
    uint32_t rows;
    uint32_t experts;
    uint32_t k;
    uint32_t n;
};

struct Int4Operands {
    GM_ADDR x;
    GM_ADDR weight;
    GM_ADDR parameters;
    GM_ADDR groupList;
    GM_ADDR digits;
    GM_ADDR factors;
    GM_ADDR slots;
    GM_ADDR sums;
    GM_ADDR y;
};

/* Digits of rows, on every vector core. */
class Digits {
public:
    __aicore__ inline void Init(TPipe &pipe, const Int4Operands &operands, const Int4GroupedTiling &tiling)
    {
        t = tiling;
        xGm.SetGlobalBuffer((__gm__ bfloat16_t *)operands.x);
        digitsGm.SetGlobalBuffer((__gm__ int8_t *)operands.digits);
        factorsGm.SetGlobalBuffer((__gm__ float *)operands.factors);
        pipe.InitBuffer(xQueue, 1, CHUNK * sizeof(bfloat16_t));
        pipe.InitBuffer(digitQueue, 2, CHUNK);
        pipe.InitBuffer(factorQueue, 2, CHUNK_GROUPS * 8 * sizeof(float));
        pipe.InitBuffer(valueBuffer, CHUNK * sizeof(float));
        pipe.InitBuffer(digitBuffer, CHUNK * sizeof(float));
        pipe.InitBuffer(foldBuffer, CHUNK * sizeof(float));
        pipe.InitBuffer(halfBuffer, CHUNK * sizeof(half));
        pipe.InitBuffer(smallBuffer, CHUNK_GROUPS * 8 * sizeof(float));
        pipe.InitBuffer(wholeBuffer, CHUNK * sizeof(int32_t));
    }

    __aicore__ inline void Process()
    {
        const uint32_t chunks = (t.k + CHUNK - 1) / CHUNK;
        const uint32_t vectors = GetBlockNum() * 2;
        for (uint32_t item = GetBlockIdx(); item < t.rows * chunks; item += vectors) {
            const uint32_t first = item % chunks * CHUNK;
            MakeDigits(item / chunks, first, t.k - first < CHUNK ? t.k - first : CHUNK);
        }
        xQueue.FreeAllEvent();  // the Decoder's buffers take all eight
    }

private:
    __aicore__ inline void MakeDigits(uint32_t row, uint32_t first, uint32_t count)
    {
        const uint8_t groups = static_cast<uint8_t>(count / GROUP);
        LocalTensor<float> value = valueBuffer.Get<float>();
        LocalTensor<float> digit = digitBuffer.Get<float>();
        LocalTensor<float> fold = foldBuffer.Get<float>();
        LocalTensor<bfloat16_t> x = xQueue.AllocTensor<bfloat16_t>();
        DataCopy(x, xGm[static_cast<uint64_t>(row) * t.k + first], count);
        xQueue.EnQue(x);
        x = xQueue.DeQue<bfloat16_t>();
        Cast(value, x, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        xQueue.FreeTensor(x);

        Abs(digit, value, count);
        PipeBarrier<PIPE_V>();
        Max(fold, digit, digit[64], static_cast<uint64_t>(64), groups, BinaryRepeatParams(1, 1, 1, 8, 16, 16));
        PipeBarrier<PIPE_V>();
        BlockReduceMax(digit, fold, groups, 64, 1, 1, 8);
        PipeBarrier<PIPE_V>();
        BlockReduceMax(fold, digit, CHUNK_GROUPS / 8, 64, 1, 1, 8);
        PipeBarrier<PIPE_V>();
        Maxs(fold, fold, LEAST, CHUNK_GROUPS);
        PipeBarrier<PIPE_V>();
        Muls(digit, fold, 1.0f / (127.0f * 16.0f), CHUNK_GROUPS);
        PipeBarrier<PIPE_V>();
        SendFactors(digit, row, 0, first, groups);

        Duplicate(digit, 127.0f, CHUNK_GROUPS);
        PipeBarrier<PIPE_V>();
        Div(digit, digit, fold, CHUNK_GROUPS);
        PipeBarrier<PIPE_V>();
        LocalTensor<float> inverse = smallBuffer.Get<float>();
        Brcb(inverse, digit, CHUNK_GROUPS / 8, BrcbRepeatParams(1, 8));
        PipeBarrier<PIPE_V>();
        for (uint32_t side = 0; side < 2; side++) {
            Mul(value[side * 64], value[side * 64], inverse, static_cast<uint64_t>(64), groups, BinaryRepeatParams(1, 1, 0, 16, 16, 1));
        }
        PipeBarrier<PIPE_V>();
        SendDigit(digit, value, row, 0, first, count);
        Sub(value, value, digit, static_cast<int32_t>(count));
        PipeBarrier<PIPE_V>();
        Muls(value, value, RADIX, count);
        PipeBarrier<PIPE_V>();
        SendDigit(fold, value, row, 1, first, count);

        Muls(fold, fold, 1.0f / RADIX, count);
        PipeBarrier<PIPE_V>();
        Add(digit, digit, fold, static_cast<int32_t>(count));
        PipeBarrier<PIPE_V>();
        Add(fold, digit, digit[64], static_cast<uint64_t>(64), groups, BinaryRepeatParams(1, 1, 1, 8, 16, 16));
        PipeBarrier<PIPE_V>();
        BlockReduceSum(digit, fold, groups, 64, 1, 1, 8);
        PipeBarrier<PIPE_V>();
        BlockReduceSum(fold, digit, CHUNK_GROUPS / 8, 64, 1, 1, 8);
        PipeBarrier<PIPE_V>();
        SendFactors(fold, row, 1, first, groups);
    }

    /* A group's factor fills a block. */
    __aicore__ inline void SendFactors(const LocalTensor<float> &factors, uint32_t row, uint32_t kind, uint32_t first, uint32_t groups)
    {
        LocalTensor<float> blocks = factorQueue.AllocTensor<float>();
        Brcb(blocks, factors, CHUNK_GROUPS / 8, BrcbRepeatParams(1, 8));
        PipeBarrier<PIPE_V>();
        factorQueue.EnQue(blocks);
        blocks = factorQueue.DeQue<float>();
        DataCopy(factorsGm[((static_cast<uint64_t>(row) * 2 + kind) * (t.k / GROUP) + first / GROUP) * 8], blocks, groups * 8);
        factorQueue.FreeTensor(blocks);
    }

    /* digit = the nearest whole numbers of value, to memory as int8. */
    __aicore__ inline void SendDigit(const LocalTensor<float> &digit, const LocalTensor<float> &value, uint32_t row, uint32_t which,
                                     uint32_t first, uint32_t count)
    {
        LocalTensor<int32_t> whole = wholeBuffer.Get<int32_t>();
        LocalTensor<half> narrow = halfBuffer.Get<half>();
        LocalTensor<int8_t> out = digitQueue.AllocTensor<int8_t>();
        Cast(whole, value, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Cast(digit, whole, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        Cast(narrow, digit, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Cast(out, narrow, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        digitQueue.EnQue(out);
        out = digitQueue.DeQue<int8_t>();
        DataCopy(digitsGm[(static_cast<uint64_t>(row) * 2 + which) * t.k + first], out, count);
        digitQueue.FreeTensor(out);
    }

    TQue<TPosition::VECIN, 1> xQueue;
    TQue<TPosition::VECOUT, 2> digitQueue, factorQueue;
    TBuf<TPosition::VECCALC> valueBuffer, digitBuffer, foldBuffer, halfBuffer, smallBuffer, wholeBuffer;
    GlobalTensor<bfloat16_t> xGm;
    GlobalTensor<int8_t> digitsGm;
    GlobalTensor<float> factorsGm;
    Int4GroupedTiling t;
};

/* A vector core's side: decode a group's half, and take the sums of one LAG groups before. */
class Decoder {
public:
    __aicore__ inline void Init(TPipe &pipe, const Int4Operands &operands, const Int4GroupedTiling &tiling)
    {
        t = tiling;
        groups = t.k / GROUP;
        side = GetSubBlockIdx();
        pair = GetBlockIdx() / 2;
        groupList = operands.groupList;
        weightGm.SetGlobalBuffer((__gm__ int16_t *)operands.weight);
        weightGm.SetL2CacheHint(CacheMode::CACHE_MODE_DISABLE);
        parametersGm.SetGlobalBuffer((__gm__ half *)operands.parameters);
        parametersGm.SetL2CacheHint(CacheMode::CACHE_MODE_DISABLE);
        factorsGm.SetGlobalBuffer((__gm__ float *)operands.factors);
        slotsGm.SetGlobalBuffer((__gm__ int16_t *)operands.slots);
        sumsGm.SetGlobalBuffer((__gm__ int32_t *)operands.sums);
        yGm.SetGlobalBuffer((__gm__ bfloat16_t *)operands.y);
        pipe.InitBuffer(weightQueue, 2, PACKED);
        pipe.InitBuffer(parameterQueue, 2, 2 * HALF_N * sizeof(half));
        pipe.InitBuffer(factorQueue, 2, MAX_ROWS * groups * 8 * sizeof(float));
        pipe.InitBuffer(sumQueue, 2, 2 * MAX_ROWS * HALF_N * sizeof(int32_t));
        pipe.InitBuffer(slotQueue, 2, 2 * PACKED);
        pipe.InitBuffer(yQueue, 1, MAX_ROWS * HALF_N * sizeof(bfloat16_t));
        pipe.InitBuffer(maskBuffer, 128 * sizeof(uint16_t));
        pipe.InitBuffer(parameterBuffer, 2 * HALF_N * sizeof(float));
        pipe.InitBuffer(sumBuffer, 2 * MAX_ROWS * HALF_N * sizeof(float));
        pipe.InitBuffer(zeroBuffer, MAX_ROWS * HALF_N * sizeof(float));
        pipe.InitBuffer(accBuffer, MAX_ROWS * HALF_N * sizeof(float));
        Duplicate(maskBuffer.Get<uint16_t>(), NIBBLES, 128);
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Process()
    {
        for (uint32_t slot = 0; slot < SUM_SLOTS; slot++) {
            CrossCoreSetFlag<2, PIPE_MTE2>(TAKEN - slot * TAKEN_STEP);
        }
        RowBlocks items;
        items.Begin(groupList, t.experts, MAX_ROWS, t.n / TILE_N, pair, GetBlockNum());
        while (items.Next()) {
            Compute(items);
        }
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            CrossCoreWaitFlag(FREE + slot);
        }
    }

private:
    __aicore__ inline void Compute(const RowBlocks &item)
    {
        LocalTensor<float> scales = CopyFactors(item, 0);
        LocalTensor<float> digitSums = CopyFactors(item, 1);
        Duplicate(accBuffer.Get<float>(), 0.0f, item.rows * HALF_N);  // read after the barriers of Decode
        for (uint32_t step = 0; step < groups + LAG; step++) {
            if (step < groups) {
                Decode(item, step);
            }
            if (step >= LAG) {
                AddSums(item, step - LAG, scales, digitSums);
            }
        }
        factorQueue.FreeTensor(scales);
        factorQueue.FreeTensor(digitSums);
        Finish(item);
    }

    /* [row][group][8] */
    __aicore__ inline LocalTensor<float> CopyFactors(const RowBlocks &item, uint32_t kind)
    {
        LocalTensor<float> factors = factorQueue.AllocTensor<float>();
        DataCopy(factors, factorsGm[(static_cast<uint64_t>(item.firstRow) * 2 + kind) * groups * 8],
                 DataCopyParams(static_cast<uint16_t>(item.rows), static_cast<uint16_t>(groups), static_cast<uint16_t>(groups), 0));
        factorQueue.EnQue(factors);
        return factorQueue.DeQue<float>();
    }

    __aicore__ inline uint64_t Share(const RowBlocks &item, uint32_t group) const
    {
        return ((static_cast<uint64_t>(item.expert) * (t.n / TILE_N) + item.part) * groups + group) * 2 + side;
    }

    __aicore__ inline void Decode(const RowBlocks &item, uint32_t group)
    {
        LocalTensor<int16_t> packed = weightQueue.AllocTensor<int16_t>();
        DataCopy(packed, weightGm[Share(item, group) * WORDS], WORDS);
        weightQueue.EnQue(packed);
        packed = weightQueue.DeQue<int16_t>();

        LocalTensor<int16_t> out = slotQueue.AllocTensor<int16_t>();
        LocalTensor<uint16_t> high = out.ReinterpretCast<uint16_t>();
        LocalTensor<uint16_t> low = out[WORDS].ReinterpretCast<uint16_t>();
        const BinaryRepeatParams masked(1, 1, 1, 8, 8, 0);
        And(high, packed.ReinterpretCast<uint16_t>(), maskBuffer.Get<uint16_t>(), static_cast<uint64_t>(128), WORDS / 128, masked);
        ShiftLeft(out[WORDS], packed, static_cast<int16_t>(4), WORDS);
        PipeBarrier<PIPE_V>();
        And(low, low, maskBuffer.Get<uint16_t>(), static_cast<uint64_t>(128), WORDS / 128, masked);
        PipeBarrier<PIPE_V>();
        weightQueue.FreeTensor(packed);
        slotQueue.EnQue(out);
        out = slotQueue.DeQue<int16_t>();

        const uint32_t slot = written % SLOTS;
        CrossCoreWaitFlag(FREE + slot);
        const uint16_t burst = RUN / 32;
        DataCopy(slotsGm[(static_cast<uint64_t>(pair) * SLOTS + slot) * (SLOT / 2) + side * (RUN / 2)], out,
                 DataCopyParams(GROUP / 32, burst, 0, burst));
        slotQueue.FreeTensor(out);
        CrossCoreSetFlag<2, PIPE_MTE3>(FULL + slot);
        written++;
    }

    /* acc += (t1 + t0 / 128 - 16 zero X) (s / 16) scale */
    __aicore__ inline void AddSums(const RowBlocks &item, uint32_t group, const LocalTensor<float> &scales,
                                   const LocalTensor<float> &digitSums)
    {
        LocalTensor<float> sum = CopySums(item.rows);
        LocalTensor<float> parameter = CopyParameters(item, group);
        LocalTensor<float> zero = zeroBuffer.Get<float>();
        LocalTensor<float> acc = accBuffer.Get<float>();
        const uint8_t rows = static_cast<uint8_t>(item.rows);
        const uint8_t rowBlocks = HALF_N / 8;
        const uint8_t factorBlocks = static_cast<uint8_t>(groups);
        const uint64_t lanes = 64;
        for (uint32_t c = 0; c < HALF_N; c += 64) {
            Mul(zero[c], parameter[c], digitSums[group * 8], lanes, rows, BinaryRepeatParams(1, 1, 0, rowBlocks, 0, factorBlocks));
        }
        PipeBarrier<PIPE_V>();
        Sub(sum, sum, zero, static_cast<int32_t>(item.rows * HALF_N));
        PipeBarrier<PIPE_V>();
        for (uint32_t c = 0; c < HALF_N; c += 64) {
            Mul(sum[c], sum[c], scales[group * 8], lanes, rows, BinaryRepeatParams(1, 1, 0, rowBlocks, rowBlocks, factorBlocks));
        }
        PipeBarrier<PIPE_V>();
        for (uint32_t c = 0; c < HALF_N; c += 64) {
            MulAddDst(acc[c], sum[c], parameter[HALF_N + c], lanes, rows, BinaryRepeatParams(1, 1, 1, rowBlocks, rowBlocks, 0));
        }
        PipeBarrier<PIPE_V>();
    }

    /* t1 + t0 / 128, [row][HALF_N] */
    __aicore__ inline LocalTensor<float> CopySums(uint32_t rows)
    {
        const uint32_t slot = taken % SUM_SLOTS;
        const uint32_t count = rows * HALF_N;
        LocalTensor<int32_t> arrived = sumQueue.AllocTensor<int32_t>();
        CrossCoreWaitFlag(DONE + slot);
        const uint64_t from = (static_cast<uint64_t>(pair) * SUM_SLOTS + slot) * SUMS + side * HALF_N;
        const uint16_t burst = HALF_N * sizeof(int32_t) / 32;
        const DataCopyParams params(static_cast<uint16_t>(rows), burst, burst, 0);
        DataCopy(arrived, sumsGm[from], params);
        DataCopy(arrived[count], sumsGm[from + MAX_ROWS * TILE_N], params);
        sumQueue.EnQue(arrived);
        CrossCoreSetFlag<2, PIPE_MTE2>(TAKEN - slot * TAKEN_STEP);
        taken++;

        arrived = sumQueue.DeQue<int32_t>();
        LocalTensor<float> sum = sumBuffer.Get<float>();
        Cast(sum, arrived, RoundMode::CAST_NONE, 2 * count);
        PipeBarrier<PIPE_V>();
        sumQueue.FreeTensor(arrived);
        Muls(sum[count], sum[count], 1.0f / RADIX, count);
        PipeBarrier<PIPE_V>();
        Add(sum, sum, sum[count], static_cast<int32_t>(count));
        PipeBarrier<PIPE_V>();
        return sum;
    }

    /* [2][HALF_N]: 16 times the zero points, and the scales. */
    __aicore__ inline LocalTensor<float> CopyParameters(const RowBlocks &item, uint32_t group)
    {
        LocalTensor<half> arrived = parameterQueue.AllocTensor<half>();
        DataCopy(arrived, parametersGm[Share(item, group) * (2 * HALF_N)], 2 * HALF_N);
        parameterQueue.EnQue(arrived);
        arrived = parameterQueue.DeQue<half>();
        LocalTensor<float> parameter = parameterBuffer.Get<float>();
        Cast(parameter, arrived, RoundMode::CAST_NONE, 2 * HALF_N);
        PipeBarrier<PIPE_V>();
        parameterQueue.FreeTensor(arrived);
        return parameter;
    }

    __aicore__ inline void Finish(const RowBlocks &item)
    {
        LocalTensor<bfloat16_t> y = yQueue.AllocTensor<bfloat16_t>();
        Cast(y, accBuffer.Get<float>(), RoundMode::CAST_RINT, item.rows * HALF_N);
        PipeBarrier<PIPE_V>();
        yQueue.EnQue(y);
        y = yQueue.DeQue<bfloat16_t>();
        const uint16_t burst = HALF_N * sizeof(bfloat16_t) / 32;
        DataCopy(yGm[static_cast<uint64_t>(item.firstRow) * t.n + item.part * TILE_N + side * HALF_N], y,
                 DataCopyParams(static_cast<uint16_t>(item.rows), burst, 0, static_cast<uint16_t>(t.n * sizeof(bfloat16_t) / 32 - burst)));
        yQueue.FreeTensor(y);
    }

    TQue<TPosition::VECIN, 2> weightQueue, parameterQueue, factorQueue, sumQueue;
    TQue<TPosition::VECOUT, 2> slotQueue;
    TQue<TPosition::VECOUT, 1> yQueue;
    TBuf<TPosition::VECCALC> maskBuffer, parameterBuffer, sumBuffer, zeroBuffer, accBuffer;
    GlobalTensor<int16_t> weightGm, slotsGm;
    GlobalTensor<half> parametersGm;
    GlobalTensor<float> factorsGm;
    GlobalTensor<int32_t> sumsGm;
    GlobalTensor<bfloat16_t> yGm;
    GM_ADDR groupList;
    Int4GroupedTiling t;
    uint32_t groups, side, pair;
    uint32_t written = 0, taken = 0;
};

/* The cube core's side. */
class Multiplier {
public:
    __aicore__ inline void Init(TPipe &pipe, const Int4Operands &operands, const Int4GroupedTiling &tiling)
    {
        t = tiling;
        groups = t.k / GROUP;
        groupList = operands.groupList;
        digitsGm.SetGlobalBuffer((__gm__ int8_t *)operands.digits);
        slotsGm.SetGlobalBuffer((__gm__ int8_t *)operands.slots);
        sumsGm.SetGlobalBuffer((__gm__ int32_t *)operands.sums);
        pipe.InitBuffer(digitQueue, 1, FRACTAL_ROWS * t.k);
        pipe.InitBuffer(slotQueue, 2, SLOT);
        pipe.InitBuffer(leftQueue, 2, FRACTAL_ROWS * GROUP);
        pipe.InitBuffer(rightQueue, 2, SLOT);
        pipe.InitBuffer(sumQueue, 2, SUMS * sizeof(int32_t));
    }

    __aicore__ inline void Process()
    {
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            CrossCoreSetFlag<2, PIPE_MTE2>(FREE + slot);
        }
        RowBlocks items;
        items.Begin(groupList, t.experts, MAX_ROWS, t.n / TILE_N, GetBlockIdx(), GetBlockNum());
        while (items.Next()) {
            LocalTensor<int8_t> digits = CopyDigits(items);
            for (uint32_t group = 0; group < groups; group++) {
                Load(digits, group);
                Multiply(items.rows);
            }
            digitQueue.FreeTensor(digits);
        }
        for (uint32_t slot = 0; slot < SUM_SLOTS; slot++) {
            CrossCoreWaitFlag(TAKEN - slot * TAKEN_STEP);
        }
    }

private:
    /* [K / 32][16][32]: digits d1 of the rows, and d0 eight rows below. */
    __aicore__ inline LocalTensor<int8_t> CopyDigits(const RowBlocks &item)
    {
        LocalTensor<int8_t> digits = digitQueue.AllocTensor<int8_t>();
        for (uint32_t which = 0; which < 2; which++) {
            const Nd2NzParams rows{1, static_cast<uint16_t>(item.rows), static_cast<uint16_t>(t.k), 0, static_cast<uint16_t>(2 * t.k),
                                   FRACTAL_ROWS, 1, 0};
            DataCopy(digits[which * MAX_ROWS * 32], digitsGm[(static_cast<uint64_t>(item.firstRow) * 2 + which) * t.k], rows);
        }
        digitQueue.EnQue(digits);
        return digitQueue.DeQue<int8_t>();
    }

    __aicore__ inline void Load(const LocalTensor<int8_t> &digits, uint32_t group)
    {
        const uint32_t slot = read % SLOTS;
        LocalTensor<int8_t> tile = slotQueue.AllocTensor<int8_t>();
        CrossCoreWaitFlag(FULL + slot);
        DataCopy(tile, slotsGm[(static_cast<uint64_t>(GetBlockIdx()) * SLOTS + slot) * SLOT], SLOT);
        slotQueue.EnQue(tile);
        CrossCoreSetFlag<2, PIPE_MTE2>(FREE + slot);
        read++;

        LocalTensor<int8_t> left = leftQueue.AllocTensor<int8_t>();
        LoadData(left, digits, LoadData2DParams{static_cast<uint16_t>(group * (GROUP / 32)), GROUP / 32, 1, 0, 0, false, 0});
        leftQueue.EnQue(left);
        tile = slotQueue.DeQue<int8_t>();
        LocalTensor<int8_t> right = rightQueue.AllocTensor<int8_t>();
        LoadData(right, tile, LoadData2DParams{0, SLOT / 512, 1, 0, 0, false, 0});
        rightQueue.EnQue(right);
        slotQueue.FreeTensor(tile);
    }

    __aicore__ inline void Multiply(uint32_t rows)
    {
        LocalTensor<int8_t> left = leftQueue.DeQue<int8_t>();
        LocalTensor<int8_t> right = rightQueue.DeQue<int8_t>();
        LocalTensor<int32_t> sum = sumQueue.AllocTensor<int32_t>();
        MmadParams product;
        product.m = FRACTAL_ROWS;
        product.n = TILE_N;
        product.k = GROUP;
        product.cmatrixInitVal = true;
        Mmad(sum, left, right, product);
        leftQueue.FreeTensor(left);
        rightQueue.FreeTensor(right);
        sumQueue.EnQue(sum);
        sum = sumQueue.DeQue<int32_t>();

        const uint32_t slot = done % SUM_SLOTS;
        CrossCoreWaitFlag(TAKEN - slot * TAKEN_STEP);
        FixpipeParamsV220 out;
        out.nSize = TILE_N;
        out.mSize = static_cast<uint16_t>(rows);
        out.srcStride = FRACTAL_ROWS;
        out.dstStride = TILE_N;
        const uint64_t to = (static_cast<uint64_t>(GetBlockIdx()) * SUM_SLOTS + slot) * SUMS;
        Fixpipe(sumsGm[to], sum, out);
        Fixpipe(sumsGm[to + MAX_ROWS * TILE_N], sum[MAX_ROWS * 16], out);
        sumQueue.FreeTensor(sum);
        CrossCoreSetFlag<2, PIPE_FIX>(DONE + slot);
        done++;
    }

    TQue<TPosition::A1, 1> digitQueue;
    TQue<TPosition::B1, 2> slotQueue;
    TQue<TPosition::A2, 2> leftQueue;
    TQue<TPosition::B2, 2> rightQueue;
    TQue<TPosition::CO1, 2> sumQueue;
    GlobalTensor<int8_t> digitsGm, slotsGm;
    GlobalTensor<int32_t> sumsGm;
    GM_ADDR groupList;
    Int4GroupedTiling t;
    uint32_t groups;
    uint32_t read = 0, done = 0;
};

extern "C" __schedmode__(1) __global__ __aicore__ void int4_grouped(GM_ADDR x, GM_ADDR weight, GM_ADDR parameters, GM_ADDR groupList,
                                                                     GM_ADDR digits, GM_ADDR factors, GM_ADDR slots, GM_ADDR sums, GM_ADDR y,
                                                                     uint32_t rows, uint32_t experts, uint32_t k, uint32_t n)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
    const Int4Operands operands{x, weight, parameters, groupList, digits, factors, slots, sums, y};
    const Int4GroupedTiling tiling{rows, experts, k, n};
    if ASCEND_IS_AIV {
        TPipe pipe;
        Digits maker;
        maker.Init(pipe, operands, tiling);
        maker.Process();
        SyncAll<false>();
        Decoder decoder;
        decoder.Init(pipe, operands, tiling);
        decoder.Process();
    }
    if ASCEND_IS_AIC {
        TPipe pipe;
        SyncAll<false>();
        Multiplier multiplier;
        multiplier.Init(pipe, operands, tiling);
        multiplier.Process();
    }
}
