"""Distance of a quantized model from its original, token by token: perplexity, KL divergence,
agreement, error per layer.

The baseline runs first and writes the hidden state after every layer and the routed experts to
disk. Then it is unloaded (only its output head stays) and the candidate runs over the same
documents. Short documents share a forward pass, each as a sequence of its own. So memory holds one
model and at most seq_len tokens, and disk holds tokens x (layers + 1) x hidden values of the
baseline's dtype until the end.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.checkpoint.hub import find_model
from quantkit.common.devices import find_device
from quantkit.common.errors import QuantkitError
from quantkit.evaluation.distance.documents import Window, read_documents, sliding_windows
from quantkit.evaluation.distance.quality import (
    Quality,
    TextProgress,
    TokenSums,
    add_layers,
    add_tokens,
    summarize,
)
from quantkit.evaluation.distance.replies import (
    ServerOptions,
    greedy_paths,
    measure_endpoint,
    sample_replies,
    task_prompts,
)
from quantkit.evaluation.distance.tracing import Trace, make_expert_counter, open_traced
from quantkit.evaluation.generators.generator import reject_cache_option
from quantkit.evaluation.openai_server import is_url
from quantkit.executor.cache.cache import check_cache_dtype
from quantkit.tokenizer.chat import ChatTokenizer

SEQ_LEN = 2048
Report = Callable[[TextProgress], None]


@torch.inference_mode()
def measure(
    model: str,
    text: Path | list[Tensor] | None = None,
    *,
    baseline: str | None = None,
    seq_len: int = SEQ_LEN,
    stride: int | None = None,
    limit: int | None = None,
    sampled: str | None = None,
    data_dir: Path | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    count_experts: bool = False,
    device: str = "auto",
    backend: str = "auto",
    cache: str | None = None,
    served_model: str | None = None,
    api_key: str | None = None,
    progress: Report | None = None,
) -> Quality:
    """Perplexity of `model` over the documents of `text` (.jsonl, .txt, or token ids int64 [T]
    each), and its distance from `baseline`.

    seq_len: maximum document length in tokens. stride: score whole documents in windows of seq_len
    tokens, this far apart. limit: the first documents only. sampled: instead of a text, score the
    baseline's replies to the prompts of this task (protocol r1, sampled with `seed`, at most
    `max_tokens` or the task's own limit), read from `data_dir`; the two models' greedy replies are
    compared as well. cache: int8 or fp8 quantizes the KV cache of `model`; the baseline, which may
    be the same model, keeps its 16 bits. With `sampled`, one of the two may be the URL of a server,
    with `served_model` and `api_key`: the server samples then, and KL uses the log-probabilities
    that it returns (replies.py). Raises QuantkitError where the text is unusable or the two models
    do not match.
    """
    if (text is None) == (sampled is None):
        raise QuantkitError(
            "either a text or a task to sample on is needed",
            "give --text FILE, or --sampled TASK",
        )
    if sampled is not None and baseline is None:
        raise QuantkitError(
            "--sampled needs a model that samples", "give the original with --baseline"
        )
    if is_url(model) or (baseline is not None and is_url(baseline)):
        baseline, sampled = _check_endpoint(model, baseline, sampled, cache, count_experts)
        local, served = (baseline, model) if is_url(model) else (model, baseline)
        asked = ServerOptions(served, model=served_model, api_key=api_key)
        options: dict[str, Any] = {
            "data_dir": data_dir,
            "limit": limit,
            "max_tokens": max_tokens,
            "seed": seed,
            "device": device,
            "backend": backend,
        }
        return measure_endpoint(
            local,
            asked,
            is_baseline=served is baseline,
            task=sampled,
            cache=cache,
            progress=progress,
            **options,
        )
    path, base = find_model(model), find_model(baseline) if baseline is not None else None
    if base is not None:
        _check_same_tokens(path, base)
    check_cache_dtype(cache, find_device(device))
    paths = None
    if sampled is not None and base is not None:
        work, prompts = task_prompts(sampled, data_dir, limit, seed, max_tokens)
        windows = sample_replies(base, work, prompts, device=device, backend=backend)
        paths = greedy_paths(path, base, work, prompts, device=device, backend=backend, cache=cache)
    else:
        assert text is not None
        windows = _windows(text, path, seq_len, stride, limit)
    return replace(
        _score(
            path,
            base,
            windows,
            seq_len,
            count_experts,
            device,
            backend,
            cache,
            progress or (lambda _: None),
        ),
        greedy=paths,
    )


def _score(
    path: Path,
    base: Path | None,
    windows: list[Window],
    seq_len: int,
    count_experts: bool,
    device: str,
    backend: str,
    cache: str | None,
    report: Report,
) -> Quality:
    """Run both models over `windows`, the baseline first."""
    with tempfile.TemporaryDirectory(prefix="quantkit-ppl-") as folder:
        batches = _batches(windows, max(seq_len, *(len(window.ids) for window in windows)))
        head = (
            _run_baseline(base, batches, Path(folder), device, backend, report)
            if base is not None
            else None
        )
        traced = open_traced(path, device, backend, cache)
        counter = make_expert_counter(traced) if count_experts else None
        sums, done, total = TokenSums(), 0, sum(len(window.ids) for window in windows)
        for number, batch in enumerate(batches):
            trace = traced([window.ids for window in batch])
            theirs = _read(Path(folder), number, traced.device) if head is not None else None
            add_tokens(sums, batch, trace, traced.head, theirs, head)
            if theirs is not None:
                add_layers(sums, trace, theirs)
            done += len(trace.final)
            report(TextProgress("model", done, total))
    return replace(
        summarize(sums, len(windows), base is not None),
        expert_counts=None if counter is None else counter.counts,
    )


def _check_endpoint(
    model: str, baseline: str | None, sampled: str | None, cache: str | None, count_experts: bool
) -> tuple[str, str]:
    """(baseline, task). Raises QuantkitError for what a server cannot do."""
    if baseline is None or sampled is None:
        raise QuantkitError(
            "a server returns log-probabilities of its own replies only",
            "give --sampled TASK, and a local model as the other",
        )
    if is_url(model) and is_url(baseline):
        raise QuantkitError(
            "two servers cannot score each other's tokens",
            "load one of the two models here, by its folder or name",
        )
    if is_url(model):
        reject_cache_option(model, cache)
    if count_experts:
        raise QuantkitError(
            "experts are not counted in a comparison with a server", "leave --count-experts out"
        )
    return baseline, sampled


def _windows(
    text: Path | list[Tensor], model: Path, seq_len: int, stride: int | None, limit: int | None
) -> list[Window]:
    longest = seq_len if stride is None else sys.maxsize
    documents = (
        text
        if isinstance(text, list)
        else read_documents(text, ChatTokenizer(model), seq_len=longest, limit=limit)
    )
    if stride is None:
        return [Window(ids) for ids in documents]
    return [
        window for document in documents for window in sliding_windows(document, seq_len, stride)
    ]


def _batches(windows: list[Window], tokens: int) -> list[list[Window]]:
    """Consecutive windows grouped up to `tokens` tokens, the length of the longest."""
    batches: list[list[Window]] = []
    room = 0
    for window in windows:
        if len(window.ids) > room:
            batches.append([])
            room = tokens
        batches[-1].append(window)
        room -= len(window.ids)
    return batches


def _check_same_tokens(path: Path, base: Path) -> None:
    """Token ids must have the same meaning in both. A tokenizer that was saved again may differ
    in bytes."""
    one, other = (ChatTokenizer(folder).tokenizer for folder in (path, base))
    if one.get_vocab() != other.get_vocab():
        raise QuantkitError(
            f"{path} and the baseline {base} have different tokenizers",
            "compare a model with the one it was made from",
        )


def _run_baseline(
    base: Path, batches: list[list[Window]], folder: Path, device: str, backend: str, report: Report
) -> Callable[[Tensor], Tensor]:
    """Write a trace of every forward pass to `folder`; returns the output head, the only part of
    the baseline still needed."""
    traced = open_traced(base, device, backend)
    done, total = 0, sum(len(window.ids) for batch in batches for window in batch)
    for number, batch in enumerate(batches):
        trace = traced([window.ids for window in batch])
        tensors = {f"hidden.{layer}": value for layer, value in trace.hidden.items()}
        tensors |= {f"topk_ids.{layer}": value.int() for layer, value in trace.topk_ids.items()}
        save_file(
            {
                name: value.cpu().contiguous()
                for name, value in (tensors | {"final": trace.final}).items()
            },
            _file(folder, number),
        )
        done += len(trace.final)
        report(TextProgress("baseline", done, total))
    return traced.head


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.safetensors"


def _read(folder: Path, number: int, device: torch.device) -> Trace:
    """The baseline's trace of one forward pass; its file is deleted."""
    file = _file(folder, number)
    tensors = load_file(file, device=str(device))
    file.unlink()

    def layers(kind: str) -> dict[int, Tensor]:
        found = ((name.partition("."), value) for name, value in tensors.items())
        return {int(number): value for (name, _, number), value in found if name == kind}

    return Trace(layers("hidden"), layers("topk_ids"), tensors["final"])
