"""Mutants by hand, made before anybody wrote a test for them: of what prepares calls (captured
steps, block tables, prefetching, memory, layouts of caches), and of calls and kernels, as
by_class.py has them."""

from areas import EXECUTOR, KERNELS

HOST: dict[str, tuple[tuple[str, ...], ...]] = {
    f"{EXECUTOR}/graphs.py": (
        ("        self._host.fill(0)\n", "", "stale buffer: rows of the pass before"),
        ("(columns[1] + 1).tolist()", "columns[1].tolist()", "off by one: lengths"),
        (
            "self.lengths[:] = (columns",
            "self.lengths = (columns",
            "stale buffer: the graph keeps the list it was captured with",
        ),
        (
            "part[:count] for part in result",
            "part for part in result",
            "padding rows are given back",
        ),
        ("-(-rows * width // 2)", "rows * width // 2", "bounds: an odd number of blocks"),
        (
            "part = buffer[: len(given)]",
            "part = buffer[-len(given) :]",
            "hidden states at the last rows",
        ),
        (
            "self.lengths = [1] * rows",
            "self.lengths = [0] * rows",
            "rows of no tokens before the first fill",
        ),
        (
            "        buffers, step = self._steps[size]\n        buffers.fill(rows, *inputs, "
            "places=places, kept=kept)\n",
            "        buffers, step = self._steps[size]\n",
            "stale buffer: nothing is filled",
        ),
        (
            "(self.positions + 1).tolist()",
            "self.positions.tolist()",
            "off by one: lengths of eager steps",
        ),
        (
            "        with driver.stream(stream):\n            step()",
            "        with driver.stream(stream):\n            pass",
            "no warm-up",
        ),
        (
            "if stop_prefetching():",
            "if not stop_prefetching():",
            "a failed capture: tried again where nothing was prefetched",
        ),
        ("        self.failure = told\n", "", "a failed capture is tried at every size"),
    ),
    f"{EXECUTOR}/runner.py": (
        ("block] * size + place", "block] * size + (place + 1) % size", "off by one: slots"),
        (
            "tokens)), block] * size",
            "tokens)), block - 1] * size",
            "off by one: the block of a slot",
        ),
        (
            "own is not known or len(own) != count",
            "own is not known",
            "stale buffer: a sequence's new block is not seen",
        ),
        (
            "own is not known or len(own) != count",
            "len(own) != count",
            "stale buffer: another sequence of as many blocks",
        ),
        (
            "                self._array[row, len(own) :] = 0\n",
            "",
            "blocks of the sequence before stay behind",
        ),
        (
            "positions = np.array([position for _, position in tokens], dtype=np.int64)",
            "positions = np.array([position for _, position in tokens], dtype=np.int64) - 1",
            "off by one: positions",
        ),
        (
            'if self.device.type == "npu" or experts.size > 1 else self._capture',
            'if self.device.type == "cuda" or experts.size > 1 else self._capture',
            "prompts captured on an NPU, whose attention wants lengths",
        ),
        (
            'if self._capture and self.device.type == "cuda" else None',
            "if self._capture else None",
            "draws captured on an NPU",
        ),
    ),
    f"{EXECUTOR}/prefetch.py": (
        (
            "        self._stream.wait_stream(current)\n",
            "",
            "asked for before the sum's input is there",
        ),
        (
            "        current.wait_stream(self._stream)\n",
            "",
            "a capture ends with a stream that nobody waits for",
        ),
        (
            "        with self._driver.stream(self._stream):\n            self._fetch(weights, x)",
            "        self._fetch(weights, x)",
            "on the collective's own stream",
        ),
        (
            "self._next.setdefault(self._last, held)",
            "self._next.setdefault(number, held)",
            "asked for a layer late",
        ),
        (
            "self._last, self._summed = number, False",
            "self._last, self._summed = number, True",
            "asked for without a collective",
        ),
        ("<= BUDGET", "< BUDGET", "bounds: just the budget"),
        ("held if small else []", "held", "experts are asked for whole"),
        ("BUDGET = 32 << 20", "BUDGET = 32 << 22", "bytes: more than the L2 has room for"),
        (
            'if device.type != "npu" or parallel.size == 1:',
            'if device.type != "npu":',
            "asked for where nobody sums",
        ),
        (
            "        if not weights or self not in _WORKING:\n",
            "        if not weights:\n",
            "stopping stops nothing",
        ),
        (
            "Followed(prefetcher, prolog.qkv_a, number, held)",
            "Followed(prefetcher, prolog.qkv_a, number, [])",
            "a prompt's first product not asked for",
        ),
    ),
    f"{EXECUTOR}/headroom.py": (
        (
            'if loaded.device.type == "npu":',
            'if loaded.device.type == "cuda":',
            "the cache is sized before a prompt was computed",
        ),
        ("new_cache(blocks + 1)", "new_cache(blocks)", "bounds: one block too few"),
        (
            "-(-tokens // loaded.cache_layout.block_size)",
            "tokens // loaded.cache_layout.block_size",
            "bounds: a ragged block",
        ),
        (
            "min(tokens, loaded.config.max_position_embeddings)",
            "tokens",
            "bounds: more than the model has positions",
        ),
        (
            "    return loaded.model.logits(hidden[-1:])\n",
            "    return hidden[-1:]\n",
            "the head's memory is not counted",
        ),
        (
            "minimum((free - states) // (options.ranks",
            "maximum((free - states) // (options.ranks",
            "the rank with the most memory",
        ),
        ("minimum((free - states) //", "minimum(free //", "states are not counted"),
    ),
    f"{KERNELS}/accelerator.py": (
        (
            "        driver.current_stream().synchronize()",
            "        pass",
            "told anew before the last replay has read it",
        ),
        (
            "    graph.replay()\n    if is_npu(graph):\n        graph.update",
            "    if is_npu(graph):\n        graph.update",
            "never replayed",
        ),
        (
            '[{"actual_seq_lengths_kv": list(lengths)}]',
            '[{"actual_seq_lengths_kv": [1 for _ in lengths]}]',
            "stale buffer: lengths of the capture",
        ),
        (
            'options["auto_dispatch_capture"] = True',
            'options["auto_dispatch_capture"] = False',
            "operators that cannot be told",
        ),
        (
            '[{"actual_seq_lengths_kv": list(lengths)}]',
            '[{"actual_seq_lengths": list(lengths)}]',
            "the queries' lengths for the keys'",
        ),
    ),
    f"{KERNELS}/paged.py": (
        (
            "unflatten(-1, (-1, 2)).transpose",
            "unflatten(-1, (2, -1)).transpose",
            "order: pairs put together for apart",
        ),
        (
            "cos.repeat(1, 2).to(dtype)",
            "cos.repeat_interleave(2, dim=1).to(dtype)",
            "order: angles of neighbours",
        ),
        ("sin.repeat(1, 2).to(dtype)", "(-sin).repeat(1, 2).to(dtype)", "wrong sign: turned back"),
    ),
    f"{KERNELS}/torch_npu/functional.py": (
        (
            '"k_group": routing.topk_group',
            '"k_group": routing.n_group',
            "wrong scalar: all groups are kept",
        ),
        ('"group_count": routing.n_group', '"group_count": 1', "wrong scalar: one group"),
        ('"bias": bias,', '"bias": None,', "swapped operands: no bias"),
        ("weights, ids, _ = call", "_, ids, weights = call", "wrong output: all scores"),
        (
            "if rotation.interleaved else angles.repeat(1, 2)",
            "if not rotation.interleaved else angles.repeat(1, 2)",
            "order: of doubled angles",
        ),
        (
            '"interleave" if rotation.interleaved else "half"',
            '"half" if rotation.interleaved else "interleave"',
            "the other mode",
        ),
        ("kv_lora + rope_dim,), 128)", "kv_lora + rope_dim,), 64)", "blocks of 64"),
        (
            "return rms_norm(q_a, norms.q, norms.eps)",
            "return rms_norm(q_a, norms.q, 1e-6)",
            "wrong default epsilon",
        ),
        (
            "seq_lens.tolist() if lengths is None else lengths",
            "seq_lens.tolist()",
            "the host waits for lengths it has",
            "attend",
        ),
        (
            '"scale": scale,',
            '"scale": kv_lora**-0.5,',
            "wrong scalar: the latent's width",
            "attend",
        ),
        ("[:, None], 0.0)", "[:, None], 1.0)", "rows of no tokens: ones", "attend"),
        (
            "Rotation(cos[positions], sin[positions], interleaved)",
            "Rotation(sin[positions], cos[positions], interleaved)",
            "sine for cosine",
        ),
        (
            "query, keys = absorbed, cache[0].unsqueeze(1)",
            "query, keys = absorbed, cache[1].unsqueeze(1)",
            "keys for latents",
        ),
        (
            "slots, keys, latents, epsilon",
            "slots, latents, keys, epsilon",
            "swapped operands: caches",
        ),
    ),
    f"{KERNELS}/torch_npu/calls.py": (
        ("quant_mode=1 if quantize else -1", "quant_mode=-1 if quantize else 1", "codes for rows"),
        (
            "zip(names, scales)",
            "zip(names, scales[::-1])",
            "swapped operands: scales of the prolog",
            "mla_prolog",
        ),
        (
            "config.allow_internal_format = True",
            "config.allow_internal_format = False",
            "internal layouts refused",
        ),
        ("for tensor in tensors:", "for tensor in tensors[:1]:", "bytes: the first tensor alone"),
        (
            "row_scale, output_dtype=dtype)",
            "row_scale, output_dtype=torch.bfloat16)",
            "wrong dtype: bf16 whatever was asked",
        ),
        (
            'result: Tensor = call("npu_moe_finalize_routing", rows, None, None, None, weights, '
            "places, None, drop_pad_mode=2)",
            'result: Tensor = call("npu_moe_finalize_routing", rows, None, None, None, '
            "weights.flip(1), places, None, drop_pad_mode=2)",
            "swapped operands: weights of other experts",
        ),
        (
            'call("npu_format_cast", weight, FRACTAL_NZ)',
            'call("npu_format_cast", weight, 2)',
            "layout: cast to ND",
        ),
    ),
    f"{KERNELS}/torch_npu/experts.py": (
        (
            "return (carriers, scale[0], offset[0])",
            "return (carriers, scale[0], -offset[0])",
            "wrong sign: offsets per channel",
        ),
        (
            "per_channel = scale.shape[0] == 1",
            "per_channel = scale.shape[0] <= 2",
            "off by one: two groups for one",
        ),
        (
            "torch.empty(self._num_experts, *tensor",
            "torch.empty(self._num_experts + 1, *tensor",
            "bytes: room for one expert more",
        ),
        (
            'named["per_token_scale"] = row_scale',
            'named["per_token_scale"] = row_scale.flip(0)',
            "scales of other rows",
        ),
        (
            'quantized = self.grid == "int8"',
            "quantized = self.gate_up[0].dtype == torch.int8",
            "W4A8: rows are not quantized",
        ),
        (
            "torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32",
            "torch.float32",
            "wrong dtype: fp32 scales for bf16",
        ),
        ("topk_ids.to(torch.int32)", "topk_ids", "wrong dtype: ids as they come"),
    ),
    f"{KERNELS}/torch_npu/linear.py": (
        (
            "weight.codes.to(torch.int8).chunk(2, dim=1)",
            "weight.codes.to(torch.int8).chunk(2, dim=0)",
            "wrong axis: halves of rows",
        ),
        (
            "return quant_matmul(codes, row_scale, self.weight, self.scale, self.dtype)",
            "return quant_matmul(codes, row_scale, self.weight, self.scale, "
            "torch.bfloat16).to(self.dtype)",
            "rounding: by way of bf16",
        ),
        ("_RESCALE = 2.0**22", "_RESCALE = 2.0**21", "wrong scalar"),
    ),
    f"{KERNELS}/torch_npu/layout.py": (
        ("unflatten(-1, (-1, CARRIED)) & 15", "unflatten(-1, (-1, CARRIED)) & 7", "signs lost"),
        (
            "torch.zeros_like(scale) if",
            "torch.ones_like(scale) if",
            "wrong default: an offset of one",
        ),
        ("bias = 8 * weight", "bias = -8 * weight", "wrong sign: W4A8's bias"),
        ("bias = 8 * weight", "bias = 7 * weight", "wrong scalar: W4A8's bias"),
        (
            "weight.codes.double().sum(dim=1) * scale.double()",
            "weight.codes.sum(dim=1, dtype=torch.int8) * scale.double()",
            "W4A8's sums in 8 bits",
        ),
        (
            "scale.view(torch.int32).to(torch.int64)",
            "scale.to(torch.int64)",
            "wrong dtype: W4A8's scales as numbers",
        ),
        ("k <= NARROW_INPUTS", "k < NARROW_INPUTS", "bounds: the most inputs of W4A8"),
    ),
    f"{KERNELS}/torch_npu/grouped.py": (
        (
            '"num_key_value_heads": keys.shape[2]',
            '"num_key_value_heads": q.shape[1]',
            "wrong scalar: heads",
        ),
        ('"scale": scale', '"scale": 1.0', "wrong default: no scale"),
        (
            "keys.flatten(2), values.flatten(2)",
            "values.flatten(2), keys.flatten(2)",
            "swapped operands: values for keys",
        ),
        ("[:, None, None], 0.0)", "[:, None, None], 1.0)", "rows of no tokens: ones"),
    ),
    f"{KERNELS}/torch_npu/prolog.py": (
        (
            "return q_a.scale, q_b.scale, kv_a.scale",
            "return q_a.scale, kv_a.scale, q_b.scale",
            "swapped operands: scales",
        ),
        ("self._in_model_order(self._kv_a(x), 1)", "self._kv_a(x)", "order: prefill's keys"),
    ),
    f"{KERNELS}/torch_npu/machine.py": (
        (
            "{limit['cube_core_num']} cube, {limit['vector_core_num']}",
            "{limit['vector_core_num']} cube, {limit['cube_core_num']}",
            "swapped: cores",
        ),
    ),
    f"{KERNELS}/ascend/launch.py": (
        ('{"BK": max(width, 8)}', '{"BK": 8}', "bounds: nine columns in eight"),
        (
            "packed.n, packed.k, *_groups(packed), experts.shape[0] // x.shape[0])",
            "packed.n, packed.k, *_groups(packed), x.shape[0])",
            "wrong scalar: tokens for choices",
        ),
        ("x.shape[0] // out.shape[0])", "out.shape[0])", "wrong scalar: tokens for choices, down"),
        (
            "-(-experts // rows_of_tile)",
            "experts // rows_of_tile",
            "bounds: the router's ragged tile",
        ),
        ("(packed.k // packed.group,)", "(packed.n // packed.group,)", "wrong axis: groups of n"),
    ),
    f"{KERNELS}/ascend/experts.py": (
        (
            "bound = rows // EXPERT_BLOCK_ROWS + min(rows, counts.shape[0])",
            "bound = rows // EXPERT_BLOCK_ROWS + min(rows, counts.shape[0]) - 1",
            "bounds: a block too few",
        ),
        (
            'scale if packed.kind == "int8" else None, blocks',
            'scale.flip(0) if packed.kind == "int8" else None, blocks',
            "scales of other rows",
        ),
        (
            "codes, scale = dynamic_quant(activated) if",
            "codes, _ = dynamic_quant(activated) if",
            "the scales of x for those of its product",
        ),
        ('quantized = self.down.kind == "int8"', "quantized = False", "rows are not quantized"),
    ),
    f"{KERNELS}/ascend/gate.py": (
        (
            "x.shape[1] % ROUTER_TILE[1]",
            "x.shape[1] % ROUTER_TILE[0]",
            "bounds: widths of ragged steps",
        ),
        ("    if len(ids):\n", "    if True:\n", "rows of no tokens"),
        (
            "if not 0 < len(x) <= FEW_TOKENS",
            "if not len(x) <= FEW_TOKENS",
            "rows of no tokens, the product",
        ),
    ),
    f"{KERNELS}/ascend/layout.py": (
        (
            "-values.shape[0] % bn))",
            "bn - values.shape[0] % bn))",
            "bounds: a tile of padding where none is needed",
        ),
        (
            "weight.global_scale.expand(n).unsqueeze(1) * FP4_RESCALE",
            "weight.global_scale.expand(n).unsqueeze(1) / FP4_RESCALE",
            "wrong scalar",
        ),
        (
            "room[index].copy_(part)",
            "room[0].copy_(part)",
            "kept from before: every expert at the first's place",
        ),
    ),
    f"{KERNELS}/ascend/linear.py": (
        (
            "torch.arange(0, m, bm, dtype",
            "torch.arange(0, m - bm + 1, bm, dtype",
            "bounds: the ragged block",
        ),
        (".clamp(max=m)", "", "bounds: rows past the last"),
    ),
    f"{KERNELS}/ascend/kernels.py": (
        (
            "tile_zero = zero_point + slot * groups * BN\n    acc",
            "tile_zero = zero_point + slot * BN\n    acc",
            "wrong stride: zero points",
        ),
        (
            "tile_scale = scale + slot * spans * (2 * HALF // FP4_GROUP) * BN\n    acc",
            "tile_scale = scale + slot * spans * 2 * BN\n    acc",
            "wrong stride: scales",
        ),
        ("steps = k // BK\n", "steps = k // BK - 1\n", "bounds: the last step", "int8_blocks"),
        (
            "x_block = x + row[:, None] * k + inner[None, :]",
            "x_block = x + row[:, None] * n + inner[None, :]",
            "wrong stride: rows of x",
        ),
        (
            "tl.load(x_row + span * 2 * HALF + HALF + half)",
            "tl.load(x_row + span * 2 * HALF + half)",
            "swapped halves of x",
        ),
    ),
    f"{KERNELS}/ascend/few_tokens.py": (
        ("(1.0 + tl.exp(-gate))", "(1.0 + tl.exp(gate))", "wrong sign"),
        (
            "product = int4_row(x + row * k,",
            "product = int4_row(x + token * k,",
            "rows of x: a token's first",
        ),
        (
            "row_scale(x_row, k), weight, scale, slot, k, BN) * tl.load",
            "row_scale(x, k), weight, scale, slot, k, BN) * tl.load",
            "scales: the first row's",
            "int8_down",
        ),
        (
            "tl.load(x + token * k + step * BK + inner)",
            "tl.load(x + step * BK + inner)",
            "rows of x: the first token's",
            "router",
        ),
    ),
    "kernels/ascendc/fp4_gemv.cpp": (
        (
            "const uint16_t gap = static_cast<uint16_t>(t.k * sizeof(bfloat16_t) / 32 - burst);",
            "const uint16_t gap = static_cast<uint16_t>(t.k * sizeof(bfloat16_t) / 32);",
            "wrong stride: rows of x",
        ),
        (
            "const uint32_t tiles = t.k / TILE_K / t.splits;",
            "const uint32_t tiles = t.k / TILE_K;",
            "bounds: every part is all of K",
        ),
        (
            "xGm[static_cast<uint64_t>(item.firstRow) * t.k + k3 * TILE_K]",
            "xGm[static_cast<uint64_t>(item.firstRow) * t.k]",
            "the first x for all",
        ),
        (
            "columnTiles + n3) * (t.k / TILE_K) + k3;",
            "columnTiles + n3) * (t.k / TILE_K) + k3 + 1;",
            "off by one: the next tile",
        ),
        ("Duplicate(acc, 0.0f, count);", "", "stale buffer: sums of the item before"),
        (
            "globalScaleGm[static_cast<uint64_t>(item.expert) * t.n + n3 * TILE_N]",
            "globalScaleGm[n3 * TILE_N]",
            "scales: the first expert's",
        ),
        (
            "y, acc, RoundMode::CAST_RINT, count",
            "y, acc, RoundMode::CAST_TRUNC, count",
            "rounding: cut off",
        ),
    ),
    "kernels/ascendc/int4_grouped.cpp": (
        (
            "        Duplicate(accBuffer.Get<float>(), 0.0f, item.rows * HALF_N);  // read behind "
            "the barriers of Decode\n",
            "",
            "stale buffer: sums of the item before",
        ),
        (
            "(t.n / TILE_N) + item.part) * groups + group) * 2 + side",
            "(t.n / TILE_N) + item.part) * groups + group) * 2 + 1 - side",
            "swapped halves",
        ),
        (
            "factorsGm[(static_cast<uint64_t>(item.firstRow) * 2 + kind) * groups * 8]",
            "factorsGm[(static_cast<uint64_t>(item.firstRow) + kind) * groups * 8]",
            "wrong stride: factors",
        ),
        ("static_cast<uint16_t>(2 * t.k),", "static_cast<uint16_t>(t.k),", "wrong stride: digits"),
        (
            "product.cmatrixInitVal = true;",
            "product.cmatrixInitVal = false;",
            "stale buffer: the cube adds to what was there",
        ),
        ("out.srcStride = FRACTAL_ROWS;", "out.srcStride = MAX_ROWS;", "wrong stride: sums"),
        (
            "item.part * TILE_N + side * HALF_N], y,",
            "item.part * TILE_N], y,",
            "both halves at the first, results",
        ),
        (
            "DataCopy(digits[which * MAX_ROWS * 32], digitsGm[",
            "DataCopy(digits[(1 - which) * MAX_ROWS * 32], digitsGm[",
            "swapped digits",
        ),
        (
            "        CrossCoreSetFlag<2, PIPE_MTE3>(FULL + slot);",
            "        CrossCoreSetFlag<2, PIPE_MTE2>(FULL + slot);",
            "told before it is written",
        ),
        (
            "        CrossCoreSetFlag<2, PIPE_FIX>(DONE + slot);",
            "        CrossCoreSetFlag<2, PIPE_MTE2>(DONE + slot);",
            "told before sums are written",
        ),
        (
            "Sub(value, value, digit, static_cast<int32_t>(count));",
            "Add(value, value, digit, static_cast<int32_t>(count));",
            "wrong sign: second digits",
        ),
    ),
}
