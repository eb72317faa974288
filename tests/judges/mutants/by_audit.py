"""Mutants by hand as an auditor of 23 November made them, run once before a test was written for
any: as those of by_hand.py."""

from areas import KERNELS

AUDIT: dict[str, tuple[tuple[str, ...], ...]] = {
    f"{KERNELS}/ascend/chip.py": (
        (
            'limit["cube_core_num"], limit["vector_core_num"]',
            'limit["vector_core_num"], limit["cube_core_num"]',
            "cores swapped",
        ),
        ('COLUMNS = {"int4": 64,', 'COLUMNS = {"int4": 128,', "a tile that a core has no room for"),
    ),
    f"{KERNELS}/ascend/extension.py": (
        (
            'if device.type == "npu":',
            'if device.type == "cpu":',
            "the library is never loaded on an NPU",
        ),
        (
            "return has_kernel(name, device, NAMESPACE)",
            "return has_kernel(name, device)",
            "asked of torch_npu",
        ),
    ),
    f"{KERNELS}/ascend/streamed.py": (
        ("n % 256 == 0", "n % 128 == 0", "bounds: half a column tile"),
        (
            "else 16 * weight.zero_point.float()",
            "else weight.zero_point.float()",
            "zero points a sixteenth",
        ),
        ("high, low =", "low, high =", "layout: nibbles swapped"),
        (
            "planes[1] << 4 | planes[2] << 8",
            "planes[2] << 4 | planes[1] << 8",
            "layout: planes swapped",
        ),
        ("quantize=False, ends=True)", "quantize=False)", "counts for ends"),
        ("ends, cube)", "ends, vector)", "more programs than cores meet"),
        (".permute(0, 2, 3, 1)", ".permute(0, 2, 1, 3)", "layout: scales by column"),
        (
            "torch.stack([zero, weight.scale])",
            "torch.stack([weight.scale, zero])",
            "scales and zero points swapped",
        ),
        (
            "tensor[index].copy_(part)",
            "tensor[-1 - index].copy_(part)",
            "experts in the other order",
        ),
    ),
    f"{KERNELS}/ascend/experts.py": (
        ("min(rows, counts.shape[0])", "min(rows, 8)", "bounds: blocks for eight experts"),
        (
            "topk_weights.flatten(), out",
            "topk_weights.T.flatten(), out",
            "wrong axis: weights by choice",
        ),
    ),
    f"{KERNELS}/ascend/launch.py": (
        (
            '_blocks", min(items, cores(x.device)[0])',
            '_blocks", min(items, cores(x.device)[1])',
            "programs of the vector cores",
        ),
        ('constants["BK"] = SPAN', 'constants["BK"] = SPAN // 2', "layout: half a span"),
        (
            "counts.shape[0], of.experts.shape[0])",
            "of.experts.shape[0], counts.shape[0])",
            "swapped scalars",
            "assign",
        ),
    ),
    f"{KERNELS}/ascend/layout.py": (
        (
            "(0, 0, 0, -values.shape[0] % bn)",
            "(0, 0, -values.shape[0] % bn, 0)",
            "tail: padding before the columns",
        ),
        (
            "else _column_tiles(weight.zero_point, bn)",
            "else _column_tiles(-weight.zero_point, bn)",
            "sign of the zero point",
        ),
        (
            "isinstance(weight, Int4) and weight.zero_point is not None)",
            "False)",
            "zero points not read",
        ),
    ),
    f"{KERNELS}/ascend/linear.py": (
        (
            "_in_order(m, bm, x.device), out)",
            "_in_order(-(-m // bm) * bm, bm, x.device), out)",
            "tail: rows past the last",
        ),
    ),
    f"{KERNELS}/ascend/kernels.py": (
        ("low -= tl.load", "low += tl.load", "sign of the zero point", "int4_blocks"),
        (
            "low_sum *= tl.load(tile_scale + first)",
            "low_sum *= tl.load(tile_scale + second)",
            "scales of the other half",
            "int4_row",
        ),
        (
            "tl.load(global_scale + slot * BN",
            "tl.load(global_scale + tile * BN",
            "scales: the first expert's",
            "fp4_blocks",
        ),
        ("tl.minimum(row + BM, end)", "row + BM", "tail: rows of the next expert", "assign"),
        (
            "mask=row < m, other=0.0)\n            columns",
            "mask=row <= m, other=0.0)\n            columns",
            "tail: a row late",
            "int8_blocks",
        ),
    ),
    f"{KERNELS}/ascend/few_tokens.py": (
        (
            "tl.load(scale + slot * BN + column)",
            "tl.load(scale + column)",
            "scales: the first tile's",
            "int8_row",
        ),
        (
            "weight + expert[:, None] * k",
            "weight + expert[:, None] * n",
            "wrong stride: the router's rows",
            "router",
        ),
        ("range(0, k // CHUNK)", "range(0, 1)", "the largest of the first values", "row_scale"),
        ("total += fp4_row", "total = fp4_row", "the last expert alone", "fp4_down"),
    ),
    f"{KERNELS}/torch_npu/calls.py": (
        (
            '"cache_index": slots',
            '"cache_index": slots.clamp(min=1)',
            "paging: slot 0 at slot 1",
            "mla_prolog",
        ),
        (
            'key = "PrivateUse1" if device.type == "npu"',
            'key = "PrivateUse1" if device.type == "cuda"',
            "kernels of an NPU not found",
        ),
        (
            "expert_tokens_num_type=0 if ends else 1",
            "expert_tokens_num_type=1 if ends else 0",
            "ends for counts",
        ),
    ),
    f"{KERNELS}/torch_npu/functional.py": (
        (
            '"norm_type": 1 if routing.scoring_func == "sigmoid" else 0',
            '"norm_type": 1',
            "softmax scores by sigmoid",
        ),
        (
            '"routed_scaling_factor": routing.routed_scaling_factor',
            '"routed_scaling_factor": 1.0',
            "a factor left out",
        ),
        (
            'kwargs["block_size"] = keys.shape[2]',
            'kwargs["block_size"] = 128',
            "paging: another block size",
        ),
        ("(seq_lens == 0)", "(seq_lens == 0).roll(1)", "no tokens: the row beside", "attend"),
        ("return result.to(x.dtype)", "return result", "wrong dtype: float32", "turned"),
        (
            '"block_table": block_table.to(torch.int32)',
            '"block_table": block_table.to(torch.int32).roll(1, 0)',
            "pages of another",
            "attend",
        ),
    ),
    f"{KERNELS}/torch_npu/grouped.py": (
        (
            '"block_table": block_table.to(torch.int32)',
            '"block_table": block_table.to(torch.int32).flip(1)',
            "paging: blocks in reverse",
        ),
        (
            "q[..., -2 * rotation.cos.shape[1] :]",
            "q[..., : 2 * rotation.cos.shape[1]]",
            "wrong axis: the part that is not turned",
        ),
    ),
    f"{KERNELS}/torch_npu/layout.py": (
        ("bias.float()", "bias.half().float()", "rounding: W4A8's bias by way of fp16"),
        ("return n % CARRIED == 0 and k", "return k", "bounds: columns that fill no carrier"),
    ),
    f"{KERNELS}/torch_npu/linear.py": (
        ("(bytes_ * 32) & -29184", "(bytes_ * 32) & 3584", "sign of the high nibble"),
    ),
    f"{KERNELS}/torch_npu/experts.py": (
        (
            "self._multiply(self.down, codes, counts, scale), places",
            "self._multiply(self.down, codes, counts, scale), places.flip(0)",
            "rows",
        ),
    ),
    f"{KERNELS}/torch_npu/prolog.py": (
        (
            "self._w_uk = self.kv_b[:, : sizes.nope].contiguous()",
            "self._w_uk = self.kv_b[:, : sizes.nope]",
            "layout: a part as it lies",
        ),
    ),
    f"{KERNELS}/torch_npu/__init__.py": (
        (
            '"mla_prolog" and dtype not in (None, torch.bfloat16)',
            '"mla_prolog" and dtype not in (None, *HALVES)',
            "fp16 too",
        ),
        (
            "odd = [n for n, _ in shapes if n % CARRIED]",
            "odd = [k for _, k in shapes if k % CARRIED]",
            "wrong axis: carriers of K",
        ),
    ),
    "kernels/ascendc/fp4_gemv.cpp": (
        (
            "t.n * sizeof(bfloat16_t) / 32 - burst)));",
            "t.n * sizeof(bfloat16_t) / 32)));",
            "wrong stride: rows of y",
        ),
        (
            "scaleGm[tile * (PLANES * TILE_N)]",
            "scaleGm[(tile - k3) * (PLANES * TILE_N)]",
            "scales of the first k",
        ),
        (
            "        DataCopy(partialGm[",
            "        SetAtomicAdd<float>();\n        DataCopy(partialGm[",
            "atomic mode left on",
        ),
    ),
    "kernels/ascendc/row_blocks.h": (
        (
            "experts > 0 ? static_cast<uint32_t>(ends.GetValue(0)) : 0",
            "0",
            "the first expert's rows left out",
        ),
    ),
    "kernels/ascendc/int4_grouped.cpp": (
        (
            "lanes, rows, BinaryRepeatParams(1, 1, 0, rowBlocks, rowBlocks, factorBlocks));",
            "lanes, rows, BinaryRepeatParams(1, 1, 0, rowBlocks, rowBlocks, 0));",
            "scales of the first row",
        ),
        (
            "sumsGm[from + MAX_ROWS * TILE_N], params",
            "sumsGm[from + MAX_ROWS * HALF_N], params",
            "wrong stride: second sums",
        ),
        (
            "product.m = FRACTAL_ROWS;",
            "product.m = static_cast<uint16_t>(rows);",
            "second digits not multiplied",
        ),
        ("item < t.rows * chunks;", "item < t.rows;", "tail: rows past the first chunks"),
        (
            "        Div(digit, digit, fold, CHUNK_GROUPS);\n        PipeBarrier<PIPE_V>();",
            "        Div(digit, digit, fold, CHUNK_GROUPS);",
            "a barrier left out: inverses",
        ),
        (
            "Cast(whole, value, RoundMode::CAST_RINT, count);",
            "Cast(whole, value, RoundMode::CAST_FLOOR, count);",
            "rounding: digits down",
        ),
    ),
    "kernels/ascendc/binding.cpp": (
        ("rows / 4 + std::min(rows, experts)", "rows / 4", "scratch: no room for ragged blocks"),
        ("{cores, 4, 32768}", "{1, 4, 32768}", "scratch: all cores in one's slots"),
        ("static_cast<uint32_t>(splits));", "1u);", "splits left out"),
    ),
}
