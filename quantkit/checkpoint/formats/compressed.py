"""What the compressed-tensors variants share: the config block, its ignore list, and how engines
read them.

QuantizationArgs forbids unknown keys, so the block has only those that every version since 0.9
knows. Module names in
`ignore` are exact, or a regular expression after "re:" that must match from the start.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import regex

from quantkit.checkpoint.formats.base import (
    HEAD,
    Format,
    Ignored,
    IgnoreSpelling,
    Json,
    Unquantized,
    ignore_list,
    unquantized_linears,
)
from quantkit.checkpoint.header import TensorSpec
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.grids.mx import MX_GROUP

_DEADLINE_S = 1.0
"""Of the processor, for one name: a published pattern takes microseconds."""


def _matches(entry: str, module: str) -> bool:
    return re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module


_SPELLING = IgnoreSpelling(
    layer=lambda prefix: f"re:{re.escape(prefix)}\\..*",
    tails=lambda tail: (f"re:.*{re.escape(tail)}$",),
    name=lambda module: module,
    matches=_matches,
)


MIXED = "mixed-precision"
INT8_TOKENS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""How activations are described that are quantized so."""
FP8_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}
"""How a cache is described whose scales are stored."""
_CLASSES = ("Linear", "Expert", "MLP", "Moe", "MoE")
"""In the name of a class that a group is for: it has linears."""
_EMBEDDING = "Embedding"
_EMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:embed|embed_in|embed_tokens\w*|tok_embeddings|word_embeddings|wte)"
)
"""Names that models give to modules of the class Embedding; all others that hold codes are linears.
The headers of a checkpoint do not say of what class a module is."""


class Compressed(Format):
    """What the variants share."""

    name = "compressed-tensors"
    outer: ClassVar[tuple[str, ...]] = ("head",)

    def detect(self, config: Json, side: Json) -> bool:
        return detect(config, self.variant)

    def ignored(self, config: Json, side: Json) -> Ignored:
        return ignored(config)

    def input_rotations(self, config: Json) -> Callable[[str], int]:
        return input_rotations(config)


def detect(config: Json, variant: str) -> bool:
    """Whether the block says this variant; of several descriptions of weights, whatever it says,
    only MIXED."""
    block = config.get("quantization_config") or {}
    if block.get("quant_method") != "compressed-tensors":
        return False
    said = MIXED if len(weight_descriptions(config)) > 1 else block.get("format")
    return bool(said == variant)


def weight_descriptions(config: Json) -> list[JsonObject]:
    """The different descriptions of quantized weights."""
    described: list[JsonObject] = []
    groups = config["quantization_config"].get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else ():
        args = group.get("weights") if isinstance(group, dict) else None
        if isinstance(args, dict) and args not in described:
            described.append(args)
    return described


def has_bits(config: Json, bits: int) -> bool:
    """Whether all that the block describes has so many bits."""
    groups = config["quantization_config"].get("config_groups")
    described = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return bool(described) and all(
        isinstance(args, dict) and args.get("num_bits") == bits for args in described
    )


def reads(config: Json, described: Callable[[Any], bool]) -> bool:
    """Whether all groups with weights describe their inputs so."""
    groups = config["quantization_config"].get("config_groups") or {}
    found = [
        group.get("input_activations")
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and group.get("weights") is not None
    ]
    return bool(found) and all(map(described, found))


def reads_int8(config: Json) -> bool:
    """Whether linears quantize what they read to int8, a step a token that is found as it comes."""
    return reads(
        config, lambda args: isinstance(args, dict) and INT8_TOKENS.items() <= args.items()
    )


def weight_args(config: Json) -> JsonObject:
    """The one description of quantized weights."""
    described = weight_descriptions(config)
    if len(described) != 1:
        fault = (
            f"the checkpoint is compressed-tensors with {len(described)} descriptions of weights"
        )
        raise QuantkitError(
            fault, "download config.json again: its config_groups say how weights are stored"
        )
    return described[0]


def unreadable(args: Json, readable: str) -> QuantkitError:
    said = ", ".join(
        f"{key} {args.get(key)}"
        for key in ("num_bits", "type", "strategy", "group_size", "symmetric")
    )
    return QuantkitError(
        f"the checkpoint's weights are {said}", f"in this format quantkit reads {readable}"
    )


def ignored(config: Json) -> Callable[[str], bool]:
    """Whether a module is listed as unquantized, or no group is for it."""
    entries = config["quantization_config"].get("ignore") or []
    listed, no_linears = matcher(entries), "Linear" in entries
    groups = (config["quantization_config"].get("config_groups") or {}).values()
    targets = [
        str(target)
        for group in groups
        if isinstance(group, dict)
        for target in group.get("targets", _CLASSES)
    ]
    meant, of_class = matcher(targets), class_matcher(targets)
    return lambda module: (
        listed(module)
        or (no_linears and not _EMBEDDINGS.fullmatch(module))
        or not (meant(module) or of_class(module))
    )


def class_matcher(targets: Iterable[str]) -> Callable[[str], bool]:
    """Whether a target is the class of a module: an embedding is no Linear."""
    classes = [target for target in targets if "." not in target and ":" not in target]
    embeddings = any(_EMBEDDING in target for target in classes)
    linears = any(
        word in target for target in classes if _EMBEDDING not in target for word in _CLASSES
    )
    return lambda module: embeddings if _EMBEDDINGS.fullmatch(module) else linears


def matcher(entries: Sequence[str]) -> Callable[[str], bool]:
    """Whether a module is one of the entries: names, and regular expressions after "re:"."""
    exact = {entry for entry in entries if not entry.startswith("re:")}
    patterns = [regex.compile(entry[3:]) for entry in entries if entry.startswith("re:")]
    return lambda module: module in exact or any(_found(pattern, module) for pattern in patterns)


def _found(pattern: regex.Pattern[str], module: str) -> bool:
    try:
        return pattern.match(module, timeout=_DEADLINE_S) is not None
    except TimeoutError as error:
        message = (
            f"re:{pattern.pattern} in quantization_config of config.json takes too long to match"
        )
        raise QuantkitError(message, "write a simpler expression") from error


def input_rotations(config: Json) -> Callable[[str], int]:
    """As of `Format`. Transforms of weights are in the weights."""
    said = (config.get("quantization_config") or {}).get("transform_config") or {}
    rules = list[tuple[Callable[[str], bool], Callable[[str], bool], int]]()
    for name, scheme in _objects(said, "config_groups"):
        online = [
            args
            for _, args in _objects(scheme, "apply")
            if args.get("location") not in ("weight_input", "weight_output")
        ]
        block: Any = scheme.get("head_dim")
        kind = scheme.get("type")
        known = kind == "hadamard" and type(block) is int and block > 0 and not block & (block - 1)
        if online and not (known and all(args.get("location") == "input" for args in online)):
            raise QuantkitError(
                f"transform_config.config_groups.{name} is {kind} with head_dim {block}, applied "
                "as the model runs",
                "quantkit reads a hadamard of a head_dim that is a power of two, at inputs",
            )
        for args in online:
            meant, spared = (matcher(_listed(args, key)) for key in ("targets", "ignore"))
            rules.append((meant, spared, block))
    return lambda module: next(
        (block for meant, spared, block in rules if meant(module) and not spared(module)), 0
    )


def _objects(said: Any, key: str) -> list[tuple[str, JsonObject]]:
    """The objects of a list or object, by number or name."""
    found = (said.get(key) or []) if isinstance(said, dict) else said
    if isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise QuantkitError(
            f"{key} in transform_config is no list of objects", "copy the writer's config.json"
        )
    return [(str(name), one) for name, one in found.items()]


def _listed(args: Json, key: str) -> list[str]:
    said = args.get(key) or []
    return [str(one) for one in said] if isinstance(said, list) else [str(said)]


def rotated_inputs(blocks: dict[str, int]) -> JsonObject:
    """The block's transform_config for modules by the size of the Hadamard matrices at their
    inputs, which are in their weights, too."""
    groups: JsonObject = {}
    for size in sorted({*blocks.values()}):
        tails = sorted({name.rpartition(".")[2] for name, own in blocks.items() if own == size})
        targets = [f"re:.*\\.{re.escape(tail)}$" for tail in tails]
        where = (("input", False), ("weight_input", True))
        groups[f"R4_{size}" if groups else "R4"] = {
            "type": "hadamard",
            "apply": [
                {"targets": targets, "location": location, "inverse": inverse, "ignore": []}
                for location, inverse in where
            ],
            "head_dim": size,
        }
    return {"transform_config": {"config_groups": groups}} if groups else {}


def _is_cache_scale(spec: TensorSpec) -> bool:
    return spec.name.endswith((".k_scale", ".v_scale"))


def is_embedding(module: str) -> bool:
    return _EMBEDDINGS.fullmatch(module) is not None


def outer_targets(quantized: Iterable[str]) -> list[str]:
    """Targets besides Linear of what is quantized around the layers. Engines find a head by its name
    alone (vLLM's class of it is no Linear, SGLang compares names only), and vLLM builds Llama's
    embedding without a name."""
    heads = [module for module in quantized if module.rpartition(".")[2] == HEAD]
    return heads + ([_EMBEDDING] if any(map(is_embedding, quantized)) else [])


def config_block(
    variant: str,
    weights: JsonObject,
    activations: JsonObject | None,
    quantized: Collection[str],
    unquantized: Unquantized,
) -> JsonObject:
    group = {
        "targets": ["Linear", *outer_targets(quantized)],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": variant,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": FP8_CACHE if any(map(_is_cache_scale, unquantized)) else None,
        "ignore": ignore_list(quantized, unquantized_linears(unquantized, quantized), _SPELLING),
        "config_groups": {"group_0": group},
    }


def mx_config_block(
    variant: str,
    bits: int,
    activation_bits: int,
    quantized: Collection[str],
    unquantized: Unquantized,
) -> JsonObject:
    """The description of MXFP4 and MXFP8. bits: of weights, and of activations where these are
    rounded. scale_dtype: a key that readers of MX know, and need."""
    weights = {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": MX_GROUP,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    inputs = weights | {"dynamic": True} if activation_bits == bits else None
    return config_block(variant, weights, inputs, quantized, unquantized)
