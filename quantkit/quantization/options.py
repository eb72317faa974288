"""Options of `quantize` and of what shares them: `plan` plans the same output."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from quantkit.common.assets import asset
from quantkit.common.options import device_option, option
from quantkit.grids.names import SchemeName, WritableFormat


def format_names() -> list[str]:
    return ["auto", *get_args(WritableFormat)]


def scheme_names() -> list[str]:
    return list(get_args(SchemeName))


def names_of_engines() -> list[str]:
    """Same as `engines.profiles.engine_names`, without its imports: a shell completes these."""
    return sorted(path.stem for path in asset("recipes", "engines").glob("*.yaml"))


def samples_option() -> Any:
    return option(None, "Calibration sequences; the recipe's by default.", min=1)


def seq_len_option() -> Any:
    return option(None, "Tokens of a calibration sequence; the recipe's by default.", min=8)


@dataclass(frozen=True)
class SchemeOptions:
    """What the output is. recipe: also a `Recipe`. override: also a mapping from patterns to their
    settings. mixture: a `Mixture`, in place of keep, preset, bits, size, read_weight, ignore and
    override."""

    format: str = option(
        "auto",
        f"{', '.join(format_names()[:-1])} or {format_names()[-1]}; auto is the scheme's first.",
        "--format",
        complete=format_names,
    )
    engine: str | None = option(
        None,
        "Write what vllm, sglang, vllm-ascend, omni-infer or chitu loads, or refuse.",
        complete=names_of_engines,
    )
    keep: str | None = option(
        None,
        "Kinds of sublayer to leave unquantized, comma-separated: attention, mlp, shared, experts, "
        "mtp.",
    )
    preset: str | None = option(
        None,
        "experts-only: quantize the routed experts only. int8-attention: int8 for the projections "
        "before latent attention.",
    )
    bits: float | None = option(
        None, "Bits per weight on average, scales included: each linear gets its own grid."
    )
    size: str | None = option(None, "Same as --bits, by bytes of the output, such as 380GB.")
    read_weight: float = option(
        0.0,
        "For --bits and --size: weigh memory traffic instead of size, from 0 (bytes stored) to 1 "
        "(bytes read per token).",
    )
    ignore: list[str] | None = option(
        None,
        "Modules to leave at 16 bits, by name or as re:EXPRESSION; may be given several times.",
        metavar="PATTERN",
    )
    override: list[str] | dict[str, Any] | None = option(
        None,
        "Another grid for modules: 'PATTERN bits=8', with scheme, bits (4, 8, 16) or "
        "group_size; may be given several times.",
        metavar="'PATTERN KEY=VALUE'",
    )
    mixture: Any = option(None, "A Mixture, instead of these seven.", cli=False)
    sensitivities: Path | None = option(
        None,
        "For --bits and --size: the sensitivities.json of an earlier run on this model; measured "
        "by default.",
    )
    recipe: str | Path | Any | None = option(
        None, "A recipe's name or YAML file; the scheme's own recipe by default."
    )
    samples: int | None = samples_option()
    seq_len: int | None = seq_len_option()
    group_size: int | None = option(
        None, "Input channels of int4 that share a scale: 128, 64 or 32; 128 by default.", min=1
    )
    kv_cache: str | None = option(
        None, "fp8: calibrated FP8 scales of keys and values, in compressed-tensors."
    )
    prune: str | float | None = option(
        None,
        "Remove this share of each layer's routed experts, those that contribute least: 25%.",
        metavar="SHARE",
    )


@dataclass(frozen=True)
class QuantizeOptions(SchemeOptions):
    """Options of `quantize`."""

    calibration: str | Path | Any | None = option(
        None,
        "A .txt, .jsonl, .json, .csv or .parquet file, or a `datasets` id; self: half of the text "
        "is written by the model, first; builtin: quantkit's own, the default unless the model "
        "ships one. In Python also a list of texts, of lists of messages or of records, or a "
        "data set.",
    )
    seed: int | None = option(
        None, "Random seed of the choice of calibration documents; the recipe's by default."
    )
    device: str = device_option()
    memory: str | int | None = option(
        None, "Host memory to stay under, such as 16GiB; refused at the start if impossible."
    )
    overwrite: bool = option(
        False, "Replace the output directory if it holds nothing but what quantkit wrote."
    )
