"""Running a model: run, serve, and deploy, which prints how another engine would."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from socket import socket
from typing import Annotated, Any

import typer

from quantkit.checkpoint.hub import find_model, model_basename
from quantkit.cli import console
from quantkit.cli.console import err, out, print_json
from quantkit.cli.options import (
    AsJson,
    Backend,
    Cache,
    Collectives,
    CountExperts,
    Device,
    Dp,
    Draft,
    Drafts,
    Host,
    Model,
    Port,
    PromptLookup,
    Seed,
    TopP,
    Tp,
    names_of_engines,
)
from quantkit.common.atomic_write import check_writable
from quantkit.common.errors import QuantkitError
from quantkit.executor.server.tools.formats import NAMES as TOOL_PARSERS
from quantkit.executor.server.tools.formats import named_format


def run(
    model: Model,
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
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    drafts: Drafts = 0,
    draft: Draft = None,
    prompt_lookup: PromptLookup = 0,
    count_experts: CountExperts = None,
    cache: Cache = None,
    tp: Tp = 1,
    dp: Dp = 1,
    collectives: Collectives = None,
    device: Device = "auto",
    backend: Backend = "auto",
    json_: AsJson = False,
) -> None:
    """Answer one prompt, or chat; with --raw continue a text."""
    from quantkit.executor.hf_engine import open_engine
    from quantkit.executor.options import EngineOptions
    from quantkit.executor.sampling.params import SamplingParams

    if json_ and prompt is None:
        raise QuantkitError("--json needs --prompt", "a chat cannot be one JSON object")
    if raw and prompt is None:
        raise QuantkitError("--raw needs --prompt", "give the text that is to be continued")
    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    counted = _counting(count_experts)
    path = find_model(model)
    options = EngineOptions(
        path,
        device,
        backend,
        max_batch=1,
        measure_steps=True,
        cache=cache,
        tp=tp,
        dp=dp,
        collectives=collectives,
        count_experts=counted,
        num_drafts=drafts,
        draft=_draft(draft),
        num_looked_up=prompt_lookup,
    )
    with console.status(f"loading {model}"):
        engine = open_engine(options)
    if engine.loaded.warning:
        console.tell(engine.loaded.warning)
    with closing(engine), _written(engine, count_experts):
        if prompt is not None:
            tokenizer = engine.tokenizer
            ids = (
                tokenizer.encode(prompt)
                if raw
                else tokenizer.encode_chat([{"role": "user", "content": prompt}])
            )
            _answer(engine, ids, params, json_)
            return
        err.print(f"{model} on {engine.loaded.device}. An empty line or Ctrl-D ends the chat.")
        _chat(engine, params)


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
    """Stream what follows the prompt's tokens to the terminal, or print it whole as JSON; returns
    its text."""
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
        console.tell(
            f"{tokens} tokens, {tokens / seconds:.0f} tokens/s, "
            f"{completion.finish_reason}{_guesses(engine)}"
        )
    return str(completion.text)


def _guesses(engine: Any) -> str:
    """What to tell of guesses, where any were made."""
    found = None if engine.speculation is None else engine.speculation.acceptance
    return (
        f", {found.rate:.0%} of {found.drafted} guesses kept"
        if found is not None and found.drafted
        else ""
    )


def serve(
    model: Model,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="QUANTKIT_API_KEY", help="Ask for this key.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Requests computed together.")] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus answer, tokens.")
    ] = None,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of the cache, of all requests together; as many as memory holds otherwise.",
        ),
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of a step; measured otherwise.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that may wait.")] = 256,
    max_input: Annotated[int | None, typer.Option(min=1, help="Longest prompt, tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Longest answer, tokens.")] = None,
    served_name: Annotated[
        str | None, typer.Option(help="Name that clients use; MODEL otherwise.")
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help=f"Format of tool calls: auto (the chat template's), {', '.join(TOOL_PARSERS)}."
        ),
    ] = "auto",
    chat_template: Annotated[
        Path | None, typer.Option(help="A chat template, instead of the model's own.")
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="A line on stderr for every request.")
    ] = False,
    drafts: Drafts = 0,
    draft: Draft = None,
    prompt_lookup: PromptLookup = 0,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache", help="Requests that begin alike share what is computed of that."
        ),
    ] = False,
    count_experts: CountExperts = None,
    cache: Cache = None,
    tp: Tp = 1,
    dp: Dp = 1,
    collectives: Collectives = None,
    device: Device = "auto",
    backend: Backend = "auto",
) -> None:
    """Serve an OpenAI-compatible API: chat, completions and responses, tools, JSON schemas,
    streaming, metrics."""
    from quantkit.common.bind import url_address
    from quantkit.common.model_files import read_text
    from quantkit.executor.options import EngineOptions
    from quantkit.executor.server.app import Limits
    from quantkit.executor.server.serve import ServeOptions
    from quantkit.executor.server.serve import serve as run_server
    from quantkit.executor.worker import lead_or_follow
    from quantkit.tokenizer.template import ChatTemplate

    counted = _counting(count_experts)
    if tool_parser != "auto":
        named_format(tool_parser)
    template = (
        None
        if chat_template is None
        else ChatTemplate(read_text(chat_template), str(chat_template))
    )
    if template is not None:
        template.check()
    path = find_model(model)
    asked = EngineOptions(
        path,
        device=device,
        backend=backend,
        max_batch=max_batch,
        max_model_len=max_model_len,
        cache_tokens=cache_tokens,
        prefill_tokens=chunk_tokens,
        measure_steps=True,
        num_drafts=drafts,
        draft=_draft(draft),
        num_looked_up=prompt_lookup,
        prefix_cache=prefix_cache,
        cache=cache,
        tp=tp,
        dp=dp,
        collectives=collectives,
        count_experts=counted,
    )
    with _sockets(host, port) as sockets:
        with console.status(f"loading {model}"):
            engine = lead_or_follow(asked, console.tell)
        if engine.loaded.warning:
            console.tell(engine.loaded.warning)
        if template is not None:
            engine.tokenizer.use_template(template)
        elif not engine.tokenizer.templates:
            console.tell(
                f"{model} has no chat template: chats and responses are refused, and "
                "--chat-template FILE brings one"
            )
        err.print(f"serving {model} on http://{url_address(host, port)}/v1", soft_wrap=True)
        limits = Limits(max_input=max_input, max_output=max_output)
        log = console.tell if log_requests else None
        options = ServeOptions(
            host, port, api_key, max_queue, limits=limits, tool_parser=tool_parser, log=log
        )
        with closing(engine), _written(engine, count_experts):
            run_server(engine, served_name or model_basename(model), options, sockets)


def _sockets(host: str, port: int) -> AbstractContextManager[list[socket]]:
    """Where this process is to listen; nowhere as another rank of torchrun."""
    from quantkit.common.bind import bind

    return bind(host, port) if os.environ.get("RANK", "0") == "0" else nullcontext([])


def _draft(name: str | None) -> Path | None:
    """Where a draft model is."""
    return None if name is None else find_model(name)


def _counting(file: Path | None) -> bool:
    """Whether experts are counted. Refuses a file that could not be written at the end."""
    if file is not None:
        check_writable(file, "--count-experts")
    return file is not None


@contextmanager
def _written(engine: Any, file: Path | None) -> Iterator[None]:
    """Writes what the engine counted to `file` at the end, however it comes."""
    try:
        yield
    finally:
        if file is not None:
            engine.expert_counter.counts.write(file)


def deploy(
    model: Model,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm, sglang, vllm-ascend or omni-infer.", autocompletion=names_of_engines
        ),
    ],
    boxes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Machines that share the model; those of the layout otherwise, or one."
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Of a machine: 4, 4x80GiB or 4xH100; those of the layout otherwise, mostly 8."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="A layout by name, such as one with prefill and decode apart."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of the longest request; 16384 otherwise, or what the model takes."
        ),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="Addresses of the boxes, comma-separated.")
    ] = None,
    nic: Annotated[str, typer.Option(help="The network interface of these addresses.")] = "eth0",
    mtp: Annotated[
        int, typer.Option(min=0, help="Tokens that the MTP layer guesses a step; 0 leaves it out.")
    ] = 0,
    json_: AsJson = False,
) -> None:
    """Print the exact commands that serve a checkpoint with another engine, on one box or many, and
    whether it fits.

    The exit code is 1 where the engine does not load it.
    """
    from quantkit.checkpoint.remote import open_headers
    from quantkit.deploy.launch import deploy as plan
    from quantkit.engines.layouts import find_topology
    from quantkit.planning.clusters import compare_checkpoint
    from quantkit.planning.devices import Devices, read_number

    given = None if devices is None else read_number(devices)
    known = given if isinstance(given, Devices) else None
    checkpoint = open_headers(model)
    addresses = [host.strip() for host in hosts.split(",")] if hosts else None
    machine: dict[str, Any] = {
        "boxes": boxes,
        "devices": known.count if known else given,
        "device": known and known.device,
    }
    memory = None if known is None else known.memory_bytes / 2**30
    machine_of = {**machine, "hosts": addresses, "nic": nic, "memory_gib": memory}
    planned = plan(
        checkpoint,
        engine,
        layout=layout,
        context=context,
        draft_length=mtp,
        name=model_basename(model),
        **machine_of,
    )
    told = planned.as_dict() | {
        "decoding": compare_checkpoint(
            checkpoint, find_topology(engine, name=layout, **machine), planned.memory
        )
    }
    if json_:
        print_json(told)
    else:
        console.show_deployment(told, [launch.script() for launch in planned.launches])
    if planned.refusal is not None:
        console.tell_error(planned.refusal.problem, planned.refusal.remedy, as_json=False)
        raise typer.Exit(1)
