"""ppl: how far a model's next tokens are from another's."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import bars, console
from quantkit.cli.console import print_json
from quantkit.cli.options import (
    AsJson,
    Backend,
    Cache,
    CountExperts,
    Device,
    Key,
    Seed,
    ServedName,
    Target,
)

Text = Annotated[
    Path | None, typer.Option(help="A .txt, or a .jsonl of {'text': ...}: one document a line.")
]
Beside = Annotated[
    str | None,
    typer.Option(
        help="The model it was made from: adds KL and agreement at the tokens that are scored, and "
        "error per layer."
    ),
]
Length = Annotated[
    int, typer.Option(min=2, help="Longest document, tokens; longer ones are cut into pieces.")
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Windows of --seq-len this far apart over whole documents; each scores what is new.",
    ),
]
Sampled = Annotated[
    str | None,
    typer.Option(
        help="Instead of a text: a task on whose prompts the baseline, or the server, samples "
        "reasoning."
    ),
]


def ppl(
    model: Target,
    text: Text = None,
    baseline: Beside = None,
    seq_len: Length = 2048,
    stride: Stride = None,
    sampled: Sampled = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with that task's data files.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest sampled reply.")] = None,
    seed: Seed = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first documents, or problems.")
    ] = None,
    served_model: ServedName = None,
    api_key: Key = None,
    count_experts: CountExperts = None,
    cache: Cache = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Perplexity of a text; with a baseline also the distance from it, by token and by layer. One
    of the two may be a server."""
    from quantkit.common.atomic_write import check_writable
    from quantkit.evaluation.distance.perplexity import measure

    if sampled is None:
        for option, given in (("--data-dir", data_dir), ("--max-tokens", max_tokens)):
            if given is not None:
                raise typer.BadParameter("it is for --sampled alone", param_hint=option)
    if count_experts is not None:
        check_writable(count_experts, "--count-experts")
    options: dict[str, Any] = {
        "seq_len": seq_len,
        "stride": stride,
        "limit": limit,
        "seed": seed,
        "max_tokens": max_tokens,
    }
    options |= {
        "sampled": sampled,
        "data_dir": data_dir,
        "count_experts": count_experts is not None,
    }
    options |= {
        "device": device,
        "backend": backend,
        "cache": cache,
        "served_model": served_model,
        "api_key": api_key,
    }
    told = _warning(model)
    with bars.samples_bar() as bar:
        counts = bars.counts(bar)

        def show(p: Any) -> None:
            nonlocal told
            if told:
                console.tell(told)
                told = ""
            counts(p.stage, f"tokens through the {p.stage}", p.done, p.total)

        quality = measure(model, text, baseline=baseline, progress=show, **options)
    if json_:
        print_json(quality.to_json())
    else:
        console.facts(model, quality.facts())
    if count_experts is not None and quality.expert_counts is not None:
        quality.expert_counts.write(count_experts)
    for name, perplexity in ((model, quality.ppl), (baseline, quality.baseline_ppl)):
        if perplexity is not None and math.isnan(
            perplexity
        ):  # the layers' errors, above, say where it begins
            console.tell_error(
                f"{name} computes logits that are no numbers",
                "quantkit check names the damaged tensor",
                as_json=False,
            )
            raise typer.Exit(1)


def _warning(model: str) -> str:
    """What to say of a model that is slow here; nothing of a server."""
    from quantkit.checkpoint.hub import find_model
    from quantkit.evaluation.openai_server import is_url
    from quantkit.executor.hf_engine import slow

    return "" if is_url(model) else slow(find_model(model))
