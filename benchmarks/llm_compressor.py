"""One llm-compressor run, in llm-compressor's own environment: python llm_compressor.py MODEL
TOKENS.json RECIPE OUT

MODEL is a BF16 checkpoint of a DeepSeek-V3, Qwen3 or Qwen3-MoE model, TOKENS a list of lists of
token ids. Recipes are the strongest found for each scheme, and their plain parts. Prints one JSON
line: seconds of the work itself.

Three faults of 0.14.0.1 are stepped around, in its favour: its AWQ mapping does not resolve where
dense and MoE layers mix, so both kinds get a mapping of their own, the router included; AWQ pins
memory for an accelerator that a CPU-only host lacks; and its loading touches alias modules of
transformers that need torchvision. It computes in float32, which is exacter than BF16, and faster
on a CPU.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.utils.dev import load_context
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*kv_b_proj$"]
"""What quantkit leaves in 16 bits too: engines need kv_b_proj as it is."""
PACK = 4096 if torch.cuda.is_available() else 512
"""Tokens side by side."""
SCHEMES = {"w4": "W4A16_ASYM", "fp4": "NVFP4A16", "w4a4": "NVFP4", "int8": "W8A8", "w4a8": "W4A8"}


def mappings(config: Any) -> list[AWQMapping]:
    """The scale groups of a DeepSeek-V3, Qwen3 or Qwen3-MoE model, dense layers apart from the
    others; routers are readers."""
    latent, layers = hasattr(config, "kv_lora_rank"), config.num_hidden_layers
    dense = (
        layers
        if not hasattr(config, "moe_intermediate_size")
        else getattr(config, "first_k_dense_replace", 0)
    )
    kinds = (
        (range(dense), ["re:.*mlp.gate_proj$", "re:.*mlp.up_proj$"]),
        (range(dense, layers), ["re:.*mlp.gate$", "re:.*gate_proj$", "re:.*up_proj$"]),
    )
    first = (
        ["re:.*q_a_proj$", "re:.*kv_a_proj_with_mqa$"]
        if latent
        else ["re:.*q_proj$", "re:.*k_proj$", "re:.*v_proj$"]
    )
    inner = (
        AWQMapping("re:.*q_a_layernorm$", ["re:.*q_b_proj$"])
        if latent
        else AWQMapping("re:.*v_proj$", ["re:.*o_proj$"])
    )
    found = [
        AWQMapping("re:.*input_layernorm$", first),
        inner,
        AWQMapping("re:.*up_proj$", ["re:.*down_proj$"]),
    ]
    for numbers, readers in kinds:
        prefix = rf"re:.*layers\.({'|'.join(map(str, numbers))})\."
        if numbers:
            found.append(
                AWQMapping(
                    f"{prefix}post_attention_layernorm$",
                    [reader.replace("re:", prefix, 1) for reader in readers],
                )
            )
    return found


def modifiers(recipe: str, model: Any) -> list[Any]:
    """w4-awq-gptq, fp4-gptq, int8-smooth-gptq, int8-nearest, ...: the grid, then the methods in
    order; a grid alone rounds to nearest."""
    grid, *methods = recipe.split("-")
    scheme = {"targets": "Linear", "scheme": SCHEMES[grid], "ignore": IGNORE}
    groups = mappings(model.config)
    found: list[Any] = []
    if "awq" in methods:
        found.append(AWQModifier(mappings=groups))
    if "smooth" in methods:
        pairs = [
            [group.balance_layers, group.smooth_layer]
            for group in groups
            if "layernorm" in group.smooth_layer
        ]
        found.append(SmoothQuantModifier(smoothing_strength=0.5, mappings=pairs))
    found.append(GPTQModifier(**scheme) if "gptq" in methods else QuantizationModifier(**scheme))
    return found


def packed(sequences: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Documents side by side, up to PACK tokens, each seeing itself alone: what one by one would
    give, at a fraction of the time."""
    parts: list[list[list[int]]] = [[]]
    for ids in sequences:
        if parts[-1] and sum(map(len, parts[-1])) + len(ids) > PACK:
            parts.append([])
        parts[-1].append(ids)
    return [_pack(part) for part in parts]


def _pack(part: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token for one in part for token in one])[None]
    positions = torch.cat([torch.arange(len(one)) for one in part])[None]
    own = torch.block_diag(*(torch.ones(len(one), len(one)).tril() for one in part)) > 0
    mask = torch.where(own, 0.0, torch.finfo(torch.float32).min)[None, None]
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}


def main() -> None:
    model_path, tokens, recipe, out = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
    )
    start = time.perf_counter()
    IntermediatesCache.pin_memory = lambda self, index: None
    for name in [
        name
        for name, module in sys.modules.items()
        if name.startswith("transformers.") and "__dir__" in vars(module)
    ]:
        del sys.modules[name]
    with load_context():
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    packs = packed(json.loads(tokens.read_text()))
    data = DataLoader(packs, batch_size=None)
    oneshot(model=model, processor=tokenizer, dataset=data, recipe=modifiers(recipe, model))
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
