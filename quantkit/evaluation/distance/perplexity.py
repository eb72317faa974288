"""Distance of a quantized model from its original, token by token: perplexity, KL divergence,
agreement, error per layer.

The baseline runs first and writes the hidden state after every layer and the routed experts to
disk. Then it is unloaded (only its output head stays) and the candidate runs over the same
documents. Short documents share a forward pass, each as a sequence of its own. So memory holds one
model and at most seq_len tokens, or the longest reply, and disk holds (layers + 1) x hidden values of
the baseline's dtype for each of the first _TRACED_TOKENS tokens, and one layer's for further ones,
until the end. The figures, the table along the text, and the plots are in ppl.json and ppl.html.
"""

import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit import __version__
from quantkit.checkpoint.hub import find_model
from quantkit.checkpoint.output_dir import check_results_folder
from quantkit.common.atomic_write import check_writable, make_folder, write_atomic
from quantkit.common.devices import find_device
from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_json
from quantkit.common.pages import render_page
from quantkit.common.plots import check_drawable
from quantkit.common.result import finite
from quantkit.evaluation.distance.documents import Window, read_documents, sliding_windows
from quantkit.evaluation.distance.quality import (
    Quality,
    Sums,
    TextProgress,
    add_layers,
    add_tokens,
    summarize,
)
from quantkit.evaluation.distance.replies import (
    greedy_paths,
    measure_endpoint,
    read_replies,
    sample_replies,
    task_prompts,
)
from quantkit.evaluation.distance.tracing import Trace, make_expert_counter, open_traced
from quantkit.evaluation.generators.generator import reject_cache_option
from quantkit.evaluation.generators.openai_server import is_url
from quantkit.evaluation.options import PerplexityOptions
from quantkit.evaluation.results.folder import local_models
from quantkit.executor.cache.cache import check_cache_dtype
from quantkit.executor.options import EngineOptions
from quantkit.models import find_architecture, is_known
from quantkit.models.architecture import longest_text
from quantkit.tokenizer.chat import ChatTokenizer

_TRACED_TOKENS = 1 << 16  # from the next pass on no layers and experts are compared
Report = Callable[[TextProgress], None]


@torch.inference_mode()
def measure(
    model: str,
    text: Path | list[Tensor] | None = None,
    options: PerplexityOptions = PerplexityOptions(),
    *,
    progress: Report | None = None,
) -> Quality:
    """Perplexity of `model` over the documents of `text` (.jsonl, .txt, the output folder of an
    evaluation, whose replies are scored, or token ids int64 [T] each), and its distance from the
    baseline.

    Without a text, the baseline's replies to the prompts of the task `sampled` are scored (protocol
    r1), and the greedy replies of the two models are compared as well. `cache` is that of `model`;
    the baseline, which may be the same model, has 16 bits. One of the two may be the URL of a
    server if a task is sampled: the server then samples, and KL is from its log-probabilities
    (replies.py). Raises QuantkitError where the text is unusable or the two models do not belong
    together.
    """
    sampled = options.sampled
    baseline = None if options.baseline is None else str(options.baseline)
    if options.count_experts is not None:
        check_writable(options.count_experts, "--count-experts")
    if options.out is not None:
        check_report(options.out, model, baseline)
    if (text is None) == (sampled is None):
        raise QuantkitError(
            "either a text or a task to sample on is needed", "give --text FILE, or --sampled TASK"
        )
    if sampled is not None and baseline is None:
        raise QuantkitError(
            "--sampled needs a model that samples", "give the original with --baseline"
        )
    if is_url(model) or (baseline is not None and is_url(baseline)):
        baseline = _check_endpoint(model, baseline, options)
        local, served = (baseline, model) if is_url(model) else (model, baseline)
        quality = measure_endpoint(
            local, served, options, is_baseline=served is baseline, progress=progress
        )
    else:
        quality = _measure_local(model, baseline, text, options, progress or (lambda _: None))
    if options.out is not None:
        write_report(options.out, model, baseline, quality)
    return quality


def _measure_local(
    model: str,
    baseline: str | None,
    text: Path | list[Tensor] | None,
    options: PerplexityOptions,
    report: Report,
) -> Quality:
    """Both models are loaded here, one after the other."""
    sampled, cache = options.sampled, options.cache
    path, base = find_model(model), find_model(baseline) if baseline is not None else None
    if base is not None:
        _check_same_tokens(path, base)
    check_cache_dtype(cache, find_device(options.device))
    paths = None
    if sampled is not None and base is not None:
        work, prompts = task_prompts(options)
        engine = EngineOptions(device=options.device, backend=options.backend)
        windows = sample_replies(base, work, prompts, engine)
        paths = greedy_paths(path, base, work, prompts, replace(engine, cache=cache))
    else:
        assert text is not None
        windows = _windows(text, path, options)
    _warn_of_length(path, max(len(window.ids) for window in windows))
    quality = _score(path, base, windows, options, report)
    if options.count_experts is not None and quality.expert_counts is not None:
        quality.expert_counts.write(options.count_experts)
    return replace(quality, greedy=paths)


def _score(
    path: Path,
    base: Path | None,
    windows: list[Window],
    options: PerplexityOptions,
    report: Report,
) -> Quality:
    """Both models over `windows`, the baseline first."""
    device, backend = options.device, options.backend
    with tempfile.TemporaryDirectory(prefix="quantkit-ppl-") as folder:
        batches = _batches(windows, max(options.seq_len, *(len(window.ids) for window in windows)))
        head = (
            _run_baseline(base, batches, Path(folder), device, backend, report)
            if base is not None
            else None
        )
        traced = open_traced(path, device, backend, options.cache)
        counter = make_expert_counter(traced) if options.count_experts is not None else None
        sums, done, total = Sums(), 0, sum(len(window.ids) for window in windows)
        for number, batch in enumerate(batches):
            trace = traced([window.ids for window in batch])
            theirs = _read(Path(folder), number, traced.device) if head is not None else None
            add_tokens(sums, batch, trace, traced.head, theirs, head)
            if theirs is not None and theirs.hidden:
                add_layers(sums, trace, theirs)
            done += len(trace.final)
            report(TextProgress("model", done, total))
    return replace(
        summarize(sums),
        expert_counts=None if counter is None else counter.counts,
    )


def _warn_of_length(path: Path, tokens: int) -> None:
    """Before hours of work."""
    config = read_json(path / "config.json")
    if is_known(config):
        longest = longest_text(find_architecture(config).Config.from_dict(config))
    else:  # by transformers, which refuses longer texts where positions are learned only
        text = config.get("text_config")
        found = (text if isinstance(text, dict) else config).get("max_position_embeddings")
        longest = found if type(found) is int else 0
    if 0 < longest < tokens:
        warnings.warn(
            f"the longest text has {tokens:,} tokens, and max_position_embeddings is {longest:,}: "
            f"perplexity beyond it says nothing of the model; give --seq-len {longest}",
            stacklevel=2,
        )


def _check_endpoint(model: str, baseline: str | None, options: PerplexityOptions) -> str:
    """The baseline. Refuses what a server cannot do."""
    if baseline is None or options.sampled is None:
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
        reject_cache_option(model, options.cache)
    if options.count_experts is not None:
        raise QuantkitError(
            "experts are not counted in a comparison with a server", "leave --count-experts out"
        )
    return baseline


def _windows(text: Path | list[Tensor], model: Path, options: PerplexityOptions) -> list[Window]:
    seq_len, stride = options.seq_len, options.stride
    if isinstance(text, Path) and text.is_dir():
        if stride is not None:
            raise QuantkitError(
                f"{text} holds replies, which are scored whole", "leave --stride out"
            )
        return read_replies(text, ChatTokenizer(model), options.limit)
    longest = seq_len if stride is None else sys.maxsize
    documents = (
        text
        if isinstance(text, list)
        else read_documents(text, ChatTokenizer(model), seq_len=longest, limit=options.limit)
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
        tensors = {"final": trace.final}
        if done < _TRACED_TOKENS:
            tensors |= {f"hidden.{layer}": value for layer, value in trace.hidden.items()}
            tensors |= {f"topk_ids.{layer}": value.int() for layer, value in trace.topk_ids.items()}
        save_file(
            {name: value.cpu().contiguous() for name, value in tensors.items()},
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


_TEMPLATE = Path(__file__).with_name("report.html.j2")


def check_report(out: Path, *models: str | None) -> None:
    """Before hours of work: raise QuantkitError where the report cannot be written to `out`."""
    check_drawable()
    check_results_folder(out, local_models(models))
    make_folder(out)
    check_writable(out / "ppl.json", "--out")


def write_report(out: Path, model: str, baseline: str | None, quality: Quality) -> None:
    about = {"model": model, "baseline": baseline, "quantkit": __version__}
    write_atomic(out / "ppl.json", json.dumps(finite(about | quality.to_json()), indent=1) + "\n")
    drawable = math.isfinite(quality.ppl) and math.isfinite(quality.kl or 0.0)
    page = render_page(
        _TEMPLATE,
        {"share": _share},
        about=about,
        quality=quality,
        plots=quality.pictures() if drawable else [],
    )
    write_atomic(out / "ppl.html", page)


def _share(value: float | None) -> str:
    """In percent."""
    return "-" if value is None else f"{100 * value:.2f}"
