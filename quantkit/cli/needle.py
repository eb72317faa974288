"""Texts with hidden numbers, for the task `needle`: made here, to length in a model's own
tokens."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import console
from quantkit.cli.options import Seed


def needle(
    tokenizer: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A folder with the tokenizer.json that lengths are counted in, or tiny-r1.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="The .jsonl to write; the task reads needle/test.jsonl below --data-dir."
        ),
    ],
    lengths: Annotated[
        str, typer.Option(help="Tokens of a prompt, comma-separated; 4k is 4096.")
    ] = "4k,8k,16k,32k,60k",
    kinds: Annotated[
        str, typer.Option(help="single, multikey, keys, comma-separated.")
    ] = "single,multikey,keys",
    count: Annotated[int, typer.Option(min=1, help="Problems of every length and kind.")] = 10,
    seed: Seed = 0,
) -> None:
    """Make long texts with hidden numbers, from 4K to 60K tokens and more: eval's task `needle`
    asks for the numbers."""
    import json

    from quantkit.checkpoint.hub import find_local
    from quantkit.common.atomic_write import check_writable, make_folder, write_atomic
    from quantkit.common.errors import QuantkitError
    from quantkit.evaluation.tasks.needle import KINDS, needle_rows
    from quantkit.tokenizer.chat import ChatTokenizer

    folder = find_local(tokenizer)
    if folder is None:
        raise QuantkitError(
            f"{tokenizer} is no folder here",
            "give one with the model's tokenizer.json; nothing else is needed of it",
        )
    chosen = [kind.strip() for kind in kinds.split(",")]
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(KINDS)}", param_hint="--kinds"
        )
    make_folder(out.parent)
    check_writable(out, "--out")
    tokens = ChatTokenizer(folder)
    rows = list(
        needle_rows(
            lambda text: len(tokens.encode_rendered(text)), _lengths(lengths), chosen, count, seed
        )
    )
    write_atomic(out, "".join(json.dumps(row) + "\n" for row in rows))
    console.tell(
        f"{len(rows)} problems in {out}; quantkit eval MODEL --tasks needle --data-dir "
        f"{out.parent.parent}"
    )


def _lengths(text: str) -> list[int]:
    try:
        found = [
            int(part[:-1]) * 1024 if part.strip().lower().endswith("k") else int(part)
            for part in map(str.strip, text.split(","))
        ]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(
            f"{text!r} is not a list of lengths such as 4k,8k", param_hint="--lengths"
        )
    return found
