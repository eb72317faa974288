"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from quantkit.common.assets import asset
from quantkit.executor.options import MAX_GUESSES
from quantkit.grids.names import SchemeName, WritableFormat


def scheme_names() -> list[str]:
    return list(get_args(SchemeName))


def names_of_engines() -> list[str]:
    """As `engines.profiles.engine_names`, without importing what models need: a shell waits for
    it."""
    return sorted(path.stem for path in asset("recipes", "engines").glob("*.yaml"))


def format_names() -> list[str]:
    return ["auto", *get_args(WritableFormat)]


def device_names() -> list[str]:
    return ["auto", "cpu", "cuda", "npu"]


MaybeScheme = Annotated[
    str | None,
    typer.Option(
        help=f"{', '.join(scheme_names()[:-1])} or {scheme_names()[-1]}; with --preset, --bits or "
        "--size awq-w4a16 otherwise.",
        autocompletion=scheme_names,
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        help="Kinds of sublayer to leave as they are: attention, mlp, shared, experts, mtp; a "
        "comma between."
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="experts-only: routed experts are rounded, the rest stays. int8-attention: before "
        "latent attention int8."
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        help="Bits a weight on average, scales included: grids are chosen for every linear."
    ),
]
Size = Annotated[str | None, typer.Option(help="The same by bytes of the output, such as 380GB.")]
Sensed = Annotated[
    Path | None,
    typer.Option(
        help="What --bits and --size go by: the sensitivities.json of an earlier run on this "
        "model; else measured."
    ),
]
ReadWeight = Annotated[
    float,
    typer.Option(
        help="What --bits and --size count as the cost of a grid: 0 bytes stored, 1 bytes read for "
        "a token."
    ),
]
FormatName = Annotated[
    str,
    typer.Option(
        "--format",
        help=f"{', '.join(format_names()[:-1])} or {format_names()[-1]}.",
        autocompletion=format_names,
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        help="Write what vllm, sglang, vllm-ascend, omni-infer or chitu loads, or refuse.",
        autocompletion=names_of_engines,
    ),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A directory, tiny-r1 (built in), or a hub id.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|URL", help="A model to run in this process, or an OpenAI-compatible server."
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="Input channels of int4 that share a scale: 128, 64 or 32; 128 otherwise."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or npu.", autocompletion=device_names)]
Backend = Annotated[str, typer.Option(help="Kernel backend; see `quantkit kernels`.")]
Cache = Annotated[
    str | None,
    typer.Option(
        help="int8 or fp8: keys and values, or latents, are kept in 8 bits; in the model's 16 "
        "otherwise."
    ),
]
Drafts = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_GUESSES,
        help="Tokens a step that the MTP layer, or --draft's model, guesses at most; the answers "
        "stay the same.",
    ),
]
DraftHeld = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="A model that is to guess: every device holds it whole, and its cache.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="A small model with the same tokens, or a head of EAGLE-3, which guesses instead of "
        "an MTP layer: 4, or --drafts.",
    ),
]
PromptLookup = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_GUESSES,
        help="Tokens a step guessed from what prompt and answer said before; answers stay the same.",
    ),
]
Tp = Annotated[
    int,
    typer.Option(min=1, help="Ranks that share the model, one per device; all are started here."),
]
Dp = Annotated[
    int,
    typer.Option(
        min=1,
        help="Ranks, one per device, that answer requests of their own and share routed experts; "
        "not with --tp.",
    ),
]
Collectives = Annotated[
    str | None,
    typer.Option(
        help="int8 or fp8: the ranks add prompts in 8 bits a value; in the model's 16 otherwise."
    ),
]
Prune = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Leave out this share of every layer's routed experts, those that add least: 25%.",
    ),
]
CountExperts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write how often the tokens asked each routed expert, for `quantkit place`.",
    ),
]
ServedName = Annotated[
    str | None, typer.Option(help="The server's name of the model; asked of it otherwise.")
]
Key = Annotated[str | None, typer.Option(help="For a server.")]
TopP = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Tokens are drawn from the likeliest that have this share together."
    ),
]
Seed = Annotated[
    int, typer.Option(help="Of what is drawn at random; the same seed draws the same.")
]
Host = Annotated[
    str, typer.Option(help="The address to listen on; 0.0.0.0 is every one of this machine.")
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
