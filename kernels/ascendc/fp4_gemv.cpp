/*
 * y[r] += x[r / rows_per_x] @ W[experts[r]].T for FP4 weights, on the vector cores of an Ascend 910B alone.
 *
 * NEVER COMPILED FOR A DEVICE, NEVER RUN ON ONE. Its calls follow the declarations in Ascend C's public headers. What was executed is this
 * source over the tests' own CPU version of those few instructions (tests/ascend/ascendc_on_cpu), which gives the bits of fp4_gemv.py, a
 * NumPy twin that walks the same tiles in the same order and is tested against float64. Synchronisation and speed are unproven.
 * CMakeLists.txt builds it where CANN is installed.
 *
 * Why it exists: for one or two tokens a cube core would multiply sixteen rows, fifteen of them empty, and every decoded weight would go
 * to it by way of memory, four times the bytes that were read. The vector cores decode and multiply in place.
 *
 * Weight layout, after the published kernels for this chip: a byte holds the codes of columns n = 2 j (low nibble) and 2 j + 1 of one k;
 *   k = 64 K3 + 16 K2 + 8 K1 + K0        j = 128 N3 + 16 N2 + 4 N1 + N0        stored K3, K1, K2, N2, N3, N1, K0, N0, slowest first.
 * A tile of 64 k and 256 n is 64 runs of 128 bytes. Decoded to float32, one repeat of a vector instruction (64 lanes, eight 32-byte blocks)
 * covers 8 k by 8 n of one scale group, so that a single instruction multiplies 32 repeats by their scales: the block of eight scales is
 * read eight times (block stride 0), and scales are walked in the order they are stored. x, one value to a block, is read the same way.
 *
 * Decoding: the hardware widens int4 to fp16 to int16; << 9, & 0x8E00 puts sign, exponent and mantissa where fp16 has them, 2^-14 of the
 * value. The e4m3 scale << 7 is 2^-8 of its value. Both powers of two are in `global_scale`.
 *
 *   x             bf16  [R / rows_per_x, K]
 *   weight        int4  [E, K * N / 2 bytes], as above; K a multiple of 64, N of 256
 *   scale         int8  [E, K / 16, N], the bits of e4m3
 *   global_scale  fp32  [E, N], times 2^22
 *   experts       int32 [R]
 *   y             fp32  [R, N], zeros before the first launch: the parts of a split K are added atomically
 */
#include "kernel_operator.h"

using namespace AscendC;

namespace {
constexpr uint32_t TILE_K = 64;
constexpr uint32_t TILE_N = 256;
constexpr uint32_t GROUP = 16;
constexpr uint32_t GROUPS = TILE_K / GROUP;             // K2
constexpr uint32_t TILE_BYTES = TILE_K * TILE_N / 2;
constexpr uint32_t RUNS = 64;                           // K1, K2, N2
constexpr uint32_t RUN_BYTES = 128;                     // N1, K0, N0
constexpr uint32_t HALF = TILE_K * TILE_N / 2;          // weights of one K1: what is decoded at a time
constexpr uint32_t PER_GROUP = HALF / GROUPS;           // weights of one K1, K2
constexpr uint32_t LANES = 64;                          // float32 of one repeat: K0 by eight n
constexpr uint32_t REPEATS = PER_GROUP / LANES;         // N2, N1
constexpr uint32_t BLOCK = 8;                           // float32 of 32 bytes
constexpr uint32_t LANES_16 = 128;                      // 16-bit values of one repeat
constexpr int16_t CODE_SHIFT = 9;
constexpr uint16_t CODE_MASK = 0x8E00;
constexpr int16_t SCALE_SHIFT = 7;
} // namespace

struct Fp4GemvTiling {
    uint32_t rows;
    uint32_t rowsPerX;
    uint32_t k;
    uint32_t n;
    uint32_t splits;  // parts of K, each a multiple of TILE_K; parts of one row are added atomically
};

class Fp4Gemv {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR weight, GM_ADDR scale, GM_ADDR globalScale, GM_ADDR experts, GM_ADDR y,
                                const Fp4GemvTiling &tiling)
    {
        t = tiling;
        columnTiles = t.n / TILE_N;
        xGm.SetGlobalBuffer((__gm__ bfloat16_t *)x);
        weightGm.SetGlobalBuffer((__gm__ int8_t *)weight);
        scaleGm.SetGlobalBuffer((__gm__ int8_t *)scale);
        globalScaleGm.SetGlobalBuffer((__gm__ float *)globalScale);
        expertsGm.SetGlobalBuffer((__gm__ int32_t *)experts);
        yGm.SetGlobalBuffer((__gm__ float *)y);

        pipe.InitBuffer(weightQueue, 2, TILE_BYTES);
        pipe.InitBuffer(scaleQueue, 2, GROUPS * TILE_N);
        pipe.InitBuffer(xQueue, 2, TILE_K * sizeof(bfloat16_t));
        pipe.InitBuffer(globalScaleQueue, 1, TILE_N * sizeof(float));
        pipe.InitBuffer(yQueue, 1, TILE_N * sizeof(float));
        pipe.InitBuffer(halfBuffer, HALF * sizeof(half));
        pipe.InitBuffer(bitsBuffer, HALF * sizeof(int16_t));
        pipe.InitBuffer(valueBuffer, HALF * sizeof(float));
        pipe.InitBuffer(scaleBuffer, GROUPS * TILE_N * sizeof(float));
        pipe.InitBuffer(xBuffer, TILE_K * sizeof(float));
        pipe.InitBuffer(xBlockBuffer, TILE_K * BLOCK * sizeof(float));
        pipe.InitBuffer(accBuffer, PER_GROUP * sizeof(float));
        pipe.InitBuffer(maskBuffer, LANES_16 * sizeof(uint16_t));
        Duplicate(maskBuffer.Get<uint16_t>(), CODE_MASK, LANES_16);
    }

    /* Items are dealt to the cores in turn: a row, a column tile, a part of K. */
    __aicore__ inline void Process()
    {
        const uint32_t items = t.rows * columnTiles * t.splits;
        for (uint32_t item = GetBlockIdx(); item < items; item += GetBlockNum()) {
            const uint32_t row = item / (columnTiles * t.splits);
            const uint32_t n3 = item / t.splits % columnTiles;
            const uint32_t tilesPerSplit = t.k / TILE_K / t.splits;
            const uint32_t firstK3 = item % t.splits * tilesPerSplit;
            const uint64_t expert = expertsGm.GetValue(row);
            Duplicate(accBuffer.Get<float>(), 0.0f, PER_GROUP);
            for (uint32_t k3 = firstK3; k3 < firstK3 + tilesPerSplit; k3++) {
                CopyIn(row, expert, k3, n3);
                Accumulate();
            }
            Finish(row, expert, n3);
        }
    }

private:
    __aicore__ inline void CopyIn(uint32_t row, uint64_t expert, uint32_t k3, uint32_t n3)
    {
        LocalTensor<int8_t> weight = weightQueue.AllocTensor<int8_t>();
        const uint64_t tile = expert * t.k * (t.n / 2) + (static_cast<uint64_t>(k3) * RUNS * columnTiles + n3) * RUN_BYTES;
        const uint16_t burst = RUN_BYTES / 32;
        DataCopy(weight, weightGm[tile], DataCopyParams(RUNS, burst, static_cast<uint16_t>((columnTiles - 1) * burst), 0));
        weightQueue.EnQue(weight);

        LocalTensor<int8_t> scale = scaleQueue.AllocTensor<int8_t>();
        const uint64_t group = (expert * (t.k / GROUP) + k3 * GROUPS) * t.n + n3 * TILE_N;
        DataCopy(scale, scaleGm[group], DataCopyParams(GROUPS, TILE_N / 32, static_cast<uint16_t>((t.n - TILE_N) / 32), 0));
        scaleQueue.EnQue(scale);

        LocalTensor<bfloat16_t> x = xQueue.AllocTensor<bfloat16_t>();
        DataCopy(x, xGm[static_cast<uint64_t>(row / t.rowsPerX) * t.k + k3 * TILE_K], TILE_K);
        xQueue.EnQue(x);
    }

    __aicore__ inline void Accumulate()
    {
        DecodeScales();
        SpreadX();
        LocalTensor<int8_t> weight = weightQueue.DeQue<int8_t>();
        for (uint32_t k1 = 0; k1 < 2; k1++) {
            DecodeWeights(weight[k1 * HALF / 2].ReinterpretCast<int4b_t>());
            MultiplyAdd(k1);
        }
        weightQueue.FreeTensor(weight);
    }

    /* [K2][n] float32. */
    __aicore__ inline void DecodeScales()
    {
        LocalTensor<int8_t> scale = scaleQueue.DeQue<int8_t>();
        LocalTensor<half> wide = halfBuffer.Get<half>();
        LocalTensor<int16_t> bits = bitsBuffer.Get<int16_t>();
        const uint32_t count = GROUPS * TILE_N;
        Cast(wide, scale, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        Cast(bits, wide, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        ShiftLeft(bits, bits, SCALE_SHIFT, count);
        PipeBarrier<PIPE_V>();
        Cast(scaleBuffer.Get<float>(), bits.ReinterpretCast<half>(), RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        scaleQueue.FreeTensor(scale);
    }

    /* [k][8]: each value of x fills a block. */
    __aicore__ inline void SpreadX()
    {
        LocalTensor<bfloat16_t> x = xQueue.DeQue<bfloat16_t>();
        Cast(xBuffer.Get<float>(), x, RoundMode::CAST_NONE, TILE_K);
        PipeBarrier<PIPE_V>();
        Brcb(xBlockBuffer.Get<float>(), xBuffer.Get<float>(), TILE_K / BLOCK, BrcbRepeatParams(1, BLOCK));
        PipeBarrier<PIPE_V>();
        xQueue.FreeTensor(x);
    }

    /* The codes of one K1, in the order they are stored, to float32: K2, N2, N1, K0, n. */
    __aicore__ inline void DecodeWeights(const LocalTensor<int4b_t> &codes)
    {
        LocalTensor<half> wide = halfBuffer.Get<half>();
        LocalTensor<int16_t> bits = bitsBuffer.Get<int16_t>();
        LocalTensor<uint16_t> unsignedBits = bits.ReinterpretCast<uint16_t>();
        Cast(wide, codes, RoundMode::CAST_NONE, HALF);
        PipeBarrier<PIPE_V>();
        Cast(bits, wide, RoundMode::CAST_RINT, HALF);
        PipeBarrier<PIPE_V>();
        ShiftLeft(bits, bits, CODE_SHIFT, HALF);
        PipeBarrier<PIPE_V>();
        And(unsignedBits, unsignedBits, maskBuffer.Get<uint16_t>(), static_cast<uint64_t>(LANES_16), HALF / LANES_16,
            BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        PipeBarrier<PIPE_V>();
        Cast(valueBuffer.Get<float>(), bits.ReinterpretCast<half>(), RoundMode::CAST_NONE, HALF);
        PipeBarrier<PIPE_V>();
    }

    /* acc[N2, N1][K0, n] += value * scale * x, one instruction for each of the four scale groups. */
    __aicore__ inline void MultiplyAdd(uint32_t k1)
    {
        const uint64_t lanes = LANES;
        for (uint32_t k2 = 0; k2 < GROUPS; k2++) {
            LocalTensor<float> value = valueBuffer.Get<float>()[k2 * PER_GROUP];
            Mul(value, value, scaleBuffer.Get<float>()[k2 * TILE_N], lanes, REPEATS, BinaryRepeatParams(1, 1, 0, 8, 8, 1));
            PipeBarrier<PIPE_V>();
            MulAddDst(accBuffer.Get<float>(), value, xBlockBuffer.Get<float>()[(k2 * GROUP + k1 * BLOCK) * BLOCK], lanes, REPEATS,
                      BinaryRepeatParams(1, 1, 1, 8, 8, 0));
            PipeBarrier<PIPE_V>();
        }
    }

    /* Add the eight k of every repeat as a tree, multiply by the global scale, add to y. */
    __aicore__ inline void Finish(uint32_t row, uint64_t expert, uint32_t n3)
    {
        LocalTensor<float> global = globalScaleQueue.AllocTensor<float>();
        DataCopy(global, globalScaleGm[expert * t.n + n3 * TILE_N], TILE_N);
        globalScaleQueue.EnQue(global);
        global = globalScaleQueue.DeQue<float>();

        LocalTensor<float> acc = accBuffer.Get<float>();
        LocalTensor<float> sum = valueBuffer.Get<float>();
        LocalTensor<float> y = yQueue.AllocTensor<float>();
        Add(sum, acc, acc[4 * BLOCK], static_cast<uint64_t>(4 * BLOCK), REPEATS, BinaryRepeatParams(1, 1, 1, 4, 8, 8));
        PipeBarrier<PIPE_V>();
        Add(acc, sum, sum[2 * BLOCK], static_cast<uint64_t>(2 * BLOCK), REPEATS, BinaryRepeatParams(1, 1, 1, 2, 4, 4));
        PipeBarrier<PIPE_V>();
        Add(y, acc, acc[BLOCK], static_cast<uint64_t>(BLOCK), REPEATS, BinaryRepeatParams(1, 1, 1, 1, 2, 2));
        PipeBarrier<PIPE_V>();
        Mul(y, y, global, TILE_N);
        globalScaleQueue.FreeTensor(global);
        yQueue.EnQue(y);

        y = yQueue.DeQue<float>();
        SetAtomicAdd<float>();
        DataCopy(yGm[static_cast<uint64_t>(row) * t.n + n3 * TILE_N], y, TILE_N);
        SetAtomicNone();
        yQueue.FreeTensor(y);
    }

    TPipe pipe;
    TQue<TPosition::VECIN, 2> weightQueue, scaleQueue, xQueue;
    TQue<TPosition::VECIN, 1> globalScaleQueue;
    TQue<TPosition::VECOUT, 1> yQueue;
    TBuf<TPosition::VECCALC> halfBuffer, bitsBuffer, valueBuffer, scaleBuffer, xBuffer, xBlockBuffer, accBuffer, maskBuffer;
    GlobalTensor<bfloat16_t> xGm;
    GlobalTensor<int8_t> weightGm, scaleGm;
    GlobalTensor<float> globalScaleGm, yGm;
    GlobalTensor<int32_t> expertsGm;
    Fp4GemvTiling t;
    uint32_t columnTiles;
};

extern "C" __global__ __aicore__ void fp4_gemv(GM_ADDR x, GM_ADDR weight, GM_ADDR scale, GM_ADDR globalScale, GM_ADDR experts, GM_ADDR y,
                                               uint32_t rows, uint32_t rowsPerX, uint32_t k, uint32_t n, uint32_t splits)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
    Fp4Gemv kernel;
    kernel.Init(x, weight, scale, globalScale, experts, y, Fp4GemvTiling{rows, rowsPerX, k, n, splits});
    kernel.Process();
}
