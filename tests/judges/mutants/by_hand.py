"""Mutants by hand: those of an audit that the tests once missed, and mistakes that the rules do not
make. By file: old, new, what it is, and the function it is in where the text stands in several."""

from areas import KERNELS
from by_audit import AUDIT
from by_class import BY_CLASS
from by_hand_ascendc import ASCENDC
from by_hand_host import HOST
from by_second_audit import SECOND_AUDIT

AUDITED: dict[str, tuple[tuple[str, ...], ...]] = {
    f"{KERNELS}/ascend/kernels.py": (
        (
            "tl.num_programs(0)):",
            "tl.num_programs(0) + 1):",
            "T4: items past the first round are skipped",
            "fp4_rows",
        ),
        (
            "tl.num_programs(0)):",
            "tl.num_programs(0) + 1):",
            "T4: items past the first round are skipped",
            "int4_rows",
        ),
        (
            " + HALF, mask=row[:, None] < m, other=0.0)",
            " + HALF)",
            "T6: rows past x are read, second half",
            "multiplied",
        ),
        (
            "HALF, mask=row[:, None] < m, other=0.0)\n    x_high",
            "HALF)\n    x_high",
            "T6: rows past x are read, first half",
            "multiplied",
        ),
        (
            "step * BK, mask=row[:, None] < m, other=0)",
            "step * BK)",
            "T6: rows past x are read",
            "int8_blocks",
        ),
        (
            "row_scale + row, mask=row < m, other=0.0)",
            "row_scale + row)",
            "T6: scales of rows past x are read",
            "int8_blocks",
        ),
        (
            "tl.load(experts + row).to(tl.int64)",
            "tl.load(experts + row)",
            "T9: offsets in 32 bits",
            "int4_rows",
        ),
        (
            "tl.load(experts + row).to(tl.int64)",
            "tl.load(experts + row)",
            "T9: offsets in 32 bits",
            "fp4_rows",
        ),
        ("expert.to(tl.int64)", "expert", "T9: offsets in 32 bits", "int4_blocks"),
        ("expert.to(tl.int64)", "expert", "T9: offsets in 32 bits", "fp4_blocks"),
        ("expert.to(tl.int64)", "expert", "T9: offsets in 32 bits", "int8_blocks"),
        (
            "((container << 12) >> 12).to(tl.float32), (container",
            "(container >> 4).to(tl.float32), (container",
            "low nibbles lost",
            "int4_values",
        ),
        (
            "((container << 12) >> 3) & -29184)",
            "((container << 12) >> 3) & 3584)",
            "sign of E2M1 lost",
            "e2m1_values",
        ),
        (" & (target[None, :] < n)", "", "columns past n are written", "store_block"),
        (", mask=target < n)", ")", "columns past n are written", "store_row"),
    ),
    f"{KERNELS}/ascend/experts.py": (
        (
            "launch.run(launch.assign(counts, blocks))",
            "launch.run(launch.assign(counts.flip(0), blocks))",
            "rows of other experts",
        ),
        (
            "finalize_routing(self._multiply(self.down, codes, scale, blocks), places,",
            "finalize_routing(self._multiply(self.down, codes, scale, blocks), "
            "places.sort().values,",
            "rows not brought back",
        ),
    ),
    f"{KERNELS}/torch_npu/calls.py": (
        (
            'call("npu_prefetch", tensor, after, tensor.numel() * tensor.element_size())',
            'call("npu_prefetch", tensor, after, tensor.numel())',
            "N18: values for bytes",
        ),
        (
            'if weight.device.type == "npu":',
            'call("npu_format_cast", weight, FRACTAL_NZ)\n    if weight.device.type == "npu":',
            "N29: internal layouts allowed after the cast",
        ),
        ("FRACTAL_NZ = 29", "FRACTAL_NZ = 2", "N13: cast to ND"),
        (
            '    result: Tensor = call("npu_format_cast", weight, FRACTAL_NZ)\n    return result',
            "    return weight",
            "N14: no cast",
        ),
    ),
    f"{KERNELS}/torch_npu/functional.py": (
        (
            "return heads_first if all(known) else heads_first.masked_fill((seq_lens == 0)[:, "
            "None], 0.0)",
            "return heads_first",
            "N11: rows of no tokens not masked",
        ),
        (
            'result: Tensor = call("npu_rms_norm", x, weight, eps)[0]',
            'result: Tensor = call("npu_rms_norm", x, weight)[0]',
            "N26: eps left out",
        ),
        (
            'call("npu_add_rms_norm", x, residual, weight, eps)',
            'call("npu_add_rms_norm", x, residual, weight)',
            "N26: eps left out, with the residual",
        ),
        (
            ', epsilon=norms.eps, cache_mode="PA")',
            ', cache_mode="PA")',
            "N26: eps left out, cached latents",
        ),
        ('"group_select_mode": 1,', '"group_select_mode": 0,', "groups by their best"),
    ),
    f"{KERNELS}/torch_npu/grouped.py": (
        (
            "return attended if all(known) else attended.masked_fill((seq_lens == 0)[:, None, "
            "None], 0.0)",
            "return attended",
            "N11: rows of no tokens not masked",
        ),
    ),
    f"{KERNELS}/torch_npu/linear.py": (
        (
            "self.weight = format_cast_nz(weight.codes.T.contiguous())",
            "self.weight = weight.codes.T.contiguous()",
            "N14: int8 weights stay ND",
        ),
        (
            "self.weight = format_cast_nz(weight.weight.T.to(dtype).contiguous())",
            "self.weight = weight.weight.T.to(dtype).contiguous()",
            "N14: the prolog's weights stay ND",
        ),
    ),
    f"{KERNELS}/torch_npu/layout.py": (
        ("else -weight.zero_point.T", "else weight.zero_point.T", "the zero point is added"),
    ),
    f"{KERNELS}/torch_npu/rules.py": (
        (
            "32 <= a.antiquant_group_size < a.x.shape[1]",
            "32 <= a.antiquant_group_size <= a.x.shape[1]",
            "N20: a group of all K",
        ),
        (
            "2 <= a.group_list.shape[0] == a.weight[0].shape[0] <= 1024",
            "2 <= a.group_list.shape[0] == a.weight[0].shape[0] <= 2048",
            "N21: more experts than it takes",
        ),
        (
            "a.x.shape[1] // a.group_count > 2",
            "a.x.shape[1] // a.group_count > 1",
            "N22: groups of two experts",
        ),
    ),
    f"{KERNELS}/torch_npu/attention_rules.py": (
        (
            "a.block_size in ((16, 128) if",
            "a.block_size in ((16, 64, 128) if",
            "N20: blocks of 64 with a rotary part",
        ),
        (
            "a.num_heads // a.num_key_value_heads <= 64",
            "a.num_heads // a.num_key_value_heads <= 128",
            "N21: 128 heads share a key",
        ),
        ("lambda a: a.scale != 1.0", "lambda a: True", "N22: the scale may be left out"),
    ),
    f"{KERNELS}/torch_npu/prolog.py": (
        (
            "rotation.cos, rotation.sin, cache, slots",
            "rotation.sin, rotation.cos, cache, slots",
            "sine for cosine",
        ),
        ("pairs_together(rows[:, -PROLOG_ROPE:])", "rows[:, -PROLOG_ROPE:]", "pairs left apart"),
    ),
}

TABLES = (AUDITED, ASCENDC, BY_CLASS, HOST, AUDIT, SECOND_AUDIT)


def of_path(path: str) -> list[tuple[str, ...]]:
    """All mutants by hand of a source."""
    return [one for table in TABLES for one in table.get(path, ())]
