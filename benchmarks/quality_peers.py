"""Others' quantizers, in their own environment: one run of one of them.

    python benchmarks/quality_peers.py llmcompressor|autoround|modelopt MODEL TOKENS.json RECIPE OUT

MODEL is a BF16 checkpoint of a DeepSeek-V3, Qwen3 or Qwen3-MoE model, TOKENS a list of lists of
token ids. quality_worker.py calls the same functions for many runs.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from core import parser

IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*kv_b_proj$"]
"""What quantkit leaves in 16 bits too: engines need kv_b_proj as it is."""
SCHEMES = {
    "w4": "W4A16_ASYM",
    "fp4": "NVFP4A16",
    "w4a4": "NVFP4",
    "mx4": "MXFP4",
    "int8": "W8A8",
    "w4a8": "W4A8",
}


def group_size(model: Any) -> int:
    """The largest of 128, 64 and 32 that divides the inputs of all linears."""
    widths = [one.in_features for one in model.modules() if isinstance(one, torch.nn.Linear)]
    return next(size for size in (128, 64, 32) if all(width % size == 0 for width in widths))


def mappings(config: Any) -> list[Any]:
    """The scale groups of a DeepSeek-V3, Qwen3 or Qwen3-MoE model, dense layers apart from the
    others; routers are readers."""
    from llmcompressor.modifiers.transform.awq import AWQMapping

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
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    grid, *methods = recipe.split("-")
    preset = preset_name_to_scheme(SCHEMES[grid], ["Linear"])
    if preset.weights.group_size == 128:
        preset.weights.group_size = group_size(model)
    scheme = {"config_groups": {"linears": preset}, "ignore": IGNORE}
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
    """Documents side by side, up to 4096 tokens on a GPU, each seeing itself alone: what one by one would
    give, at a fraction of the time."""
    room = 4096 if torch.cuda.is_available() else 512
    parts: list[list[list[int]]] = [[]]
    for ids in sequences:
        if parts[-1] and sum(map(len, parts[-1])) + len(ids) > room:
            parts.append([])
        parts[-1].append(ids)
    return [_pack(part) for part in parts]


def _pack(part: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token for one in part for token in one])[None]
    positions = torch.cat([torch.arange(len(one)) for one in part])[None]
    own = torch.block_diag(*(torch.ones(len(one), len(one)).tril() for one in part)) > 0
    mask = torch.where(own, 0.0, torch.finfo(torch.float32).min)[None, None]
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}


def llm_compressor(source: Path, tokens: Path, recipe: str, out: Path) -> None:
    """Recipes are the strongest found for each scheme, and their plain parts.

    Three faults of 0.14.0.1 are stepped around, in its favour: its AWQ mapping does not resolve
    where dense and MoE layers mix, so both kinds get a mapping of their own, the router included;
    AWQ pins memory for an accelerator that a CPU-only host lacks; and its loading touches alias
    modules of transformers that need torchvision. It computes in float32, which is more exact than
    BF16, and faster on a CPU."""
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from llmcompressor.utils.dev import load_context
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    IntermediatesCache.pin_memory = lambda self, index: None
    for name in [
        name
        for name, module in sys.modules.items()
        if name.startswith("transformers.") and "__dir__" in vars(module)
    ]:
        del sys.modules[name]
    with load_context():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    packs = packed(json.loads(tokens.read_text()))
    data = DataLoader(packs, batch_size=None)
    oneshot(model=model, processor=tokenizer, dataset=data, recipe=modifiers(recipe, model))
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    for file in out.iterdir():
        file.chmod(0o644)


# --- AutoRound

INT8_TOKENS = {
    "act_bits": 8,
    "act_group_size": -1,
    "act_data_type": "int",
    "act_dynamic": True,
    "act_sym": True,
}
FP4_INPUTS = {"act_bits": 4, "act_dynamic": True, "act_sym": True}
GRIDS = {
    "w4": {"bits": 4, "group_size": 128, "sym": False, "data_type": "int"},
    "fp4": {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp", "act_bits": 16},
    "int8": {"bits": 8, "group_size": -1, "sym": True, "data_type": "int", **INT8_TOKENS},
    "w4a8": {"bits": 4, "group_size": 128, "sym": True, "data_type": "int", **INT8_TOKENS},
    "w4a4": {
        "bits": 4,
        "group_size": 16,
        "sym": True,
        "data_type": "nv_fp",
        "act_group_size": 16,
        "act_data_type": "nv_fp4_with_static_gs",
        **FP4_INPUTS,
    },
    "mx4": {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "mx_fp",
        "act_group_size": 32,
        "act_data_type": "mx_fp",
        **FP4_INPUTS,
    },
}


def auto_round(source: Path, tokens: Path, recipe: str, out: Path) -> None:
    """Recipes are GRID-ITERATIONS, GRID-v2-ITERATIONS for the second version of its method, or
    GRID-awq-ITERATIONS for its own AWQ before it: w4
    (int4 with zero points in groups of 128 or what divides the model), fp4 (NVFP4 weights, 16-bit activations), int8 (a step
    a row, activations int8 a token), w4a8 (int4 in groups of 128, the same activations), w4a4 (NVFP4,
    activations too) and mx4 (MXFP4, activations too). OUT is a BF16 checkpoint of the decoded values;
    OUT/activations.json says how many bits the inputs of its linears have, on which grid, and which
    linears are kept. All lists of tokens have one length."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    ids = json.loads(tokens.read_text())
    grid, *version, iterations = recipe.split("-")
    length = min(map(len, ids))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    size = {"group_size": group_size(model)} if GRIDS[grid]["group_size"] == 128 else {}
    data = [
        {
            "input_ids": torch.tensor(one[:length])[None],
            "attention_mask": torch.ones(1, length, dtype=torch.int64),
        }
        for one in ids
    ]
    kept = (
        {}
        if getattr(model.config, "model_type", "") != "deepseek_v3"
        else {"ignore_layers": "kv_b_proj"}
    )
    rounding = AutoRound(
        model,
        tokenizer,
        iters=int(iterations),
        nsamples=len(data),
        seqlen=length,
        dataset=data,
        device_map=device,
        batch_size=8,
        enable_torch_compile=False,
        enable_alg_ext=version == ["v2"],
        alg_configs="awq,auto_round" if version == ["awq"] else None,
        **(GRIDS[grid] | size),
        **kept,
    )
    rounding.quantize_and_save(str(out), format="fake")
    folder = next(path.parent for path in out.rglob("config.json"))  # OUT, or one of its own in OUT
    for file in list(folder.iterdir()) if folder != out else ():
        file.rename(out / file.name)
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)  # of what was rounded; the values are plain
    (out / "config.json").write_text(json.dumps(config))
    _note_activations(out, GRIDS[grid].get("act_bits", 16), "mxfp4" if grid == "mx4" else "")


def _note_activations(out: Path, bits: int, grid: str = "") -> None:
    note = {"bits": bits, "grid": grid, "kept": ("lm_head", "kv_b_proj", "mlp.gate")}
    (out / "activations.json").write_text(json.dumps(note))


# --- ModelOpt


def model_opt(source: Path, tokens: Path, recipe: str, out: Path) -> None:
    """w4-modelopt and fp4-modelopt, by ModelOpt's AWQ with its clipping (awq_full): symmetric int4
    in the groups of `group_size`, and NVFP4 weights with 16-bit activations. OUT is a BF16
    checkpoint of the decoded values. All lists of tokens have one length."""
    import modelopt.torch.quantization as mtq
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).to(device).eval()
    weights = {"w4": mtq.INT4_AWQ_CFG, "fp4": mtq.W4A16_NVFP4_CFG}[recipe.partition("-")[0]]
    config = {**copy.deepcopy(weights), "algorithm": "awq_full"}
    for rule in config["quant_cfg"]:
        sizes = rule.get("cfg", {}).get("block_sizes", {})
        if sizes.get(-1) == 128:
            sizes[-1] = group_size(model)
    ids = json.loads(tokens.read_text())
    length = min(map(len, ids))
    batches = torch.tensor([one[:length] for one in ids]).split(8)

    @torch.no_grad()
    def forward(model: Any) -> None:
        for batch in batches:
            model(batch.to(device))

    mtq.quantize(model, config, forward)
    mtq.fold_weight(model, keep_attrs=True)
    decoded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if hasattr(module, "input_quantizer") and name != "lm_head":
            scale = getattr(module.input_quantizer, "pre_quant_scale", None)
            weight = module.weight.float() * (1 if scale is None else scale.float())
            decoded.get_submodule(name).weight.data = weight.bfloat16().cpu()
    decoded.save_pretrained(out)
    PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(out)
    _note_activations(out, 16)


PEERS = {"llmcompressor": llm_compressor, "autoround": auto_round, "modelopt": model_opt}
PACKAGES = {
    "llmcompressor": "llmcompressor",
    "autoround": "auto_round",
    "modelopt": "modelopt.torch.quantization",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("peer", choices=PEERS)
    options.add_argument("model", type=Path)
    options.add_argument("tokens", type=Path)
    options.add_argument("recipe")
    options.add_argument("out", type=Path)
    given = options.parse_args()
    PEERS[given.peer](given.model, given.tokens, given.recipe, given.out)


if __name__ == "__main__":
    main()
