"""Arguments and options that several commands take."""

from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, tiny-r1 (built in), or a hub id.")]
Target = Annotated[str, typer.Argument(metavar="MODEL|URL", help="A model to run in this process, or an OpenAI-compatible server.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or npu.")]
Backend = Annotated[str, typer.Option(help="Kernel backend; see `quantkit kernels`.")]
Drafts = Annotated[int, typer.Option(min=0, help="Tokens a step that the model's MTP layer guesses; the answers stay the same.")]
Tp = Annotated[int, typer.Option(min=1, help="Ranks that share the model, one per device; all are started here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
