"""Mutants by hand of the Ascend C sources, as those of by_hand.py."""

ASCENDC: dict[str, tuple[tuple[str, ...], ...]] = {
    "kernels/ascendc/fp4_gemv.cpp": (
        ("        weightQueue.EnQue(words);\n", "", "A5: weights not enqueued"),
        (
            "words = weightQueue.DeQue<int16_t>();",
            "words = weightQueue.AllocTensor<int16_t>();",
            "A6: weights not dequeued",
        ),
        (
            "        sumQueue.EnQue(sum);\n        sum = sumQueue.DeQue<float>();\n",
            "",
            "A7: sums leave before they are computed",
        ),
        (
            "        globalScaleQueue.EnQue(global);\n        global = "
            "globalScaleQueue.DeQue<float>();\n",
            "",
            "A7: global scales read before they are there",
        ),
        (
            "        DecodeScales();\n",
            "        LocalTensor<int8_t> early = scaleQueue.DeQue<int8_t>();\n        "
            "scaleQueue.FreeTensor(early);\n"
            "        DecodeScales();\n",
            "A10: scales freed before their use",
        ),
        ("        SyncAll();\n", "", "parts added before they are there"),
        (
            "        const uint64_t tile = ",
            "        const uint32_t tile = ",
            "A14: offsets in 32 bits",
        ),
        (
            "        PipeBarrier<PIPE_V>();\n        ShiftLeft(bits, bits, SCALE_SHIFT, count);",
            "        ShiftLeft(bits, bits, SCALE_SHIFT, count);",
            "A8: no barrier, scales",
        ),
        (
            "            PipeBarrier<PIPE_V>();\n            ShiftRight(",
            "            ShiftRight(",
            "A8: no barrier, codes",
        ),
        ("        PipeBarrier<PIPE_V>();\n        Brcb(", "        Brcb(", "A8: no barrier, x"),
        (
            "static_cast<int16_t>(12 - 4 * plane)",
            "static_cast<int16_t>(4 * plane)",
            "planes in the other order",
        ),
        ("CODE_MASK = 0x8E00", "CODE_MASK = 0x0E00", "signs lost"),
        ("CODE_MASK = 0x8E00", "CODE_MASK = 0x8C00", "mantissas lost"),
        ("SCALE_POWER = 32768.0f", "SCALE_POWER = 16384.0f", "half of all"),
        (
            "BrcbRepeatParams(2, 16));\n        Brcb(spread[8]",
            "BrcbRepeatParams(2, 16));\n        Brcb(spread[16]",
            "x a value late",
        ),
        (
            "BinaryRepeatParams(1, 1, 0, 8, 8, 1));\n        }",
            "BinaryRepeatParams(1, 1, 1, 8, 8, 1));\n        }",
            "scales of other columns",
        ),
        (
            "BinaryRepeatParams(1, 1, 1, 16, 16, 0));",
            "BinaryRepeatParams(1, 1, 1, 16, 16, 1));",
            "x of other k",
        ),
        (
            "item.rows * HALF);\n        PipeBarrier",
            "HALF);\n        PipeBarrier",
            "sums of later rows begin with what was there",
        ),
        (
            "Add(acc, acc, part, static_cast<int32_t>(count));",
            "Add(acc, acc, part, static_cast<int32_t>(TILE_N));",
            "one row added up",
        ),
        (
            "            Mul(acc[row * TILE_N], acc[row * TILE_N], global, "
            "static_cast<int32_t>(TILE_N));",
            "            Mul(acc[row * TILE_N], acc[row * TILE_N], global, "
            "static_cast<int32_t>(TILE_N - 8));",
            "the last columns not scaled",
        ),
        (
            "* t.splits + split) * (MAX_ROWS * TILE_N)",
            "* t.splits + split) * TILE_N",
            "parts over each other",
        ),
    ),
    "kernels/ascendc/row_blocks.h": (
        (
            "blocks = (end - start + maxRows - 1) / maxRows;",
            "blocks = (end - start) / maxRows;",
            "ragged blocks lost",
        ),
        (
            "firstRow = start + (wanted - block) * maxRows;",
            "firstRow = start;",
            "later blocks are the first",
        ),
        (
            "rows = end - firstRow < maxRows ? end - firstRow : maxRows;",
            "rows = maxRows;",
            "rows of the next expert",
        ),
        ("number = wanted;", "number = expert;", "blocks counted by expert"),
        ("item += stride;", "item += stride + 1;", "items left out"),
        (
            "            if (expert >= experts) {",
            "            if (expert + 1 >= experts) {",
            "the last expert left out",
        ),
        ("            start = end;\n", "", "rows of experts before"),
    ),
    "kernels/ascendc/int4_grouped.cpp": (
        (
            "        SyncAll<false>();\n        Decoder decoder;",
            "        Decoder decoder;",
            "digits read before they are there",
        ),
        (
            "        CrossCoreWaitFlag(FREE + slot);\n        const uint16_t burst",
            "        const uint16_t burst",
            "slots written while they are read",
        ),
        ("        CrossCoreWaitFlag(FULL + slot);\n", "", "slots read before they are written"),
        (
            "        CrossCoreSetFlag<2, PIPE_MTE3>(FULL + slot);\n",
            "",
            "nobody tells that slots are full",
        ),
        (
            "        CrossCoreWaitFlag(FULL + slot);\n        DataCopy(tile,",
            "        CrossCoreWaitFlag(FULL + slot);\n        CrossCoreSetFlag<2, PIPE_MTE2>(FREE "
            "+ slot);\n"
            "        CrossCoreWaitFlag(FREE + slot);\n        DataCopy(tile,",
            "the cube core waits for itself",
        ),
        ("        CrossCoreWaitFlag(DONE + slot);\n", "", "sums taken before they are there"),
        (
            "        CrossCoreSetFlag<2, PIPE_FIX>(DONE + slot);\n",
            "",
            "nobody tells that sums are there",
        ),
        (
            "        CrossCoreWaitFlag(TAKEN - slot * TAKEN_STEP);\n        FixpipeParamsV220 out;",
            "        FixpipeParamsV220 out;",
            "sums overwritten before they are taken",
        ),
        (
            "        for (uint32_t slot = 0; slot < SLOTS; slot++) {\n            "
            "CrossCoreWaitFlag(FREE + slot);\n        }\n",
            "",
            "flags left for the next kernel",
        ),
        (
            "        for (uint32_t slot = 0; slot < SUM_SLOTS; slot++) {\n"
            "            CrossCoreWaitFlag(TAKEN - slot * TAKEN_STEP);\n        }\n",
            "",
            "flags left for the next kernel, sums",
        ),
        ("DONE = 8, TAKEN = 15;", "DONE = 8, TAKEN = 14;", "a flag that SyncAll uses"),
        ("        written++;\n", "", "always the same slot"),
        ("        taken++;\n", "", "always the same sums, taken"),
        ("        done++;\n", "", "always the same sums, done"),
        (
            "const uint32_t slot = read % SLOTS;",
            "const uint32_t slot = (read + 1) % SLOTS;",
            "the cube a slot ahead",
        ),
        ("NIBBLES = 0xF0F0", "NIBBLES = 0xF070", "a code's sign lost"),
        (
            "static_cast<int16_t>(4), WORDS",
            "static_cast<int16_t>(3), WORDS",
            "low nibbles half as large",
        ),
        ("GROUP / 32, burst, 0, burst));", "GROUP / 32, burst, 0, 0));", "halves over each other"),
        ("+ side * (RUN / 2)]", "]", "both halves at the first"),
        (
            "digitQueue, 1, FRACTAL_ROWS * t.k",
            "digitQueue, 1, MAX_ROWS * t.k",
            "too little room for digits",
        ),
        ("digits[which * MAX_ROWS * 32]", "digits[which * 32]", "digits of the next row"),
        (
            "group * (GROUP / 32)), GROUP / 32, 1,",
            "group * (GROUP / 32)), GROUP / 32, 0,",
            "one fractal four times",
        ),
        (
            "Fixpipe(sumsGm[to + MAX_ROWS * TILE_N], sum[MAX_ROWS * 16], out);",
            "Fixpipe(sumsGm[to + MAX_ROWS * TILE_N], sum, out);",
            "d1 twice",
        ),
        ("        Fixpipe(sumsGm[to], sum, out);\n", "", "d1 left out"),
        ("1.0f / (127.0f * 16.0f)", "1.0f / 127.0f", "sixteen fold"),
        (
            "Muls(value, value, RADIX, count);",
            "Muls(value, value, RADIX + 1.0f, count);",
            "second digits too large",
        ),
        (
            "Muls(sum[count], sum[count], 1.0f / RADIX, count);",
            "Muls(sum[count], sum[count], 0.0f, count);",
            "second digits ignored",
        ),
        (
            "        SendFactors(fold, row, 1, first, groups);\n",
            "        SendFactors(fold, row, 0, first, groups);\n",
            "sums for scales",
        ),
        (
            "Maxs(fold, fold, LEAST, CHUNK_GROUPS);",
            "Maxs(fold, fold, 0.0f, CHUNK_GROUPS);",
            "zeros divide",
        ),
        (
            "        Sub(sum, sum, zero, static_cast<int32_t>(item.rows * HALF_N));\n",
            "",
            "zero points ignored",
        ),
        (
            "parameter[HALF_N + c], lanes, rows",
            "parameter[c], lanes, rows",
            "zero points for scales",
        ),
        (
            "        PipeBarrier<PIPE_V>();\n        And(low, low,",
            "        And(low, low,",
            "A8: no barrier, low nibbles",
        ),
        (
            "        PipeBarrier<PIPE_V>();\n        Sub(sum, sum, zero",
            "        Sub(sum, sum, zero",
            "A8: no barrier, zero points",
        ),
        (
            "        factorQueue.FreeTensor(scales);\n        factorQueue.FreeTensor(digitSums);\n "
            "       Finish(item);",
            "        Finish(item);",
            "factors never freed",
        ),
        (
            "    for (uint32_t step = 0; step < groups + LAG; step++) {",
            "    for (uint32_t step = 0; step < groups + LAG - 1; step++) {",
            "last group lost",
        ),
        ("LAG = 2;", "LAG = 8;", "further ahead than slots and sums allow"),
        ("t.k - first < CHUNK ? t.k - first : CHUNK", "CHUNK", "digits past the row"),
        (
            "items.Begin(groupList, t.experts, MAX_ROWS, t.n / TILE_N, pair,",
            "items.Begin(groupList, t.experts, MAX_ROWS, t.n / TILE_N, side,",
            "by half",
        ),
        (
            "const uint64_t from = (static_cast<uint64_t>(pair) * SUM_SLOTS + slot) * SUMS + side "
            "* HALF_N;",
            "const uint64_t from = (static_cast<uint64_t>(pair) * SUM_SLOTS + slot) * SUMS;",
            "sums of the first half",
        ),
    ),
    "kernels/ascendc/amla.py": (
        ("np.clip(steps, -255, 0)", "np.clip(steps, -127, 0)", "sums of long ago come back"),
        (
            "np.where(exponents + steps > 0, moved, np.float32(0))",
            "moved",
            "what is too small becomes large",
        ),
        (
            "np.rint(scores.max(axis=1, keepdims=True))",
            "np.floor(scores.max(axis=1, keepdims=True)) - 130",
            "chances overflow",
        ),
        (
            "weights = rescaled(weights, powers - new)",
            "weights = weights",
            "the denominator is not rescaled",
        ),
    ),
    "quantkit/executor/ranks/quantized_all_reduce.py": (
        (
            "x.shape[0] > max(self.rows, LEAST_ROWS - 1)",
            "x.shape[0] >= max(self.rows, LEAST_ROWS - 1)",
            "steps of answers coded",
        ),
        ("        for part in parts[1:]:", "        for part in parts[2:]:", "a rank left out"),
        (
            "self.packed(total))",
            "self.packed(self.unpacked(parts[0])))",
            "rank 0's part for the sum",
        ),
        ("(bits + 0xFFFF) & ~0xFFFF", "bits & ~0xFFFF", "scales rounded down"),
        ("-x.shape[0] % self.size", "0", "rows not filled up"),
    ),
}
