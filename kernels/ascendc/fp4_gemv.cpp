/*
 * y[r] = x[r] @ W[expert of r].T for FP4 weights, on the vector cores of an Ascend 910B alone.
 *
 * NEVER COMPILED FOR A DEVICE, NEVER RUN ON ONE. Its calls follow the declarations in Ascend C's public headers. What was executed is this
 * source over the tests' own CPU version of those few instructions (tests/ascend/ascendc_on_cpu), which gives the bits of fp4_gemv.py, a
 * NumPy twin that walks the same tiles in the same order and is tested against float64. Synchronisation and speed are unproven.
 * CMakeLists.txt builds it where CANN is installed.
 *
 * Why it exists: for one or two tokens a cube core would multiply sixteen rows, fifteen of them empty, and every decoded weight would go
 * to it by way of memory, four times the bytes that were read. The vector cores decode and multiply in place. Up to four rows of an expert
 * share what was decoded.
 *
 * A tile is 64 k by 512 n, 16 KB in one run; the tiles of a column follow each other. It is 8192 words of 16 bits, whose four nibbles, low
 * first, belong to the tile's four scale groups (K2); a word is that of
 *   k = 64 K3 + 16 K2 + 8 K1 + K0        n = 512 N3 + 16 N1 + N0        at K1, N1, K0, N0, slowest first.
 * So a nibble's plane is decoded by shifts of whole words, and eight k by sixteen n, one repeat of a vector instruction on 16 bits, share a
 * block of sixteen scales. The scales of a tile are a run, too: K2, n.
 *
 * Decoding: << puts a nibble on top, >> by 3 with the sign and & 0x8E00 put sign, exponent and mantissa where fp16 has them, 2^-14 of the
 * value. The e4m3 scale << 7 is 2^-8 of its value, times 2^15 2^7 of it. Value times scale has six significant bits: exact in fp16. The
 * power of two that is left, 2^-7, is in `global_scale`.
 *
 * The sums of a split K go to `partial`; when all cores are there they are added in order, scaled and rounded once. No zeros are asked for,
 * no second launch, and the order is always the same.
 *
 *   x             bf16  [R, K], sorted by expert
 *   weight        FP4   [E, N / 512, K / 64, 16384 bytes], as above; K a multiple of 64, N of 512
 *   scale         bits of e4m3 [E, N / 512, K / 64, 4, 512]
 *   global_scale  fp32  [E, N], times 2^7
 *   group_list    int64 [E], where each expert's rows end
 *   partial       fp32  [blocks of four rows of an expert, N / 512, splits, 4, 512], anything
 *   y             bf16  [R, N]
 */
#include "kernel_operator.h"

#include "row_blocks.h"

using namespace AscendC;

namespace {
constexpr uint32_t TILE_K = 64;
constexpr uint32_t TILE_N = 512;
constexpr uint32_t PLANES = 4;                          // K2: scale groups of a tile
constexpr uint32_t WORDS = TILE_K * TILE_N / PLANES;    // of a tile, 16 bits each
constexpr uint32_t HALF = WORDS / 2;                    // of one K1
constexpr uint32_t BLOCKS_N = TILE_N / 16;              // N1
constexpr uint32_t RUN = 128;                           // K0, N0: the lanes of one repeat on 16 bits
constexpr uint32_t LANES = 64;                          // of one on 32 bits: four K0
constexpr uint32_t MAX_ROWS = 4;
constexpr int16_t SIGN_SHIFT = 3;
constexpr uint16_t CODE_MASK = 0x8E00;
constexpr int16_t SCALE_SHIFT = 7;
constexpr float SCALE_POWER = 32768.0f;
} // namespace

struct Fp4GemvTiling {
    uint32_t experts;
    uint32_t k;
    uint32_t n;
    uint32_t splits;  // parts of K, each a multiple of TILE_K
};

class Fp4Gemv {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR weight, GM_ADDR scale, GM_ADDR globalScale, GM_ADDR groupList, GM_ADDR partial, GM_ADDR y,
                                const Fp4GemvTiling &tiling)
    {
        t = tiling;
        columnTiles = t.n / TILE_N;
        groups = groupList;
        xGm.SetGlobalBuffer((__gm__ bfloat16_t *)x);
        weightGm.SetGlobalBuffer((__gm__ int16_t *)weight);
        weightGm.SetL2CacheHint(CacheMode::CACHE_MODE_DISABLE);
        scaleGm.SetGlobalBuffer((__gm__ int8_t *)scale);
        scaleGm.SetL2CacheHint(CacheMode::CACHE_MODE_DISABLE);
        globalScaleGm.SetGlobalBuffer((__gm__ float *)globalScale);
        partialGm.SetGlobalBuffer((__gm__ float *)partial);
        yGm.SetGlobalBuffer((__gm__ bfloat16_t *)y);

        pipe.InitBuffer(weightQueue, 2, WORDS * sizeof(int16_t));
        pipe.InitBuffer(scaleQueue, 2, PLANES * TILE_N);
        pipe.InitBuffer(xQueue, 2, MAX_ROWS * TILE_K * sizeof(bfloat16_t));
        pipe.InitBuffer(sumQueue, 1, MAX_ROWS * TILE_N * sizeof(float));
        pipe.InitBuffer(partQueue, 1, MAX_ROWS * TILE_N * sizeof(float));
        pipe.InitBuffer(globalScaleQueue, 1, TILE_N * sizeof(float));
        pipe.InitBuffer(yQueue, 1, MAX_ROWS * TILE_N * sizeof(bfloat16_t));
        pipe.InitBuffer(bitsBuffer, WORDS * sizeof(int16_t));
        pipe.InitBuffer(valueBuffer, HALF * sizeof(float));
        pipe.InitBuffer(scaleBuffer, PLANES * TILE_N * sizeof(half));
        pipe.InitBuffer(scaleBitsBuffer, PLANES * TILE_N * sizeof(int16_t));
        pipe.InitBuffer(xBuffer, MAX_ROWS * TILE_K * sizeof(float));
        pipe.InitBuffer(xBlockBuffer, MAX_ROWS * TILE_K * 16 * sizeof(float));
        pipe.InitBuffer(accBuffer, MAX_ROWS * HALF * sizeof(float));
        pipe.InitBuffer(maskBuffer, RUN * sizeof(uint16_t));
        Duplicate(maskBuffer.Get<uint16_t>(), CODE_MASK, RUN);
    }

    __aicore__ inline void Process()
    {
        RowBlocks blocks;
        blocks.Begin(groups, t.experts, MAX_ROWS, columnTiles * t.splits, GetBlockIdx(), GetBlockNum());
        while (blocks.Next()) {
            Multiply(blocks, blocks.part / t.splits, blocks.part % t.splits);
        }
        SyncAll();
        blocks.Begin(groups, t.experts, MAX_ROWS, columnTiles, GetBlockIdx(), GetBlockNum());
        while (blocks.Next()) {
            AddUp(blocks, blocks.part);
        }
    }

private:
    __aicore__ inline uint64_t PartialOffset(uint32_t block, uint32_t n3, uint32_t split) const
    {
        return ((static_cast<uint64_t>(block) * columnTiles + n3) * t.splits + split) * (MAX_ROWS * TILE_N);
    }

    /* The part `split` of K. */
    __aicore__ inline void Multiply(const RowBlocks &item, uint32_t n3, uint32_t split)
    {
        const uint32_t tiles = t.k / TILE_K / t.splits;
        Duplicate(accBuffer.Get<float>(), 0.0f, item.rows * HALF);
        PipeBarrier<PIPE_V>();
        for (uint32_t k3 = split * tiles; k3 < (split + 1) * tiles; k3++) {
            CopyIn(item, n3, k3);
            DecodeScales();
            SpreadX(item.rows);
            LocalTensor<int16_t> words = weightQueue.DeQue<int16_t>();
            for (uint32_t plane = 0; plane < PLANES; plane++) {
                Decode(words, plane);
                for (uint32_t k1 = 0; k1 < 2; k1++) {
                    MultiplyAdd(plane, k1, item.rows);
                }
            }
            weightQueue.FreeTensor(words);
        }
        Finish(item, n3, split);
    }

    __aicore__ inline void CopyIn(const RowBlocks &item, uint32_t n3, uint32_t k3)
    {
        const uint64_t tile = (static_cast<uint64_t>(item.expert) * columnTiles + n3) * (t.k / TILE_K) + k3;
        LocalTensor<int16_t> words = weightQueue.AllocTensor<int16_t>();
        DataCopy(words, weightGm[tile * WORDS], WORDS);
        weightQueue.EnQue(words);

        LocalTensor<int8_t> scale = scaleQueue.AllocTensor<int8_t>();
        DataCopy(scale, scaleGm[tile * (PLANES * TILE_N)], PLANES * TILE_N);
        scaleQueue.EnQue(scale);

        LocalTensor<bfloat16_t> x = xQueue.AllocTensor<bfloat16_t>();
        const uint16_t burst = TILE_K * sizeof(bfloat16_t) / 32;
        const uint16_t gap = static_cast<uint16_t>(t.k * sizeof(bfloat16_t) / 32 - burst);
        DataCopy(x, xGm[static_cast<uint64_t>(item.firstRow) * t.k + k3 * TILE_K],
                 DataCopyParams(static_cast<uint16_t>(item.rows), burst, gap, 0));
        xQueue.EnQue(x);
    }

    /* [K2][n] fp16, 2^7 of the values. */
    __aicore__ inline void DecodeScales()
    {
        LocalTensor<int8_t> scale = scaleQueue.DeQue<int8_t>();
        LocalTensor<half> wide = scaleBuffer.Get<half>();
        LocalTensor<int16_t> bits = scaleBitsBuffer.Get<int16_t>();
        const uint32_t count = PLANES * TILE_N;
        Cast(wide, scale, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        Cast(bits, wide, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        ShiftLeft(bits, bits, SCALE_SHIFT, count);
        PipeBarrier<PIPE_V>();
        Muls(wide, bits.ReinterpretCast<half>(), static_cast<half>(SCALE_POWER), count);
        PipeBarrier<PIPE_V>();
        scaleQueue.FreeTensor(scale);
    }

    /* [row][k][16]: each value of x fills two blocks. */
    __aicore__ inline void SpreadX(uint32_t rows)
    {
        LocalTensor<bfloat16_t> x = xQueue.DeQue<bfloat16_t>();
        LocalTensor<float> spread = xBlockBuffer.Get<float>();
        const uint8_t repeats = static_cast<uint8_t>(rows * TILE_K / 8);
        Cast(xBuffer.Get<float>(), x, RoundMode::CAST_NONE, rows * TILE_K);
        PipeBarrier<PIPE_V>();
        Brcb(spread, xBuffer.Get<float>(), repeats, BrcbRepeatParams(2, 16));
        Brcb(spread[8], xBuffer.Get<float>(), repeats, BrcbRepeatParams(2, 16));
        PipeBarrier<PIPE_V>();
        xQueue.FreeTensor(x);
    }

    /* One plane's codes times their scales, fp16, in the order of words. */
    __aicore__ inline void Decode(const LocalTensor<int16_t> &words, uint32_t plane)
    {
        LocalTensor<int16_t> bits = bitsBuffer.Get<int16_t>();
        LocalTensor<uint16_t> unsignedBits = bits.ReinterpretCast<uint16_t>();
        LocalTensor<half> value = bits.ReinterpretCast<half>();
        const int16_t up = static_cast<int16_t>(12 - 4 * plane);
        if (up > 0) {
            ShiftLeft(bits, words, up, WORDS);
            PipeBarrier<PIPE_V>();
            ShiftRight(bits, bits, SIGN_SHIFT, WORDS);
        } else {
            ShiftRight(bits, words, SIGN_SHIFT, WORDS);
        }
        PipeBarrier<PIPE_V>();
        And(unsignedBits, unsignedBits, maskBuffer.Get<uint16_t>(), static_cast<uint64_t>(RUN), WORDS / RUN,
            BinaryRepeatParams(1, 1, 1, 8, 8, 0));
        PipeBarrier<PIPE_V>();
        for (uint32_t k1 = 0; k1 < 2; k1++) {
            Mul(value[k1 * HALF], value[k1 * HALF], scaleBuffer.Get<half>()[plane * TILE_N], static_cast<uint64_t>(RUN), BLOCKS_N,
                BinaryRepeatParams(1, 1, 0, 8, 8, 1));
        }
        PipeBarrier<PIPE_V>();
    }

    /* acc[row][N1][K0, N0] += value * x, four K0 to an instruction. */
    __aicore__ inline void MultiplyAdd(uint32_t plane, uint32_t k1, uint32_t rows)
    {
        LocalTensor<float> value = valueBuffer.Get<float>();
        Cast(value, bitsBuffer.Get<half>()[k1 * HALF], RoundMode::CAST_NONE, HALF);
        PipeBarrier<PIPE_V>();
        for (uint32_t row = 0; row < rows; row++) {
            for (uint32_t half4 = 0; half4 < 2; half4++) {
                const uint32_t k = row * TILE_K + plane * 16 + k1 * 8 + half4 * 4;
                MulAddDst(accBuffer.Get<float>()[row * HALF + half4 * LANES], value[half4 * LANES], xBlockBuffer.Get<float>()[k * 16],
                          static_cast<uint64_t>(LANES), BLOCKS_N, BinaryRepeatParams(1, 1, 1, 16, 16, 0));
            }
        }
        PipeBarrier<PIPE_V>();
    }

    /* Add the eight k of every repeat as a tree, and send the part's sums. */
    __aicore__ inline void Finish(const RowBlocks &item, uint32_t n3, uint32_t split)
    {
        LocalTensor<float> acc = accBuffer.Get<float>();
        LocalTensor<float> four = valueBuffer.Get<float>();
        LocalTensor<float> sum = sumQueue.AllocTensor<float>();
        for (uint32_t row = 0; row < item.rows; row++) {
            LocalTensor<float> eight = acc[row * HALF];
            Add(four, eight, eight[64], static_cast<uint64_t>(64), BLOCKS_N, BinaryRepeatParams(1, 1, 1, 8, 16, 16));
            PipeBarrier<PIPE_V>();
            Add(eight, four, four[32], static_cast<uint64_t>(32), BLOCKS_N, BinaryRepeatParams(1, 1, 1, 4, 8, 8));
            PipeBarrier<PIPE_V>();
            Add(sum[row * TILE_N], eight, eight[16], static_cast<uint64_t>(16), BLOCKS_N, BinaryRepeatParams(1, 1, 1, 2, 4, 4));
            PipeBarrier<PIPE_V>();
        }
        sumQueue.EnQue(sum);
        sum = sumQueue.DeQue<float>();
        DataCopy(partialGm[PartialOffset(item.number, n3, split)], sum, item.rows * TILE_N);
        sumQueue.FreeTensor(sum);
    }

    /* The parts of a block's columns in order, scaled, rounded. */
    __aicore__ inline void AddUp(const RowBlocks &item, uint32_t n3)
    {
        const uint32_t count = item.rows * TILE_N;
        LocalTensor<float> acc = accBuffer.Get<float>();
        Duplicate(acc, 0.0f, count);
        PipeBarrier<PIPE_V>();
        for (uint32_t split = 0; split < t.splits; split++) {
            LocalTensor<float> part = partQueue.AllocTensor<float>();
            DataCopy(part, partialGm[PartialOffset(item.number, n3, split)], count);
            partQueue.EnQue(part);
            part = partQueue.DeQue<float>();
            Add(acc, acc, part, static_cast<int32_t>(count));
            PipeBarrier<PIPE_V>();
            partQueue.FreeTensor(part);
        }
        LocalTensor<float> global = globalScaleQueue.AllocTensor<float>();
        DataCopy(global, globalScaleGm[static_cast<uint64_t>(item.expert) * t.n + n3 * TILE_N], TILE_N);
        globalScaleQueue.EnQue(global);
        global = globalScaleQueue.DeQue<float>();
        for (uint32_t row = 0; row < item.rows; row++) {
            Mul(acc[row * TILE_N], acc[row * TILE_N], global, static_cast<int32_t>(TILE_N));
        }
        PipeBarrier<PIPE_V>();
        globalScaleQueue.FreeTensor(global);
        LocalTensor<bfloat16_t> y = yQueue.AllocTensor<bfloat16_t>();
        Cast(y, acc, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        yQueue.EnQue(y);
        y = yQueue.DeQue<bfloat16_t>();
        const uint16_t burst = TILE_N * sizeof(bfloat16_t) / 32;
        DataCopy(yGm[static_cast<uint64_t>(item.firstRow) * t.n + n3 * TILE_N], y,
                 DataCopyParams(static_cast<uint16_t>(item.rows), burst, 0, static_cast<uint16_t>(t.n * sizeof(bfloat16_t) / 32 - burst)));
        yQueue.FreeTensor(y);
    }

    TPipe pipe;
    TQue<TPosition::VECIN, 2> weightQueue, scaleQueue, xQueue;
    TQue<TPosition::VECIN, 1> partQueue, globalScaleQueue;
    TQue<TPosition::VECOUT, 1> sumQueue, yQueue;
    TBuf<TPosition::VECCALC> bitsBuffer, valueBuffer, scaleBuffer, scaleBitsBuffer, xBuffer, xBlockBuffer, accBuffer, maskBuffer;
    GlobalTensor<bfloat16_t> xGm, yGm;
    GlobalTensor<int16_t> weightGm;
    GlobalTensor<int8_t> scaleGm;
    GlobalTensor<float> globalScaleGm, partialGm;
    GM_ADDR groups;
    Fp4GemvTiling t;
    uint32_t columnTiles;
};

extern "C" __schedmode__(1) __global__ __aicore__ void fp4_gemv(GM_ADDR x, GM_ADDR weight, GM_ADDR scale, GM_ADDR globalScale,
                                                                 GM_ADDR groupList, GM_ADDR partial, GM_ADDR y, uint32_t experts, uint32_t k,
                                                                 uint32_t n, uint32_t splits)
{
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    Fp4Gemv kernel;
    kernel.Init(x, weight, scale, globalScale, groupList, partial, y, Fp4GemvTiling{experts, k, n, splits});
    kernel.Process();
}
