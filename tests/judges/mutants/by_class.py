"""Mutants by hand, by class of mistake: layouts, head offsets, page ends and rows of no tokens,
rounding, dtypes of scales, loops, bytes.

By file: old, new, what it is, and the function it is in where the text stands in several.
"""

from areas import KERNELS

BY_CLASS: dict[str, tuple[tuple[str, ...], ...]] = {
    f"{KERNELS}/torch_npu/functional.py": (
        (
            "kv_b[:, :nope],",
            "kv_b[:, -nope:],",
            "head offset: W_UV's rows for W_UK's",
            "mla_decode",
        ),
        (
            "kv_b[:, nope:].transpose",
            "kv_b[:, : -nope].transpose",
            "head offset: W_UK's rows for W_UV's",
            "values",
        ),
        (
            "else lengths)",
            "else [n - (n % 128 == 0) for n in lengths])",
            "page end: the last token of a full block",
            "attend",
        ),
        (
            "else lengths)",
            "else [n + (n % 16 == 15) for n in lengths])",
            "page end: one token too many",
            "attend",
        ),
        (
            "(seq_lens == 0)",
            "(seq_lens <= 1)",
            "no tokens: rows of one token are masked too",
            "attend",
        ),
        (
            "if all(known) else",
            "if any(known) else",
            "no tokens: masked only where all rows are empty",
            "attend",
        ),
        (
            "return rotation.cos[:, None, None], rotation.sin",
            "return rotation.sin[:, None, None], rotation.cos",
            "sine for cosine",
            "_four",
        ),
        (
            "(q_pe if rotation.interleaved else pairs_together(q_pe))",
            "q_pe",
            "order: pairs of queries left apart",
            "mla_decode",
        ),
        (
            "if not rotation.interleaved:",
            "if rotation.interleaved and False:",
            "order: pairs of keys left apart",
            "mla_prepare",
        ),
        (
            "args = (x.float(), *(angles.unsqueeze(1) for angles in doubled)",
            "args = (x, *(angles.unsqueeze(1).to(x.dtype) for angles in doubled)",
            "rounding: turned in 16 bits",
            "turned",
        ),
        (
            "F.linear(x.float(), router)",
            "F.linear(x, router.to(x.dtype)).float()",
            "rounding: the router's product in 16 bits",
            "moe_gate",
        ),
        ('"eps": 1e-20', '"eps": 1e-3', "epsilon: of the weights' sum", "choose"),
        (
            "logits.shape[1], routing.num_joined",
            "logits.shape[1] - 1, routing.num_joined",
            "off by one: the shared expert's number",
            "route",
        ),
        (
            "return normed, total",
            "return normed, residual",
            "the stream before the sum",
            "add_rms_norm",
        ),
        ("x.contiguous())", "x)", "layout: a slice as it lies", "silu_and_mul"),
        ("weight).transpose(0, 1)", "weight)", "transpose: tokens not first again", "by_head"),
        ("order=[0, 1, 2])", "order=[1, 0, 2])", "transpose: heads for tokens", "values"),
        (', "input_layout": "BNSD_NBSD"}', "}", "layout: heads do not come first", "attend"),
    ),
    f"{KERNELS}/torch_npu/grouped.py": (
        (
            "else lengths)",
            "else [n - (n % 16 == 0) for n in lengths])",
            "page end: the last token of a full block",
        ),
        ("(seq_lens == 0)", "(seq_lens <= 1)", "no tokens: rows of one token are masked too"),
        ("if window or scales", "if scales", "a window is not kept"),
        (
            "keys.flatten(2), values.flatten(2))",
            "keys.flatten(2), keys.flatten(2))",
            "keys for values",
        ),
        (
            "if all(known) else",
            "if any(known) else",
            "no tokens: masked only where all rows are empty",
        ),
    ),
    f"{KERNELS}/torch_npu/linear.py": (
        (
            "self.scale = weight.scale.flatten().contiguous()",
            "self.scale = weight.scale.flatten().to(torch.bfloat16)",
            "scale dtype: bf16 for fp32",
        ),
        (
            "return quant_matmul(codes, row_scale,",
            "return quant_matmul(codes, row_scale.bfloat16().float(),",
            "rounding: a row's scale in 16 bits",
        ),
        ("low, high = weight.codes", "high, low = weight.codes", "halves swapped"),
        (
            "return [self.weight, self.scale, self.offset]",
            "return [self.weight, self.scale]",
            "bytes: offsets are not held",
        ),
        (
            "return [self.codes, self.scale_bits, self.global_scale]",
            "return [self.codes]",
            "bytes: scales are not held",
        ),
        (
            "return (values * scale.unsqueeze(-1))",
            "return (values.half() * scale.half().unsqueeze(-1))",
            "rounding: decoded in fp16",
        ),
        (
            "self.weight = weight.weight.to(dtype)\n",
            "self.weight = weight.weight.half().to(dtype)\n",
            "rounding: by way of fp16",
        ),
    ),
    f"{KERNELS}/torch_npu/layout.py": (
        (
            "scale = weight.scale.T.to(dtype)",
            "scale = weight.scale.T.bfloat16().to(dtype)",
            "rounding: fp16 scales by way of bf16",
        ),
        (
            "scale = weight.scale.T.to(dtype)",
            "scale = weight.scale.T.half().to(dtype)",
            "rounding: bf16 scales by way of fp16",
        ),
        ("nibble << (4 * place)", "nibble << (4 * (7 - place))", "high nibble first"),
        ("return 0 if group == shape(weight)[1] else group", "return group", "a group of all K"),
    ),
    f"{KERNELS}/torch_npu/experts.py": (
        ("stack(gate, up)", "stack(up, gate)", "up for gate"),
        (
            "topk_weights.to(self.dtype)",
            "topk_weights.half().to(self.dtype)",
            "rounding: weights by way of fp16",
        ),
        (
            "codes, scale = dynamic_quant(activated) if",
            "codes, _ = dynamic_quant(activated) if",
            "the scales of x for those of its product",
        ),
        ("return [*self.gate_up, *self.down]", "return [*self.gate_up]", "bytes: down is not held"),
        (
            "return placed.codes.T, placed.scale.flatten().to(scale_dtype)",
            "return placed.codes.T, placed.scale.flatten().half().to(scale_dtype)",
            "rounding: scales by way of fp16",
        ),
        (
            "room[index].copy_(tensor)",
            "room[index - 1].copy_(tensor)",
            "off by one: experts at each other's places",
        ),
    ),
    f"{KERNELS}/torch_npu/calls.py": (
        ("*gains, sin, cos, *four", "*gains, cos, sin, *four", "sine for cosine"),
        (', "rmsnorm_epsilon_ckv": eps}', "}", "epsilon: the latent's left out"),
        ('"rmsnorm_epsilon_cq": eps, ', "", "epsilon: the query's left out"),
        (
            "tensor, after, tensor.numel()",
            "tensor, None, tensor.numel()",
            "prefetched before the collective",
        ),
        (
            "tensor.numel() * tensor.element_size())",
            "min(tensor.numel() * tensor.element_size(), 1 << 16))",
            "bytes: the first 64 KiB",
        ),
        (
            "pertoken_scale=row_scale, output_dtype=dtype)",
            "output_dtype=dtype)",
            "rows' scales left out",
            "quant_matmul",
        ),
        (
            "row_scale.unsqueeze(1)}",
            "row_scale.bfloat16().float().unsqueeze(1)}",
            "rounding: a row's scale in 16 bits",
        ),
    ),
    f"{KERNELS}/torch_npu/prolog.py": (
        (
            "self.kv_b[:, : sizes.nope]",
            "self.kv_b[:, -sizes.nope :]",
            "head offset: W_UV's rows for W_UK's",
        ),
        (
            "pairs_apart(y[..., -PROLOG_ROPE:])",
            "y[..., -PROLOG_ROPE:]",
            "order: prefill's channels left together",
        ),
        (
            "_together(q_b, sizes.heads), _together(kv_a, 1)",
            "_together(q_b, sizes.heads), kv_a",
            "order: the key's pairs left apart",
        ),
        (
            "_together(q_b, sizes.heads), _together",
            "_together(q_b, 1), _together",
            "head offset: one head for all",
        ),
        (", *self._kv_a.held(), self._w_uk]", ", *self._kv_a.held()]", "bytes: W_UK is not held"),
        ("*self._q_b.held(), ", "", "bytes: q_b is not held"),
    ),
    f"{KERNELS}/ascend/kernels.py": (
        (
            "range(tl.program_id(0), items,",
            "range(tl.program_id(0), items - 1,",
            "loops: the last item",
            "fp4_rows",
        ),
        (
            "range(tl.program_id(0), items,",
            "range(tl.program_id(0), items - 1,",
            "loops: the last item",
            "int8_blocks",
        ),
        (
            "range(tl.program_id(0), items, tl.num_programs(0))",
            "range(tl.program_id(0), items, 5)",
            "loops: a fixed step",
            "int4_blocks",
        ),
        ("range(0, spans)", "range(0, spans - 1)", "loops: the last span", "int4_row"),
        (
            "high_sum *= tl.load(tile_scale + second)",
            "high_sum *= tl.load(tile_scale + first)",
            "scales: the first half's",
            "int4_row",
        ),
        (
            "acc.to(out.dtype.element_ty), mask=target < n)",
            "acc.to(tl.float16).to(out.dtype.element_ty), mask=target < n)",
            "rounding: a result by way of fp16",
            "store_row",
        ),
        (
            "acc.to(out.dtype.element_ty), mask=mask)",
            "acc.to(tl.float16).to(out.dtype.element_ty), mask=mask)",
            "rounding: a result by way of fp16",
            "store_block",
        ),
        (
            "(low, (HALF, BN)).to(x_low.dtype)",
            "(low, (HALF, BN)).to(tl.float16).to(x_low.dtype)",
            "rounding: weights by way of fp16",
            "multiplied",
        ),
        (
            "scale + slot * BN + column",
            "scale + tile * BN + column",
            "scales: the first expert's",
            "int8_blocks",
        ),
        (
            "global_scale + slot * BN",
            "global_scale + slot % 3 * BN",
            "scales: another tile's",
            "fp4_row",
        ),
        ("if expert >= 0:", "if expert > 0:", "off by one: the first expert", "fp4_blocks"),
        (
            "first + PER_HALF * BN",
            "first + BN",
            "scales: groups of the second half",
            "group_offsets",
        ),
        (
            "acc = tl.zeros((BM, BN), dtype=tl.int32)",
            "acc = tl.full((BM, BN), 1, dtype=tl.int32)",
            "the sum begins at one",
            "int8_blocks",
        ),
    ),
    f"{KERNELS}/ascend/launch.py": (
        (
            "items = out.shape[0] * packed.tiles",
            "items = out.shape[0] * packed.tiles - 1",
            "loops: the last item",
            "rows",
        ),
        (
            "items = of.experts.shape[0] * packed.tiles",
            "items = (of.experts.shape[0] - 1) * packed.tiles",
            "loops: the last block",
            "blocks",
        ),
    ),
    f"{KERNELS}/ascend/experts.py": (
        (
            "topk_weights.flatten(), out))",
            "topk_weights.flatten().flip(0), out))",
            "weights of other choices",
        ),
        (
            "x.shape[0] <= FEW_TOKENS",
            "x.shape[0] < FEW_TOKENS",
            "speed only: four tokens go by blocks",
        ),
        (
            "places, topk_weights.to(self.dtype))",
            "places, topk_weights.half().to(self.dtype))",
            "rounding: weights by way of fp16",
        ),
        (
            "return [*self.gate_up.tensors, *self.down.tensors]",
            "return [*self.gate_up.tensors]",
            "bytes: down is not held",
        ),
    ),
    f"{KERNELS}/ascend/few_tokens.py": (
        ("(row // top_k) * k", "(row % top_k) * k", "rows of x: another token's", "int4_gate_up"),
        ("slot + tiles", "slot + tiles - 1", "off by one: up's tile", "int4_gate_up"),
        ("tiles * 2 + tile", "tiles + tile", "head offset: gate of another expert", "fp4_gate_up"),
        ("swiglu(gate, up)", "swiglu(up, gate)", "up for gate", "fp4_gate_up"),
        (
            "range(token * top_k, token * top_k + top_k)",
            "range(token * top_k, token * top_k + top_k - 1)",
            "loops: the last expert",
            "int4_down",
        ),
        (
            "range(tl.program_id(0), items,",
            "range(tl.program_id(0), items - 1,",
            "loops: the last item",
            "fp4_down",
        ),
        (
            "tl.load(weights + row)",
            "tl.load(weights + row).to(tl.bfloat16).to(tl.float32)",
            "rounding: weights in 16 bits",
            "fp4_down",
        ),
        (
            "tl.load(weights + row)",
            "tl.load(weights + token)",
            "weights of the first choice",
            "int8_down",
        ),
        (
            "tl.load(experts + row).to(tl.int64)",
            "tl.load(experts + row)",
            "offsets in 32 bits",
            "int4_down",
        ),
        (
            "tl.load(experts + row).to(tl.int64)",
            "tl.load(experts + row)",
            "offsets in 32 bits",
            "int8_gate_up",
        ),
        ("(values + ROUNDING - ROUNDING)", "values", "rounding: cut off", "int8_row"),
        ("/ 127.0", "/ 128.0", "scale of a row", "row_scale"),
        ("tl.where(scale == 0.0, 1.0, scale)", "scale", "a row of zeros", "row_scale"),
        ("tl.abs(tl.load(", "(tl.load(", "the largest of a row without its sign", "row_scale"),
        ("range(0, k // PART)", "range(1, k // PART)", "loops: the first part", "int8_row"),
        ("mask=expert < n)", "mask=expert <= n)", "experts past the last are written", "router"),
        (
            "mask=(expert < n)[:, None], other=0.0)",
            "mask=(expert >= 0)[:, None], other=0.0)",
            "rows past the router are read",
            "router",
        ),
        (
            "first + column - top_k",
            "first + column",
            "off by one: the joined experts' numbers",
            "join",
        ),
        (
            "kept = column < columns",
            "kept = column <= columns",
            "a column past the last is written",
            "join",
        ),
        (
            "tl.where(chosen, weight, 1.0)",
            "tl.where(chosen, weight, 0.0)",
            "the joined experts' weight",
            "join",
        ),
    ),
    f"{KERNELS}/ascend/gate.py": (
        (
            "routing.n_routed_experts))",
            "routing.n_routed_experts - 1))",
            "off by one: the shared expert's number",
        ),
        ("x.contiguous(), router", "x.flip(0).contiguous(), router", "rows of x: another token's"),
    ),
    f"{KERNELS}/ascend/layout.py": (
        ("(low & 15) | (high << 4)", "(high & 15) | (low << 4)", "halves swapped"),
        (
            "global_scale = weight.global_scale.expand(n)",
            "global_scale = weight.global_scale[:1].expand(n)",
            "scales: the first row's",
        ),
    ),
    f"{KERNELS}/ascend/linear.py": (
        (
            "launch.run(dense_launch(self.packed, x.contiguous(), out))",
            "launch.run(dense_launch(self.packed, x, out))",
            "layout: x as it lies",
        ),
        ("m <= VECTOR_TOKENS", "m <= VECTOR_TOKENS - 1", "speed only: two rows go to the cube"),
    ),
}
