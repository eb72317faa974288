"""Mutants by hand of a second audit of 23 November, of kinds and places that the other tables leave
out, run once before a test was written
for any: devices, what an operator says that it needs, checks of the binding, ends of ranges, what
is tried before what."""

from areas import KERNELS

SECOND_AUDIT: dict[str, tuple[tuple[str, ...], ...]] = {
    f"{KERNELS}/torch_npu/calls.py": (
        (
            "active_num=expert_ids.numel()",
            "active_num=expert_ids.shape[0]",
            "one expert of a token alone",
        ),
        ("drop_pad_mode=2)", "drop_pad_mode=0)", "indices by expert"),
        (
            "_dispatch_has_kernel(operator) and torch",
            "_dispatch_has_kernel(operator) or torch",
            "an operator that another device has",
        ),
        (
            "    assert (broken := violated(name, bind(name, args, kwargs))) is None, broken\n",
            "    bind(name, args, kwargs)\n",
            "called whatever the rules say",
        ),
        ("[0, num_experts]", "[0, num_experts - 1]", "the last expert left out"),
    ),
    f"{KERNELS}/torch_npu/functional.py": (
        ("replace(routing, num_joined_experts=0)", "routing", "the shared experts' columns twice"),
        (
            "if divides != routing.norm_topk_prob or violated(",
            "if violated(",
            "weights divided that are not to be",
        ),
        ("x.numel() == 0 or violated(operator", "violated(operator", "nothing to turn"),
        (
            "torch.bmm(x.permute(order), weight)",
            "torch.bmm(x.permute(1, 0, 2), weight)",
            "heads for tokens where torch multiplies",
        ),
        (
            "attended[..., :kv_lora].transpose",
            "attended[..., -kv_lora:].transpose",
            "the last channels for values",
        ),
        ("known = list(seq_lens", "known = tuple(seq_lens", "lengths that a graph cannot be told"),
        ("and dtype in HALVES", "", "float32 in two tensors"),
        (
            "(LATENT, ROPE) and dtype",
            "(LATENT, 2 * ROPE) and dtype",
            "one tensor at the sizes of the operators",
        ),
        (
            "route(F.linear(x.float(), router), bias",
            "route(F.linear(x, router.to(x.dtype)), bias",
            "scores in 16 bits",
        ),
    ),
    f"{KERNELS}/torch_npu/grouped.py": (
        ('"block_size": keys.shape[1]', '"block_size": 128', "another block size"),
        ("window or scales is not None or violated", "window or violated", "codes taken for keys"),
        (
            "prompts, scale, rotation.interleaved,",
            "prompts, scale, True,",
            "pairs of the other kind",
        ),
        (
            "cache, prompts, scale, window, own",
            "cache, prompts, scale, 0, own",
            "a prompt without its window",
        ),
        (
            "gqa_prepare(qkv, norms, rotation, cache, slots, STEPS)",
            "gqa_prepare(qkv, None, rotation, cache, slots, STEPS)",
            "heads not normed",
        ),
    ),
    f"{KERNELS}/torch_npu/linear.py": (
        (
            "self.global_scale = (weight.global_scale * _RESCALE)",
            "self.global_scale = (weight.global_scale.flatten()[:1] * _RESCALE)",
            "the first row's global scale for all",
        ),
        (
            "    placed = to_device(weight, device)\n    if isinstance(placed, Int4)",
            "    placed = weight\n    if isinstance(placed, Int4)",
            "device",
        ),
        (
            "    placed = to_device(weight, device)\n"
            "    if isinstance(placed, Int8):\n"
            "        return Int8Linear(placed, dtype, device)\n"
            "    assert",
            "    placed = weight\n    if isinstance(placed, Int8):\n        return "
            "Int8Linear(placed, dtype, device)\n    assert",
            "device",
        ),
    ),
    f"{KERNELS}/torch_npu/experts.py": (
        (
            "gate_up[0].shape[0], hidden, intermediate, dtype, device",
            "gate_up[0].shape[0], intermediate, hidden, dtype, device",
            "sizes swapped",
        ),
        (
            "self._intermediate, self._hidden = shape(gate)",
            "self._hidden, self._intermediate = shape(gate)",
            "sizes swapped, at placing",
        ),
        ("dtype=tensor.dtype, device=self._device)", "dtype=tensor.dtype)", "room on the host"),
        (
            "    def held(self) -> list[Tensor]:\n        return [*self.gate_up, *self.down]",
            "    def held(self) -> list[Tensor]:\n        return [self.gate_up[0], self.down[0]]",
            "scales are not held",
        ),
    ),
    f"{KERNELS}/torch_npu/layout.py": (
        (
            "return n % CARRIED == 0 and k <=",
            "return n % CARRIED == 0 or k <=",
            "either bound is enough",
        ),
        (
            "weight.scale.flatten()\n    bias",
            "weight.scale.flatten().bfloat16().float()\n    bias",
            "W4A8's scales in 16 bits",
        ),
    ),
    f"{KERNELS}/torch_npu/prolog.py": (
        ("len(set(kinds)) > 1 or kinds[0]", "kinds[0]", "kinds of weight mixed"),
        (
            "super().__init__(weights.kv_b.to(device)",
            "super().__init__(weights.kv_b",
            "W_UK on the host",
        ),
        (
            "(weights.q_norm.to(device), weights.kv_norm.to(device))",
            "(weights.q_norm, weights.kv_norm)",
            "gains on the host",
        ),
        (
            "made_for = (PROLOG_HIDDEN, PROLOG_Q_LORA,",
            "made_for = (PROLOG_HIDDEN, range(1, 10000),",
            "any low rank",
        ),
        (
            "return values(attend(absorbed, q_pe, pages, scale), self.kv_b, self.nope)",
            "return values(attend(absorbed, q_pe, pages, scale), self.kv_b, 128)",
            "heads of 128 whatever they are",
        ),
    ),
    f"{KERNELS}/torch_npu/__init__.py": (
        (
            '("npu_dynamic_quant", "npu_quant_matmul", "npu_format_cast"),\n    "linear_fp4"',
            '("npu_dynamic_quant", "npu_quant_matmul"),\n    "linear_fp4"',
            "the cast is not asked for",
        ),
        (
            '_GROUPED = ("npu_moe_init_routing_v2", "npu_grouped_matmul",',
            '_GROUPED = ("npu_moe_init_routing_v2",',
            "the grouped product is not asked for",
        ),
        (
            'operator.startswith(("linear_", "experts_")) and not operator.endswith("_dense")',
            'operator.startswith("linear_") and not operator.endswith("_dense")',
            "experts in float32",
        ),
    ),
    f"{KERNELS}/torch_npu/machine.py": (
        (
            '"driver": version_in(DRIVER)',
            '"driver": torch.__version__',
            "another version for the driver's",
        ),
        ("npu.get_device_name(index)", "npu.get_device_name(0)", "the first card's name"),
    ),
    f"{KERNELS}/ascend/kernels.py": (
        (
            "    for rest in range(block, blocks):",
            "    for rest in range(block + 1, blocks):",
            "one block is left as it was",
        ),
        (
            "* group_sums(x_high, GROUP)[:, None]",
            "* group_sums(x_low, GROUP)[:, None]",
            "the other half's sums",
            "int4_row",
        ),
        (
            "by_group(high, FP4_GROUP, BN) * e4m3_values(tile_scale + second)",
            "by_group(high, FP4_GROUP, BN) * e4m3_values(tile_scale + first)",
            "the other half's scales",
            "fp4_blocks",
        ),
        (
            "rows = tl.load(row_scale + row,",
            "rows = tl.load(row_scale + row - tl.load(begin + block),",
            "the first block's scales",
            "int8_blocks",
        ),
    ),
    f"{KERNELS}/ascend/few_tokens.py": (
        (
            "ROUNDING = tl.constexpr(12582912.0)",
            "ROUNDING = tl.constexpr(8388608.0)",
            "negative values are not rounded",
        ),
        (
            "codes = (values + ROUNDING - ROUNDING).to(tl.int32)",
            "codes = (values + 0.5).to(tl.int32)",
            "halves away, negative values up",
        ),
        (
            "tl.max(largest, axis=0) / 127.0",
            "tl.max(largest, axis=0) * 0.0078125",
            "another largest code",
        ),
        (
            "x_row = x + row * k\n            total",
            "x_row = x + token * k\n            total",
            "one row for all",
            "int8_down",
        ),
        (
            "tl.load(scale + slot * BN + column)",
            "tl.load(scale + slot * BN)",
            "one scale a tile",
            "int8_row",
        ),
    ),
    f"{KERNELS}/ascend/launch.py": (
        ('KernelLaunch("assign", 1,', 'KernelLaunch("assign", 2,', "two programs write the same"),
        ('"router", min(items, cores(x.device)[1])', '"router", items', "more programs than cores"),
        (
            '"join", min(tokens, cores(ids.device)[1])',
            '"join", tokens',
            "more programs than cores, join",
        ),
        (
            '_down", min(items, cores(x.device)[1])',
            '_down", min(items, cores(x.device)[0])',
            "programs of the cube cores",
        ),
        (
            "items = out.shape[0] * packed.tiles // 2",
            "items = out.shape[0] * packed.tiles",
            "items twice",
            "gate_up",
        ),
    ),
    f"{KERNELS}/ascend/gate.py": (
        ("or x.dtype not in HALVES", "", "rows of 32 bits by the router of 16"),
        ("<= FEW_TOKENS or", "<= FEW_TOKENS + 1 or", "five tokens by the router of four"),
    ),
    f"{KERNELS}/ascend/streamed.py": (
        (
            "min(len(rows), len(ends)) * self.n / 512",
            "len(rows) * self.n / 512",
            "items of rows, not of experts",
        ),
        ("dtype=part.dtype, device=self._device)", "dtype=part.dtype)", "room on the host"),
        (
            "weight.global_scale.expand(n) * FP4_RESCALE",
            "weight.global_scale[:1].expand(n) * FP4_RESCALE",
            "the first row's global scale",
        ),
        (
            "topk_weights.to(self.dtype))",
            "topk_weights.half().to(self.dtype))",
            "rounding: weights by way of fp16",
        ),
    ),
    f"{KERNELS}/ascend/__init__.py": (
        (
            "dtype, device) and streamed.fits(down, dtype, device)",
            "dtype, device)",
            "down is not asked",
        ),
        (
            "streamed.fits(stack(gate, gate), dtype, device)",
            "streamed.fits(gate, dtype, device)",
            "gate alone for gate and up",
        ),
        (
            "if shape is not None and shape[1] % SPAN:",
            "if shape is not None and shape[0] % SPAN:",
            "multiples of outputs",
        ),
    ),
    f"{KERNELS}/ascend/chip.py": (
        (
            "BLOCK_ROWS = (16, 32, 64, 128)",
            "BLOCK_ROWS = (16, 32, 64, 256)",
            "a block that a core has no room for",
        ),
        ("device.index or 0", "0", "the first card's cores"),
    ),
    "kernels/ascendc/fp4_gemv.cpp": (
        (
            "pipe.InitBuffer(accBuffer, MAX_ROWS * HALF * sizeof(float));",
            "pipe.InitBuffer(accBuffer, HALF * sizeof(float));",
            "room for one row",
        ),
        (
            "pipe.InitBuffer(xBlockBuffer, MAX_ROWS * TILE_K * 16 * sizeof(float));",
            "pipe.InitBuffer(xBlockBuffer, MAX_ROWS * TILE_K * 8 * sizeof(float));",
            "half of x's room",
        ),
        (
            "DataCopy(partialGm[PartialOffset(item.number, n3, split)], sum, item.rows * TILE_N);",
            "DataCopy(partialGm[PartialOffset(item.number, n3, split)], sum, TILE_N);",
            "one row sent",
        ),
        (
            "blocks.part / t.splits, blocks.part % t.splits",
            "blocks.part % columnTiles, blocks.part / columnTiles",
            "same items, other order",
        ),
    ),
    "kernels/ascendc/int4_grouped.cpp": (
        (
            "const uint32_t vectors = GetBlockNum() * 2;",
            "const uint32_t vectors = GetBlockNum();",
            "digits made twice",
        ),
        (
            "        DataCopy(tile, slotsGm[(static_cast<uint64_t>(GetBlockIdx()) * SLOTS + slot) "
            "* SLOT], SLOT);\n"
            "        slotQueue.EnQue(tile);\n"
            "        CrossCoreSetFlag<2, PIPE_MTE2>(FREE + slot);",
            "        CrossCoreSetFlag<2, PIPE_MTE2>(FREE + slot);\n"
            "        DataCopy(tile, slotsGm[(static_cast<uint64_t>(GetBlockIdx()) * SLOTS + slot) "
            "* SLOT], SLOT);\n"
            "        slotQueue.EnQue(tile);",
            "free before it is read",
        ),
        (
            "        DataCopy(arrived[count], sumsGm[from + MAX_ROWS * TILE_N], params);\n"
            "        sumQueue.EnQue(arrived);\n"
            "        CrossCoreSetFlag<2, PIPE_MTE2>(TAKEN - slot * TAKEN_STEP);",
            "        CrossCoreSetFlag<2, PIPE_MTE2>(TAKEN - slot * TAKEN_STEP);\n"
            "        DataCopy(arrived[count], sumsGm[from + MAX_ROWS * TILE_N], params);\n"
            "        sumQueue.EnQue(arrived);",
            "taken before the second half",
        ),
        (
            "pipe.InitBuffer(factorQueue, 2, MAX_ROWS * groups * 8 * sizeof(float));",
            "pipe.InitBuffer(factorQueue, 1, MAX_ROWS * groups * 8 * sizeof(float));",
            "room for one kind of factor",
        ),
        (
            "Cast(y, accBuffer.Get<float>(), RoundMode::CAST_RINT,",
            "Cast(y, accBuffer.Get<float>(), RoundMode::CAST_TRUNC,",
            "rounding: cut off",
        ),
        (
            "const Nd2NzParams rows{1, static_cast<uint16_t>(item.rows),",
            "const Nd2NzParams rows{1, static_cast<uint16_t>(MAX_ROWS),",
            "rows past the item's",
        ),
        (
            "static_cast<uint16_t>(groups), static_cast<uint16_t>(groups), 0)",
            "static_cast<uint16_t>(groups), 0, 0)",
            "factors of the next kind",
        ),
        (
            "SendFactors(digit, row, 0, first, groups);",
            "SendFactors(digit, row, 0, 0, groups);",
            "scales of later chunks at the first",
        ),
    ),
    "kernels/ascendc/binding.cpp": (
        (
            "k % 128 == 0 && k <= 8192 && weight",
            "k % 128 == 0 && weight",
            "more inputs than buffers hold",
        ),
        ("k <= 8192 && weight.size(2) == k / 128", "k <= 8192", "narrower rows than the weight"),
        (
            "group_list.scalar_type() == at::kLong && group_list.size(0) == weight.size(0)",
            "group_list.scalar_type() == at::kLong",
            "fewer ends than experts",
        ),
        ("splits > 0 && k / 64 % splits == 0", "splits > 0", "parts that leave a rest"),
        (
            "k % 64 == 0 && weight.size(2) == k / 64",
            "k % 64 == 0",
            "narrower rows than the weight, FP4",
        ),
        (
            "weight.is_contiguous() && group_list.is_contiguous()",
            "group_list.is_contiguous()",
            "a weight as it lies",
        ),
        ("{rows, 2, k / 128, 8}", "{rows, 1, k / 128, 8}", "scratch: one kind of factor"),
        ("{rows, 2, k}", "{rows, 1, k}", "scratch: one digit"),
        (
            "cores, c10_npu::getCurrentNPUStream().stream(false), x.data_ptr(), weight.data_ptr(), "
            "scale",
            "2 * cores, c10_npu::getCurrentNPUStream().stream(false), x.data_ptr(), "
            "weight.data_ptr(), scale",
            "more programs than cores",
        ),
    ),
    "kernels/ascendc/amla.py": (
        (
            "np.full((rows, 1), np.iinfo(np.int16).min, dtype=np.int32)",
            "np.zeros((rows, 1), dtype=np.int32)",
            "scores far below zero vanish",
        ),
        (
            "np.rint(scores.max(axis=1, keepdims=True))",
            "np.rint(scores.max())",
            "one power for all rows",
        ),
        ("        if length:\n", "        if length > 1:\n", "rows of one token"),
    ),
    "kernels/ascendc/int4_grouped.py": (
        (
            "np.maximum(np.abs(groups).max(axis=-1), _LEAST)",
            "np.abs(groups).max(axis=-1) + _LEAST",
            "the least added",
        ),
        (
            "np.float32(127) / largest",
            "np.float32(128) / largest",
            "a digit that int8 does not hold",
        ),
    ),
}
