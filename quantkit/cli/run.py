"""Running a model: run, serve, playground."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.checkpoint.hub import find_model, model_basename
from quantkit.cli import console
from quantkit.cli.console import err, out, print_json
from quantkit.cli.options import AsJson, CountExperts, Model, Port, Seed
from quantkit.common.atomic_write import check_writable
from quantkit.common.errors import QuantkitError
from quantkit.executor.options import EngineOptions
from quantkit.executor.server.options import ServerOptions
from quantkit.executor.server.tools.formats import named_format

if TYPE_CHECKING:
    from quantkit.tokenizer.chat import ChatTemplate

_RUN_OPTIONS = (
    "draft_length",
    "draft",
    "prompt_lookup",
    "tp",
    "dp",
    "collectives",
    "cache",
    "device",
    "backend",
)


def run(
    model: Model,
    question: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The same as --prompt.")
    ] = None,
    *,
    prompt: Annotated[str | None, typer.Option(help="One question; without it, a chat.")] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it is, without a chat template: for base models."
        ),
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Longest answer, tokens.")
    ] = 512,
    temperature: Annotated[
        float,
        typer.Option(
            min=0, help="0 is greedy, also where generation_config.json samples; serve follows it."
        ),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Nucleus sampling: share of probability to keep.")
    ] = 1.0,
    seed: Seed = 0,
    count_experts: CountExperts = None,
    engine: Annotated[EngineOptions, _RUN_OPTIONS],
    json_: AsJson = False,
) -> None:
    """Answer one prompt, or chat; with --raw continue a text."""
    from quantkit.executor.hf_engine import open_engine
    from quantkit.executor.sampling.params import SamplingParams

    if question is not None and prompt is not None:
        raise QuantkitError("two prompts are given", "leave out --prompt or the other one")
    prompt = question if prompt is None else prompt
    if json_ and prompt is None:
        raise QuantkitError("--json needs --prompt", "a chat cannot be one JSON object")
    if raw and prompt is None:
        raise QuantkitError("--raw needs --prompt", "give the text that is to be continued")
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    options = _resolved(engine, model, count_experts, max_batch=1)
    with console.status(f"loading {model}"):
        running = open_engine(options)
    if running.loaded.warning:
        console.notify(running.loaded.warning)
    with closing(running), _expert_counts_to(running, count_experts):
        if prompt is not None:
            tokenizer = running.tokenizer
            ids = (
                tokenizer.encode(prompt)
                if raw
                else tokenizer.encode_chat([{"role": "user", "content": prompt}])
            )
            _answer(running, ids, params, json_)
            return
        err.print(f"{model} on {running.loaded.device}. An empty line or Ctrl-D ends the chat.")
        _chat(running, params)


def _chat(engine: Any, params: Any) -> None:
    from quantkit.tokenizer.reasoning_tags import END_THINK

    messages: list[dict[str, str]] = []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        text = _answer(engine, engine.tokenizer.encode_chat(messages), params, False)
        messages.append({"role": "assistant", "content": text.rpartition(END_THINK)[2].strip()})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(engine: Any, ids: list[int], params: Any, json_: bool) -> str:
    """Stream the completion to the terminal, or print it as JSON; returns its text."""
    for delta in engine.stream(ids, params):
        if not json_:
            out.print(delta.text, end="", soft_wrap=True)
        completion = delta.completion or None
    assert completion is not None
    tokens, seconds = len(completion.token_ids), completion.timings.total_s
    if json_:
        print_json(
            {
                "text": completion.text,
                "tokens": tokens,
                "prompt_tokens": completion.prompt_tokens,
                "tokens_per_second": tokens / seconds,
                "finish_reason": completion.finish_reason,
            }
        )
    else:
        out.print()
        speed = tokens / seconds
        console.notify(
            f"{tokens} token{'s' * (tokens != 1)}, {speed:.{int(speed < 10)}f} tokens/s, "
            f"{completion.finish_reason}{_acceptance(engine)}"
        )
    return str(completion.text)


def _acceptance(engine: Any) -> str:
    """The acceptance rate of draft tokens, if there were any."""
    found = None if engine.speculation is None else engine.speculation.acceptance
    return (
        f", {found.rate:.0%} of {found.drafted} draft tokens accepted"
        if found is not None and found.drafted
        else ""
    )


def serve(
    model: Model,
    *,
    server: ServerOptions,
    count_experts: CountExperts = None,
    engine: EngineOptions,
) -> None:
    """Serve an OpenAI-compatible API: chat, completions and responses, tools, JSON schemas,
    streaming, metrics.

    A request without temperature is sampled as generation_config.json says, else at 1.0 as OpenAI
    does; `run` is greedy.
    """
    from quantkit.common.bind import is_loopback, url_address
    from quantkit.executor.server.serve import serve as run_server
    from quantkit.executor.worker import lead_or_follow

    if server.tool_parser != "auto":
        named_format(server.tool_parser)
    template = None if server.chat_template is None else _read_template(server.chat_template)
    options = _resolved(engine, model, count_experts)
    with _sockets(server.host, server.port) as sockets:
        with console.status(f"loading {model}"):
            running = lead_or_follow(options, console.notify)
        if running.loaded.warning:
            console.notify(running.loaded.warning)
        if template is not None:
            running.tokenizer.use_template(template)
        elif not running.tokenizer.templates:
            console.notify(
                f"{model} has no chat template: chats and responses are refused; "
                "--chat-template FILE sets one"
            )
        url = f"http://{url_address(server.host, server.port)}/v1"
        err.print(f"serving {model} on {url}", soft_wrap=True)
        if server.api_key is None and not is_loopback(server.host):
            console.notify(
                f"no key is asked for: whoever reaches {server.host} may use the model; --api-key or "
                "QUANTKIT_API_KEY sets one"
            )
        log = console.notify if server.log_requests else None
        with closing(running), _expert_counts_to(running, count_experts):
            run_server(running, server.served_name or model_basename(model), server, sockets, log)


def _read_template(file: Path) -> "ChatTemplate":
    from quantkit.common.model_files import read_text
    from quantkit.tokenizer.chat import ChatTemplate

    remedy = "give --chat-template a file that holds one, or leave it out"
    try:
        text = read_text(file)
    except QuantkitError as fault:
        raise QuantkitError(fault.problem, remedy) from fault
    if not text.strip():
        raise QuantkitError(f"{file} is empty: it renders no conversation", remedy)
    template = ChatTemplate(text, str(file))
    template.check()
    return template


def _sockets(host: str, port: int) -> AbstractContextManager[list[socket]]:
    """The sockets of rank 0; other ranks of torchrun have none."""
    from quantkit.common.bind import bind

    return bind(host, port) if os.environ.get("RANK", "0") == "0" else nullcontext([])


def _resolved(
    options: EngineOptions, model: str, count_experts: Path | None, **changes: Any
) -> EngineOptions:
    """`options` with the model and the draft model found or downloaded, for an engine that measures
    its steps. Refuses a file for expert counts that cannot be written."""
    if count_experts is not None:
        check_writable(count_experts, "--count-experts")
    return replace(
        options,
        model_path=find_model(model),
        draft=None if options.draft is None else find_model(str(options.draft)),
        count_experts=count_experts is not None,
        measure_steps=True,
        **changes,
    )


@contextmanager
def _expert_counts_to(engine: Any, file: Path | None) -> Iterator[None]:
    """Write the engine's expert counts to `file` at the end, also after a fault."""
    try:
        yield
    finally:
        if file is not None:
            engine.expert_counter.counts.write(file)


def playground(
    model: Model,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A second model, such as MODEL quantized.")
    ] = None,
    *,
    port: Port = 8001,
    context: Annotated[
        int | None,
        typer.Option(min=16, help="Longest prompt plus answer, tokens; 4096 or the model's own."),
    ] = None,
    engine: Annotated[EngineOptions, ("device", "backend")],
) -> None:
    """Chat in the browser: answers side by side, tokens coloured by divergence, changed experts."""
    from quantkit.common.bind import bind
    from quantkit.playground.app import HOST, serve
    from quantkit.playground.play import Playground

    models = [(name, find_model(name)) for name in (model, other) if name is not None]
    with bind(HOST, port) as sockets:
        with console.status(f"loading {' and '.join(name for name, _ in models)}"):
            opened = Playground.open(
                models, device=engine.device, backend=engine.backend, context=context
            )
        err.print(f"the playground is on http://{HOST}:{port}/ (Ctrl-C ends it)", soft_wrap=True)
        serve(opened, port, sockets)
