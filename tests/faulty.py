"""Faults of a checkpoint, made on purpose: each changes one thing of a good one, and says what a diagnosis must find, and how deep.

    for fault in FAULTS:
        if fault.suits(contents): fault.apply(contents); contents.write(folder)

`replays` names the public thread that it is taken from, where there is one.
"""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.quant.weights import dequantize
from quantkit.schemes import IntGrid

SHARD = "model-{:05d}-of-00002.safetensors"


@dataclass
class Contents:
    """A checkpoint in memory. format: of the good one. linears: its quantized modules and their formats."""

    path: Path
    config: dict[str, Any]
    files: dict[str, bytes]
    tensors: dict[str, Tensor]
    format: Any
    linears: dict[str, Any]
    broken: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> "Contents":
        checkpoint = Checkpoint.open(path)
        tensors = {}
        for shard in sorted(path.glob("*.safetensors")):
            with safe_open(shard, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        names = [file for file in path.iterdir() if file.suffix in (".json", ".jinja") and "index" not in file.name]
        files = {file.name: file.read_bytes() for file in names if file.name not in ("config.json", "manifest.json")}
        return cls(path, checkpoint.config, files, tensors, checkpoint.format, dict(checkpoint.linears))

    def copy(self) -> "Contents":
        return Contents(self.path, copy.deepcopy(self.config), dict(self.files), dict(self.tensors), self.format, dict(self.linears))

    def write(self, folder: Path) -> Path:
        """Two shards, an index, and the files; then what breaks them."""
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        names = list(self.tensors)
        halves = {SHARD.format(1): names[: len(names) // 2], SHARD.format(2): names[len(names) // 2 :]}
        for shard, own in halves.items():
            save_file({name: self.tensors[name].contiguous().clone() for name in own}, folder / shard, metadata={"format": "pt"})
        total = sum(tensor.nbytes for tensor in self.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": {name: shard for shard, own in halves.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        for breaks in self.broken.values():
            breaks(folder)
        return folder

    # --- what faults ask -------------------------------------------------------------------------------------------------

    @property
    def block(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def experts(self) -> list[str]:
        """Prefixes of the routed experts of the last layer but MTP that has them."""
        found = sorted({m[1] for name in self.tensors if (m := re.match(r"(model\.layers\.\d+\.mlp\.experts\.\d+)\.", name))}, key=_numbers)
        layers = [p for p in found if int(p.split(".")[2]) < self.config["num_hidden_layers"]]
        return [p for p in layers if p.split(".")[2] == layers[-1].split(".")[2]] if layers else []

    @property
    def mtp(self) -> list[str]:
        layer = f"model.layers.{self.config['num_hidden_layers']}."
        return [name for name in self.tensors if name.startswith(layer)]

    def linear(self, ending: str = "down_proj") -> str:
        """A quantized linear of a middle layer."""
        found = sorted((m for m in self.linears if m.endswith(ending) and "shared" not in m), key=_numbers)
        inner = [m for m in found if int(m.split(".")[2]) < self.config["num_hidden_layers"]]
        return (inner or found)[len(inner or found) // 2]

    def parts(self, module: str) -> list[str]:
        return [name for name in self.tensors if name.rpartition(".")[0] == module]

    def swap(self, one: str, other: str) -> None:
        """Exchange all tensors under two prefixes."""
        ours = {n: t for n, t in self.tensors.items() if n.startswith(f"{one}.")}
        theirs = {n: t for n, t in self.tensors.items() if n.startswith(f"{other}.")}
        for name, tensor in ours.items():
            self.tensors[other + name.removeprefix(one)] = tensor
        for name, tensor in theirs.items():
            self.tensors[one + name.removeprefix(other)] = tensor

    def plain(self, module: str) -> None:
        """Replace a quantized linear by its values in BF16."""
        linear = self.linears.pop(module)
        weight = linear.format.unpack(module, {name: self.tensors[name] for name in linear.tensors})
        for name in self.parts(module):
            del self.tensors[name]
        self.tensors[f"{module}.weight"] = dequantize(weight, torch.bfloat16)

    def json(self, name: str) -> dict[str, Any]:
        return json.loads(self.files[name])

    def set_json(self, name: str, value: dict[str, Any]) -> None:
        self.files[name] = json.dumps(value).encode()


def _numbers(name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", name)]


@dataclass(frozen=True)
class Fault:
    """finds: names of findings of which one must be there. depth: the shallowest that can. source: whether only a comparison can."""

    name: str
    finds: tuple[str, ...]
    depth: str
    apply: Callable[[Contents], None]
    suits: Callable[[Contents], bool] = lambda contents: True
    source: bool = False
    replays: str = ""


FAULTS: list[Fault] = []


def fault(
    *finds: str, depth: str = "headers", suits: Callable[[Contents], bool] = lambda c: True, source: bool = False, replays: str = ""
) -> Callable[[Callable[[Contents], None]], Callable[[Contents], None]]:
    def add(apply: Callable[[Contents], None]) -> Callable[[Contents], None]:
        FAULTS.append(Fault(apply.__name__, finds, depth, apply, suits, source, replays))
        return apply

    return add


def _quantized(c: Contents) -> bool:
    return bool(c.linears) and c.format.name != "fp8-block"


def _has_block(c: Contents) -> bool:
    return _quantized(c) and "quantization_config" in c.config


def _moe(c: Contents) -> bool:
    return bool(c.experts)


def _quantized_moe(c: Contents) -> bool:
    return _quantized(c) and _moe(c) and any(m.startswith(c.experts[0]) for m in c.linears)


def _mtp(c: Contents) -> bool:
    return bool(c.mtp)


def _lists(c: Contents) -> bool:
    """Whether the format has a list of unquantized modules that engines go by."""
    return _has_block(c) and c.format.name in ("compressed-tensors", "awq", "modelopt")


def _listed(c: Contents) -> list[str]:
    key = "ignore" if "ignore" in c.block else "modules_to_not_convert"
    return c.block[key] or []


def _relist(c: Contents, entries: list[str]) -> None:
    key = "ignore" if "ignore" in c.block else "modules_to_not_convert"
    c.block[key] = entries
    if c.format.name == "modelopt" and "hf_quant_config.json" in c.files:
        side = c.json("hf_quant_config.json")
        side["quantization"]["exclude_modules"] = entries
        c.set_json("hf_quant_config.json", side)


# --- files -------------------------------------------------------------------------------------------------------------------


@fault("shard-missing")
def shard_is_missing(c: Contents) -> None:
    c.broken["shard"] = lambda folder: (folder / SHARD.format(2)).unlink()


@fault("shard-damaged")
def shard_is_cut_short(c: Contents) -> None:
    def cut(folder: Path) -> None:
        file = folder / SHARD.format(1)
        file.write_bytes(file.read_bytes()[:-1000])

    c.broken["shard"] = cut


@fault("shard-damaged")
def header_is_garbled(c: Contents) -> None:
    def garble(folder: Path) -> None:
        file = folder / SHARD.format(1)
        content = bytearray(file.read_bytes())
        content[10:14] = b"\xff\xfe\x00\x01"
        file.write_bytes(bytes(content))

    c.broken["shard"] = garble


@fault("shard-damaged")
def shard_is_a_pointer(c: Contents) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000000000\n"
    c.broken["shard"] = lambda folder: (folder / SHARD.format(2)).write_text(text) and None


@fault("index-missing")
def index_is_missing(c: Contents) -> None:
    c.broken["index"] = lambda folder: (folder / "model.safetensors.index.json").unlink()


def _edit_index(edit: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        edit(index["weight_map"])
        file.write_text(json.dumps(index))

    return apply


@fault("index-wrong")
def index_names_the_wrong_shard(c: Contents) -> None:
    def edit(weight_map: dict[str, str]) -> None:
        name = next(name for name, shard in weight_map.items() if shard == SHARD.format(1))
        weight_map[name] = SHARD.format(2)

    c.broken["index"] = _edit_index(edit)


@fault("index-wrong")
def index_lists_what_is_nowhere(c: Contents) -> None:
    c.broken["index"] = _edit_index(lambda weight_map: weight_map.update({"model.layers.0.extra.weight": SHARD.format(1)}))


@fault("config-unreadable")
def config_is_no_json(c: Contents) -> None:
    c.broken["config"] = lambda folder: (folder / "config.json").write_text("{'model_type': ") and None


# --- names, shapes, experts -----------------------------------------------------------------------------------------------------


@fault("tensors-missing", replays="areal-project/AReaL 1403: a shard with MTP keys is skipped whole, and the index rebuilt without it")
def a_layer_is_not_stored(c: Contents) -> None:
    layer = f"model.layers.{c.config['num_hidden_layers'] - 1}."
    c.tensors = {name: tensor for name, tensor in c.tensors.items() if not name.startswith(layer)}


@fault("tensors-missing", suits=_moe, replays="llm-compressor 2060, vllm-ascend 883")
def an_expert_is_not_stored(c: Contents) -> None:
    prefix = c.experts[-1]
    c.tensors = {name: tensor for name, tensor in c.tensors.items() if not name.startswith(f"{prefix}.")}


@fault("tensors-missing", suits=lambda c: any("e_score_correction_bias" in n for n in c.tensors))
def the_routers_bias_is_lost(c: Contents) -> None:
    c.tensors = {name: tensor for name, tensor in c.tensors.items() if "e_score_correction_bias" not in name}


@fault("tensors-missing")
def a_norm_is_lost(c: Contents) -> None:
    del c.tensors["model.layers.1.input_layernorm.weight"]


@fault("head-missing", suits=lambda c: "lm_head.weight" in c.tensors)
def the_head_is_lost(c: Contents) -> None:
    del c.tensors["lm_head.weight"]


@fault("names-wrong", replays="GPTQModel 2694: model.layers for model.language_model.layers")
def names_have_another_prefix(c: Contents) -> None:
    c.tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in c.tensors.items()}


@fault("names-wrong")
def names_lack_their_prefix(c: Contents) -> None:
    c.tensors = {name.removeprefix("model."): tensor for name, tensor in c.tensors.items()}


@fault("names-wrong", suits=_moe, replays="vllm 54047: block_sparse_moe.experts.w2")
def experts_have_mixtrals_names(c: Contents) -> None:
    renames = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}

    def new(name: str) -> str:
        if ".experts." not in name:
            return name
        for old, other in renames.items():
            name = name.replace(old, other)
        return name.replace(".mlp.experts.", ".block_sparse_moe.experts.")

    c.tensors = {new(name): tensor for name, tensor in c.tensors.items()}


@fault("experts-fused", suits=_moe, replays="llm-compressor 2939, vllm 40885, 54444")
def experts_are_one_tensor(c: Contents) -> None:
    prefix = c.experts[0].rpartition(".")[0]
    own = [name for name in c.tensors if name.startswith(f"{prefix}.")]
    for ending in sorted({name.split(".", 6)[-1] for name in own}):
        each = [c.tensors.pop(f"{prefix}.{number}.{ending}") for number in range(len(c.experts))]
        c.tensors[f"{prefix}.{ending.replace('.weight_', '_').replace('.weight', '').replace('.q', '_q')}"] = torch.stack(each)


@fault("layers-beyond")
def config_counts_too_few_layers(c: Contents) -> None:
    c.config["num_hidden_layers"] -= 1
    if "num_nextn_predict_layers" in c.config:
        c.config["num_nextn_predict_layers"] = 0
        c.tensors = {name: t for name, t in c.tensors.items() if not name.startswith(f"model.layers.{c.config['num_hidden_layers'] + 1}.")}


@fault("tensors-missing")
def config_counts_too_many_layers(c: Contents) -> None:
    c.config["num_hidden_layers"] += 2
    c.config.pop("num_nextn_predict_layers", None)


@fault("shape-wrong")
def config_is_of_a_wider_model(c: Contents) -> None:
    c.config["moe_intermediate_size" if c.experts else "intermediate_size"] *= 2


@fault("shape-wrong")
def a_plain_matrix_is_transposed(c: Contents) -> None:
    c.tensors["model.embed_tokens.weight"] = c.tensors["model.embed_tokens.weight"].T.contiguous()


@fault("config-field")
def config_lacks_a_size(c: Contents) -> None:
    del c.config["hidden_size"]


# --- the description of the quantization --------------------------------------------------------------------------------------


@fault("description-missing", suits=_has_block, replays="vllm 39256")
def quantization_config_is_lost(c: Contents) -> None:
    del c.config["quantization_config"]
    c.files.pop("hf_quant_config.json", None)


@fault("description-wrong", suits=_has_block)
def another_format_is_said(c: Contents) -> None:
    method = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    other = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    c.config["quantization_config"] = other if c.format.name == "awq" else method
    c.files.pop("hf_quant_config.json", None)


@fault("nothing-quantized", suits=_has_block)
def everything_is_plain(c: Contents) -> None:
    for module in list(c.linears):
        c.plain(module)


def _has_groups(c: Contents) -> bool:
    grid = c.format.grid(c.config, {}) if _has_block(c) else None
    return isinstance(grid, IntGrid) and grid.group_size is not None


@fault("group-size-wrong", suits=_has_groups)
def another_group_size_is_said(c: Contents) -> None:
    if c.format.name == "compressed-tensors":
        c.block["config_groups"]["group_0"]["weights"]["group_size"] *= 2
    else:
        c.block["group_size"] *= 2


@fault("part-missing", suits=_quantized, replays="vllm-ascend 4096: a scale that is not there")
def a_scale_is_lost(c: Contents) -> None:
    module = c.linear()
    names = [name for name in c.parts(module) if name.endswith((".scales", ".weight_scale"))]
    del c.tensors[names[0]]


@fault("part-orphan", "tensors-missing", suits=_quantized)
def codes_are_lost(c: Contents) -> None:
    module = c.linear()
    del c.tensors[module + c.linears[module].format.marker]


@fault("part-malformed", suits=_quantized)
def a_scale_has_another_shape(c: Contents) -> None:
    module = c.linear()
    name = next(name for name in c.parts(module) if name.endswith((".scales", ".weight_scale")))
    c.tensors[name] = c.tensors[name][:-1]


@fault("listed-but-quantized", suits=_lists, replays="llm-compressor 2060: experts in the ignore list")
def experts_are_listed_as_plain(c: Contents) -> None:
    entry = {"compressed-tensors": r"re:.*down_proj$", "awq": "down_proj", "modelopt": "*down_proj"}[c.format.name]
    _relist(c, [*_listed(c), entry])


@fault(
    "listed-but-quantized",
    suits=lambda c: c.format.name == "awq" and any(".mlp.gate_proj" in m for m in c.linears),
    replays="formats.md, pitfall 3",
)
def the_router_is_listed_by_a_part_of_its_name(c: Contents) -> None:
    _relist(c, ["mlp.gate", "kv_b_proj", "lm_head"])


@fault("plain-not-listed", suits=_lists, replays="vllm 45212")
def a_linear_was_left_out_and_not_listed(c: Contents) -> None:
    if not _listed(c):
        _relist(c, ["lm_head"])
    for ending in ("gate_proj", "up_proj", "down_proj"):
        c.plain(c.linear().rpartition(".")[0] + f".{ending}")


@fault("experts-mixed", suits=_quantized_moe, replays="GPTQModel 1680: some experts are not quantized")
def one_expert_was_left_plain(c: Contents) -> None:
    for module in [m for m in c.linears if m.startswith(f"{c.experts[1]}.")]:
        c.plain(module)


@fault("experts-plain", suits=lambda c: _quantized_moe(c) and any(".experts." not in m for m in c.linears), replays="llm-compressor 2060")
def no_expert_was_quantized(c: Contents) -> None:
    for module in [m for m in c.linears if ".experts." in m]:
        c.plain(module)
    if _lists(c):
        _relist(
            c, [*_listed(c), {"compressed-tensors": r"re:.*\.experts\..*", "awq": ".experts.", "modelopt": "*.experts.*"}[c.format.name]]
        )


@fault("siblings-mixed", suits=lambda c: _quantized(c) and any(m.endswith("mlp.gate_proj") for m in c.linears))
def gate_is_quantized_and_up_is_not(c: Contents) -> None:
    module = next(m for m in c.linears if m.endswith("mlp.gate_proj")).replace("gate_proj", "up_proj")
    c.plain(module)
    if _lists(c):
        _relist(c, [*_listed(c), module])


# --- MTP --------------------------------------------------------------------------------------------------------------------------


@fault("mtp-missing", suits=_mtp, replays="llm-compressor 2735, Model-Optimizer 2141, ms-swift 7848")
def mtp_was_dropped(c: Contents) -> None:
    for name in c.mtp:
        del c.tensors[name]


@fault("mtp-missing", suits=_mtp, source=True, replays="llm-compressor 2735")
def mtp_was_dropped_and_config_agrees(c: Contents) -> None:
    for name in c.mtp:
        del c.tensors[name]
    c.config["num_nextn_predict_layers"] = 0


@fault("mtp-incomplete", suits=_mtp, replays="vllm 52111")
def mtp_lost_its_projection(c: Contents) -> None:
    for name in c.mtp:
        if "eh_proj" in name or "hnorm" in name:
            del c.tensors[name]


@fault("mtp-not-announced", suits=_mtp, replays="sglang 34807")
def mtp_is_stored_and_not_announced(c: Contents) -> None:
    c.config["num_nextn_predict_layers"] = 0


@fault("plain-not-listed", suits=lambda c: _mtp(c) and _lists(c) and bool(_listed(c)), replays="vllm 37667, 52649, 44087")
def mtp_is_plain_and_not_listed(c: Contents) -> None:
    layer = f"layers.{c.config['num_hidden_layers']}"
    for module in [m for m in c.linears if f".{layer}." in m]:
        c.plain(module)
    # Entries of whole layers stand for this one alone here.
    _relist(c, [entry for entry in _listed(c) if layer not in entry.replace("\\", "")])


# --- settings ---------------------------------------------------------------------------------------------------------------------


@fault("tokenizer-missing")
def the_tokenizer_is_missing(c: Contents) -> None:
    del c.files["tokenizer.json"]


@fault("tokenizer-broken")
def the_tokenizer_is_cut_short(c: Contents) -> None:
    c.files["tokenizer.json"] = c.files["tokenizer.json"][:500]


@fault("tokenizer-too-large")
def the_tokenizer_is_of_another_model(c: Contents) -> None:
    tokenizer = c.json("tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"<more{number}>": len(vocab) + number for number in range(c.config["vocab_size"])}
    c.set_json("tokenizer.json", tokenizer)


@fault("eos-outside")
def eos_is_no_token(c: Contents) -> None:
    c.config["eos_token_id"] = c.config["vocab_size"] + 5


@fault("eos-differs", "eos-lost")
def eos_is_another_token(c: Contents) -> None:
    c.config["eos_token_id"] = 7
    c.files.pop("generation_config.json", None)
    described = c.json("tokenizer_config.json")
    if not described.get("eos_token"):
        described["eos_token"] = "<｜end▁of▁sentence｜>"
        c.set_json("tokenizer_config.json", described)


@fault("template-broken", suits=lambda c: "chat_template" in c.json("tokenizer_config.json"))
def the_template_does_not_parse(c: Contents) -> None:
    described = c.json("tokenizer_config.json")
    described["chat_template"] = described["chat_template"].replace("{% endif %}", "", 1)
    c.set_json("tokenizer_config.json", described)


@fault("template-missing", suits=lambda c: "chat_template" in c.json("tokenizer_config.json"), source=True)
def the_template_is_lost(c: Contents) -> None:
    described = c.json("tokenizer_config.json")
    del described["chat_template"]
    c.set_json("tokenizer_config.json", described)


@fault("config-differs", source=True, replays="a score that fell without an error: rope scaling lost")
def rope_is_lost(c: Contents) -> None:
    c.config.pop("rope_scaling", None)
    c.config["rope_theta"] = 500.0


@fault("config-differs", source=True)
def an_epsilon_is_another(c: Contents) -> None:
    c.config["rms_norm_eps"] = 1e-3


@fault("config-differs", source=True, suits=_moe)
def fewer_experts_are_chosen(c: Contents) -> None:
    c.config["num_experts_per_tok"] -= 1


@fault("config-differs", source=True, suits=lambda c: "norm_topk_prob" in c.config)
def routing_weights_are_not_normalized(c: Contents) -> None:
    c.config["norm_topk_prob"] = not c.config["norm_topk_prob"]


# --- tensors ------------------------------------------------------------------------------------------------------------------------


def tensor_fault(*finds: str, suits: Callable[[Contents], bool] = _quantized, source: bool = False, replays: str = "") -> Any:
    return fault(*finds, depth="tensors", suits=suits, source=source, replays=replays)


def _part(c: Contents, module: str, *endings: str) -> str:
    return next(name for name in c.parts(module) if name.endswith(endings))


def _scale(c: Contents, module: str) -> str:
    return _part(c, module, ".scales", ".weight_scale", ".weight_scale_inv")


def _codes(c: Contents, module: str) -> str:
    return module + c.linears[module].format.marker


def _changed(c: Contents, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensor = c.tensors[name]
    c.tensors[name] = change(tensor.float()).to(tensor.dtype) if tensor.dtype.is_floating_point else change(tensor)


def _of(*names: str) -> Callable[[Contents], bool]:
    return lambda c: _quantized(c) and f"{c.format.name} {c.format.variant}".startswith(names)


def _asymmetric(c: Contents) -> bool:
    return _quantized(c) and any(name.endswith((".qzeros", ".weight_zero_point")) for name in c.tensors)


def _four_bits(c: Contents) -> bool:
    kinds = _of("awq", "gptq", "compressed-tensors pack", "compressed-tensors nvfp4", "modelopt")
    return kinds(c) and getattr(next(iter(c.linears.values())).grid, "bits", 4) == 4


@tensor_fault("values-not-finite")
def a_scale_is_nan(c: Contents) -> None:
    name = _scale(c, c.linear())
    tensor = c.tensors[name].float().flatten().clone()
    tensor[3] = float("nan")
    c.tensors[name] = tensor.view(c.tensors[name].shape).to(c.tensors[name].dtype)


@tensor_fault("values-not-finite", suits=lambda c: True)
def a_norm_holds_infinity(c: Contents) -> None:
    _changed(c, "model.layers.1.input_layernorm.weight", lambda t: t.index_fill(0, torch.tensor([5]), float("inf")))


@tensor_fault("values-not-finite", suits=lambda c: True)
def the_embedding_holds_nan(c: Contents) -> None:
    _changed(c, "model.embed_tokens.weight", lambda t: t.index_fill(0, torch.tensor([7]), float("nan")))


@tensor_fault("scales-zero")
def scales_are_zero(c: Contents) -> None:
    _changed(c, _scale(c, c.linear()), torch.zeros_like)


@tensor_fault("scales-absurd")
def a_linears_scales_are_a_thousandfold(c: Contents) -> None:
    name = _scale(c, c.linear())
    if c.tensors[name].dtype == torch.float8_e4m3fn:
        name = _part(c, c.linear(), ".weight_scale_2", ".weight_global_scale")
        _changed(c, name, lambda t: t * 200 if name.endswith("_2") else t / 200)
    else:
        _changed(c, name, lambda t: t * 1000)


@tensor_fault("scales-absurd", suits=_of("awq", "gptq", "compressed-tensors pack", "compressed-tensors int", "modelslim"), source=True)
def a_linears_scales_are_tenfold(c: Contents) -> None:
    _changed(c, _scale(c, c.linear()), lambda t: t * 10)


@tensor_fault("codes-constant")
def codes_are_constant(c: Contents) -> None:
    _changed(
        c,
        _codes(c, c.linear()),
        lambda t: torch.full_like(t, 0x11 if t.dtype == torch.uint8 else 0x11111111 if t.dtype == torch.int32 else 17),
    )


@tensor_fault("linears-equal", suits=_quantized_moe)
def an_expert_is_another_ones_copy(c: Contents) -> None:
    for name in [name for name in c.tensors if name.startswith(f"{c.experts[2]}.")]:
        c.tensors[name] = c.tensors[name.replace(c.experts[2], c.experts[1])]


@tensor_fault("codes-saturated", suits=_of("awq", "gptq", "compressed-tensors pack"))
def codes_are_saturated(c: Contents) -> None:
    module = c.linear()
    linear = c.linears[module]
    weight = linear.format.unpack(module, {name: c.tensors[name] for name in linear.tensors})
    half = 2 ** (weight.bits - 1)
    wide = (weight.codes.float() * 4).clamp(-half, half - 1).to(torch.int8)
    c.tensors |= linear.format.pack(module, type(weight)(wide, weight.scale, weight.zero_point, weight.bits))


@tensor_fault("global-scale-inverted", suits=_of("modelopt", "compressed-tensors nvfp4"))
def global_scales_are_inverted(c: Contents) -> None:
    for name in c.tensors:
        if name.endswith((".weight_scale_2", ".weight_global_scale")):
            _changed(c, name, torch.reciprocal)


@tensor_fault("global-scale-inverted", suits=_of("modelopt", "compressed-tensors nvfp4"))
def one_global_scale_is_inverted(c: Contents) -> None:
    name = _part(c, c.linear(), ".weight_scale_2", ".weight_global_scale")
    _changed(c, name, torch.reciprocal)


@tensor_fault("zero-points-off", suits=lambda c: _of("gptq")(c) and c.linears[c.linear()].grid.bits == 4)
def gptq_is_said_to_be_the_other_version(c: Contents) -> None:
    c.block["checkpoint_format"] = "gptq" if c.block["checkpoint_format"] == "gptq_v2" else "gptq_v2"


@tensor_fault("zero-points-off", suits=_of("awq"))
def zero_points_are_one_less(c: Contents) -> None:
    for name in c.tensors:
        if name.endswith(".qzeros"):
            c.tensors[name] = (c.tensors[name].long() - 0x11111111).to(torch.int32)


@tensor_fault("codes-shifted", "zero-points-off", suits=_of("compressed-tensors pack"))
def codes_are_in_twos_complement(c: Contents) -> None:
    for module in c.linears:
        c.tensors[_codes(c, module)] = c.tensors[_codes(c, module)] ^ -0x77777778


@tensor_fault("packing-order", suits=_of("awq"))
def awq_words_are_in_natural_order(c: Contents) -> None:
    """Codes alone: zero points as they were."""
    for module in c.linears:
        words = c.tensors[_codes(c, module)]
        nibbles = [(words >> (4 * bit)) & 15 for bit in range(8)]
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        value = sum(nibbles[order[j]].long() << (4 * j) for j in range(8))
        c.tensors[_codes(c, module)] = torch.where(value >= 2**31, value - 2**32, value).to(torch.int32)


@tensor_fault("packing-order", suits=_four_bits, source=True)
def nibbles_are_exchanged(c: Contents) -> None:
    for module in c.linears:
        name = _codes(c, module)
        if c.tensors[name].dtype == torch.int32 and c.linears[module].grid.bits != 4:
            continue
        octets = c.tensors[name].contiguous().view(torch.uint8)
        c.tensors[name] = (((octets & 15) << 4) | (octets >> 4)).view(c.tensors[name].dtype)


@tensor_fault("gate-up-exchanged", source=True)
def gate_and_up_are_exchanged(c: Contents) -> None:
    prefix = c.linear("gate_proj").rpartition(".")[0]
    c.swap(f"{prefix}.gate_proj", f"{prefix}.up_proj")


@tensor_fault("experts-exchanged", suits=_quantized_moe, source=True, replays="vllm 45212")
def two_experts_are_exchanged(c: Contents) -> None:
    c.swap(c.experts[0], c.experts[3])


@tensor_fault("layers-exchanged", source=True)
def two_layers_are_exchanged(c: Contents) -> None:
    one, other = (f"model.layers.{c.config['num_hidden_layers'] - n}.self_attn" for n in (1, 2))
    c.swap(one, other)


@tensor_fault("error-large", "unlike-source", source=True)
def a_linear_is_noise(c: Contents) -> None:
    module = c.linear()
    generator = torch.Generator().manual_seed(0)
    _changed(c, _codes(c, module), lambda t: torch.randint(-100, 100, t.shape, generator=generator).to(t.dtype) * 16777619)


@tensor_fault("unlike-source", source=True)
def it_is_another_model(c: Contents) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in c.tensors.items():
        if tensor.dim() == 2:
            c.tensors[name] = tensor[torch.randperm(len(tensor), generator=generator)]


@tensor_fault("error-large", suits=lambda c: True, source=True)
def the_embedding_is_another(c: Contents) -> None:
    _changed(c, "model.embed_tokens.weight", lambda t: t.flip(0))


@tensor_fault("act-order-wrong", suits=_of("gptq"))
def act_order_is_said_and_not_stored(c: Contents) -> None:
    c.block["desc_act"] = True
    for name in c.tensors:
        if name.endswith(".g_idx"):
            c.tensors[name] = torch.zeros_like(c.tensors[name])


@tensor_fault("act-order-wrong", suits=_of("gptq"))
def act_order_is_stored_and_not_said(c: Contents) -> None:
    generator = torch.Generator().manual_seed(2)
    for name in c.tensors:
        if name.endswith(".g_idx"):
            c.tensors[name] = c.tensors[name][torch.randperm(len(c.tensors[name]), generator=generator)]


@tensor_fault("act-order-wrong", suits=_of("gptq"))
def a_group_is_out_of_range(c: Contents) -> None:
    c.block["desc_act"] = True
    name = f"{c.linear()}.g_idx"
    c.tensors[name] = c.tensors[name] + 100


def _divide_norm(c: Contents, layer: int, router: bool, experts: bool) -> None:
    """Fold scales from the norm before the experts into some of its readers: what peers' AWQ leaves out is the router."""
    hidden = c.config["hidden_size"]
    scale = torch.exp(0.8 * torch.randn(hidden, generator=torch.Generator().manual_seed(3)))
    prefix = f"model.layers.{layer}"
    _changed(c, f"{prefix}.post_attention_layernorm.weight", lambda t: t / scale)
    if router:
        _changed(c, f"{prefix}.mlp.gate.weight", lambda t: t * scale)
    for name in [name for name in c.tensors if name.startswith(f"{prefix}.mlp.") and name.endswith(("gate_proj.weight", "up_proj.weight"))]:
        if experts:
            _changed(c, name, lambda t: t * scale)


@tensor_fault(
    "router-not-compensated", suits=lambda c: _moe(c) and not c.linears, source=True, replays="peers.md A3.2: AutoAWQ's deepseek_v3.py"
)
def the_router_was_not_scaled(c: Contents) -> None:
    _divide_norm(c, int(c.experts[0].split(".")[2]), router=False, experts=True)


@tensor_fault("folding-broken", suits=lambda c: True, source=True)
def a_norm_was_divided_and_nothing_multiplied(c: Contents) -> None:
    scale = torch.exp(0.8 * torch.randn(c.config["hidden_size"], generator=torch.Generator().manual_seed(4)))
    _changed(c, "model.layers.1.input_layernorm.weight", lambda t: t / scale)


# --- found missing by a set that the rules' makers had not seen ---------------------------------------------------------------------


def _args(c: Contents) -> dict[str, Any]:
    """Where the description has bits and zero points."""
    return c.block["config_groups"]["group_0"]["weights"] if "config_groups" in c.block else c.block


@fault("description-wrong", suits=_of("compressed-tensors pack", "awq", "gptq"))
def three_bits_are_said(c: Contents) -> None:
    args = _args(c)
    args["num_bits" if "num_bits" in args else "bits"] = 3


@fault("description-wrong", suits=_has_block)
def the_method_is_misspelt(c: Contents) -> None:
    c.block["quant_method"] += "-x"
    c.files.pop("hf_quant_config.json", None)


@fault("listed-but-quantized", suits=_of("compressed-tensors"))
def a_group_is_for_no_module(c: Contents) -> None:
    c.block["config_groups"]["group_0"]["targets"] = []


@fault("descriptions-disagree", suits=_of("modelopt"))
def modelopts_two_files_disagree(c: Contents) -> None:
    side = c.json("hf_quant_config.json")
    side["quantization"]["exclude_modules"] = []
    c.set_json("hf_quant_config.json", side)


@fault("listed-but-quantized", suits=_of("modelslim"))
def modelslim_does_not_describe_a_linear(c: Contents) -> None:
    module, side = c.linear(), c.json("quant_model_description.json")
    c.set_json("quant_model_description.json", {name: kind for name, kind in side.items() if not name.startswith(f"{module}.")})


@fault("plain-not-listed", suits=_of("modelslim"))
def modelslim_says_that_the_head_is_quantized(c: Contents) -> None:
    c.set_json("quant_model_description.json", {**c.json("quant_model_description.json"), "lm_head.weight": "W8A8_DYNAMIC"})


@fault("tokenizer-broken")
def two_tokens_share_a_number(c: Contents) -> None:
    tokenizer = c.json("tokenizer.json")
    vocab = tokenizer["model"]["vocab"]
    names = list(vocab)
    vocab[names[40]] = vocab[names[41]]
    c.set_json("tokenizer.json", tokenizer)


@fault("eos-lost")
def no_file_ends_a_text(c: Contents) -> None:
    c.config.pop("eos_token_id", None)
    c.files.pop("generation_config.json", None)
    c.set_json("tokenizer_config.json", {**c.json("tokenizer_config.json"), "eos_token": "<｜end▁of▁sentence｜>"})


@tensor_fault("description-wrong", suits=lambda c: _of("gptq")(c) and not c.block["sym"])
def gptq_is_said_to_be_symmetric(c: Contents) -> None:
    c.block["sym"] = True


@tensor_fault("part-malformed", suits=_of("compressed-tensors pack"))
def weight_shapes_are_turned(c: Contents) -> None:
    for name in c.tensors:
        if name.endswith(".weight_shape"):
            c.tensors[name] = c.tensors[name].flip(0)


@tensor_fault("values-absurd", suits=lambda c: True)
def a_norm_is_all_zeros(c: Contents) -> None:
    _changed(c, "model.layers.1.post_attention_layernorm.weight", torch.zeros_like)


@tensor_fault("linears-equal", suits=lambda c: sum(name.endswith("mlp.gate.weight") for name in c.tensors) > 1)
def a_router_is_another_layers(c: Contents) -> None:
    routers = [name for name in c.tensors if name.endswith("mlp.gate.weight")]
    c.tensors[routers[1]] = c.tensors[routers[0]]


@tensor_fault("head-ignored", "config-field", suits=lambda c: "lm_head.weight" in c.tensors)
def the_head_is_said_to_be_tied(c: Contents) -> None:
    c.config["tie_word_embeddings"] = True


@tensor_fault("error-large", suits=_of("awq", "gptq", "compressed-tensors pack", "modelslim"), source=True)
def a_linears_sign_is_the_other(c: Contents) -> None:
    _changed(c, _scale(c, c.linear()), torch.negative)


@tensor_fault("error-large", suits=_of("compressed-tensors int", "modelslim"), source=True)
def scales_of_rows_are_shuffled(c: Contents) -> None:
    generator = torch.Generator().manual_seed(6)
    _changed(c, _scale(c, c.linear()), lambda t: t[torch.randperm(len(t), generator=generator)])
