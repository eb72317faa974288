"""How far a quantized model is from its original, token by token: perplexity, KL divergence, agreement, error per layer.

The baseline is run first and leaves behind on disk what the comparison needs: the hidden state after every layer and the chosen experts.
Then it is unloaded (its output head alone stays) and the candidate runs over the same documents. Short documents share a pass, each a
sequence of its own. So memory holds one model and at most seq_len tokens, and disk holds tokens x (layers + 1) x hidden values of the
baseline's dtype until the end.
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.devices import find_device
from quantkit.errors import QuantkitError
from quantkit.evaluation.distance.documents import read_documents
from quantkit.evaluation.distance.sampled import GreedyPaths, greedy_paths, prompts_of, sample_replies
from quantkit.evaluation.distance.windows import Window, slide
from quantkit.executor.cache import find_codes
from quantkit.executor.expert_counter import ExpertCounter
from quantkit.executor.load import LoadedModel, load_model
from quantkit.executor.whole_engine import load_whole
from quantkit.expert_counts import ExpertCounts
from quantkit.hub import find_model
from quantkit.model_files import read_json
from quantkit.models import is_known
from quantkit.models.context import CausalContext, Context
from quantkit.models.decoder import DecoderLayer
from quantkit.models.mlp import MoeMlp
from quantkit.models.watched.whole import WholeModel
from quantkit.plots import layer_plot
from quantkit.result import Result
from quantkit.tokenizer.chat import ChatTokenizer

SEQ_LEN = 2048
_CHUNK = 128  # tokens whose logits are held at a time


@dataclass(frozen=True)
class TextProgress:
    """`done` of `total` tokens are through the model in `stage`."""

    stage: Literal["baseline", "model"]
    done: int
    total: int


@dataclass(frozen=True, repr=False)
class Quality(Result):
    """Means over predicted tokens. KL is KL(baseline || model) in nats; `kl_stderr` is over documents.

    expert_agree: share of the baseline's chosen experts, over (token, MoE layer, slot), that the model chose too; None without experts.
    layer_errors: |h - h_baseline| / |h_baseline| (Frobenius, all tokens) of the hidden state after each layer.
    expert_counts: what the model's experts were asked, where that was to be counted; not in the JSON.
    """

    ppl: float
    tokens: int
    documents: int
    baseline_ppl: float | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    top1_agree: float | None = None
    expert_agree: float | None = None
    layer_errors: list[float] = field(default_factory=list)
    greedy: GreedyPaths | None = None
    expert_counts: ExpertCounts | None = None

    def to_json(self) -> dict[str, Any]:
        """ppl, tokens, documents; with a baseline also the rest. Figures that do not apply are left out."""
        every = {"ppl": self.ppl, "tokens": self.tokens, "documents": self.documents, "baseline_ppl": self.baseline_ppl, "kl": self.kl}
        every |= {"kl_stderr": self.kl_stderr, "top1_agree": self.top1_agree, "expert_agree": self.expert_agree}
        found: dict[str, Any] = {name: value for name, value in every.items() if value is not None}
        found |= {"layer_errors": self.layer_errors} if self.layer_errors else {}
        return found | ({"greedy": self.greedy.to_json()} if self.greedy else {})

    @property
    def heading(self) -> str:
        return "next tokens" if self.kl is None else "next tokens, beside the baseline's"

    def facts(self) -> list[tuple[str, str]]:
        rows = [("perplexity", f"{self.ppl:.4f}"), ("tokens", f"{self.tokens:,} in {self.documents} documents")]
        if self.kl is not None:
            spread = "" if self.kl_stderr is None else f" ± {self.kl_stderr:.1e}"
            rows += [
                ("baseline's perplexity", f"{self.baseline_ppl:.4f}"),
                ("KL from the baseline", f"{self.kl:.3e}{spread} nats a token"),
                ("same likeliest token", f"{self.top1_agree:.2%}"),
            ]
        if self.greedy is not None:
            told = f"{self.greedy.tokens_until_apart:g} tokens (median), {self.greedy.same:.1%} of {self.greedy.prompts} never"
            rows.append(("greedy paths part after", told))
        if self.expert_agree is not None:
            rows.append(("same experts", f"{self.expert_agree:.2%}"))
        return rows + [(f"  error after layer {number}", f"{error:.2e}") for number, error in enumerate(self.layer_errors)]

    def pictures(self) -> list[str]:
        """The error after each layer."""
        layers = dict(enumerate(self.layer_errors))
        return [layer_plot(layers, "error beside the baseline's norm", log=True)] if layers else []


@dataclass
class _Sums:
    """Totals over documents, in float64; the divergence of every token, by document."""

    tokens: int = 0
    nll: float = 0.0
    baseline_nll: float = 0.0
    same_top1: int = 0
    same_experts: int = 0
    experts: int = 0
    error: dict[int, float] = field(default_factory=dict)
    norm: dict[int, float] = field(default_factory=dict)
    document_kl: list[list[float]] = field(default_factory=list)


@dataclass
class Trace:
    """What one pass leaves: hidden [T, H] after each layer, topk_ids [T, k] of each MoE layer, `final` [T, H] after the last norm."""

    hidden: dict[int, Tensor] = field(default_factory=dict)
    topk_ids: dict[int, Tensor] = field(default_factory=dict)
    final: Tensor = field(default_factory=lambda: torch.empty(0))


class WatchedLayer:
    """A layer that shows what it makes of the residual stream."""

    def __init__(self, layer: DecoderLayer, show: Callable[[Tensor], None]) -> None:
        self.layer, self.show, self.input_norm = layer, show, layer.input_norm
        self.mlp = getattr(layer, "mlp", None)  # whoever counts experts asks for it

    def __call__(self, normed: Tensor, residual: Tensor, context: Context, next_norm: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.layer(normed, residual, context, next_norm)
        self.show(residual)
        return normed, residual


class Watched:
    """A loaded model whose layers and experts tell what passes through them. The model is changed in place and is for this use only."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.trace = loaded, Trace()
        layers: list[Any] = loaded.model.layers
        for number, layer in enumerate(layers):
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, MoeMlp):
                mlp.experts = self._watch_experts(number, mlp.experts, mlp.routing.num_experts_per_tok)
        layers[:] = [WatchedLayer(layer, partial(self._keep_hidden, number)) for number, layer in enumerate(layers)]

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """Rows after the last norm -> logits."""
        made: Callable[[Tensor], Tensor] = self.loaded.model.head
        return made

    def _keep_hidden(self, number: int, hidden: Tensor) -> None:
        self.trace.hidden[number] = hidden

    def _watch_experts(self, number: int, experts: Callable[..., Tensor], chosen: int) -> Callable[..., Tensor]:
        def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            self.trace.topk_ids[number] = topk_ids[:, :chosen]  # a shared expert may follow
            return experts(x, topk_ids, topk_weights)

        return run

    def __call__(self, documents: list[Tensor]) -> Trace:
        """Documents as flat sequences, T their tokens together."""
        self.trace = Trace()
        device = self.loaded.device
        context = CausalContext([len(ids) for ids in documents], device, self.loaded.codes)
        self.trace.final = self.loaded.model(torch.cat(documents).to(device), context)
        return self.trace


class WatchedWhole:
    """A model that transformers computes, which tells the same, but for its experts."""

    def __init__(self, model: WholeModel) -> None:
        self.model, self.device, self.head = model, model.device, model.logits

    def __call__(self, documents: list[Tensor]) -> Trace:
        passed = [self.model.forward(ids) for ids in documents]
        layers = passed[0].hidden
        hidden = {number: torch.cat([one.hidden[number] for one in passed]) for number in layers}
        return Trace(hidden, {}, torch.cat([one.final for one in passed]))


def _open(path: Path, device: str, backend: str, cache: str | None = None) -> Watched | WatchedWhole:
    if is_known(read_json(path / "config.json")):
        return Watched(load_model(path, device=device, backend=backend, cache=cache))
    if cache is not None:
        raise QuantkitError(f"{path} is computed by transformers, which has no such cache here", "leave --cache out")
    return WatchedWhole(load_whole(path, device))


def _counter(watched: Watched | WatchedWhole) -> ExpertCounter:
    if isinstance(watched, WatchedWhole):
        raise QuantkitError("what experts are asked is not counted where transformers computes", "leave --count-experts out")
    return ExpertCounter(watched.loaded)


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
    progress: Report | None = None,
) -> Quality:
    """Perplexity of `model` over the documents of `text` (.jsonl, .txt, or token ids int64 [T] each), and its distance from `baseline`.

    seq_len: longest document in tokens. stride: windows of seq_len that far apart, over whole documents (windows.py). limit: the first
    documents only. sampled: instead of a text, what the baseline writes to the prompts of this task (protocol r1, sampled with `seed`,
    `max_tokens` or the task's own number at most), read from `data_dir`; the greedy paths of the two are compared as well. cache: int8 or
    fp8 lets `model` attend to what a cache of 8 bits would hold; the baseline, which may be the same model, attends to its 16.
    Raises QuantkitError where the text is unusable or the two models do not belong together.
    """
    if (text is None) == (sampled is None):
        raise QuantkitError("a text or a task to sample on is needed, and not both", "give --text FILE, or --sampled TASK")
    if sampled is not None and baseline is None:
        raise QuantkitError("who is to sample?", "give the source with --baseline")
    path = find_model(model)
    base = find_model(baseline) if baseline is not None else None
    if base is not None:
        _check_same_tokens(path, base)
    find_codes(cache, find_device(device))
    tell = progress or (lambda _: None)
    paths = None
    if sampled is not None and base is not None:
        work, prompts = prompts_of(sampled, data_dir, limit, seed, max_tokens)
        windows = sample_replies(base, work, prompts, device=device, backend=backend)
        paths = greedy_paths(path, base, work, prompts, device=device, backend=backend, cache=cache)
    else:
        assert text is not None
        windows = _windows(text, path, seq_len, stride, limit)
    with tempfile.TemporaryDirectory(prefix="quantkit-ppl-") as folder:
        passes = _passes(windows, max(seq_len, *(len(window.ids) for window in windows)))
        head = _run_baseline(base, passes, Path(folder), device, backend, tell) if base is not None else None
        watched = _open(path, device, backend, cache)
        counter = _counter(watched) if count_experts else None
        sums, done, total = _Sums(), 0, sum(len(window.ids) for window in windows)
        for number, together in enumerate(passes):
            trace = watched([window.ids for window in together])
            theirs = _read(Path(folder), number, watched.device) if head is not None else None
            _add_tokens(sums, together, trace, watched.head, theirs, head)
            if theirs is not None:
                _add_layers(sums, trace, theirs)
            done += len(trace.final)
            tell(TextProgress("model", done, total))
    counts = None if counter is None else counter.counts
    return replace(_quality(sums, len(windows), base is not None), greedy=paths, expert_counts=counts)


def _windows(text: Path | list[Tensor], model: Path, seq_len: int, stride: int | None, limit: int | None) -> list[Window]:
    longest = seq_len if stride is None else sys.maxsize
    documents = text if isinstance(text, list) else read_documents(text, ChatTokenizer(model), seq_len=longest, limit=limit)
    if stride is None:
        return [Window(ids) for ids in documents]
    return [window for document in documents for window in slide(document, seq_len, stride)]


def _passes(windows: list[Window], tokens: int) -> list[list[Window]]:
    """Neighbouring windows put together up to `tokens`, the length of the longest."""
    passes: list[list[Window]] = []
    room = 0
    for window in windows:
        if len(window.ids) > room:
            passes.append([])
            room = tokens
        passes[-1].append(window)
        room -= len(window.ids)
    return passes


def _check_same_tokens(path: Path, base: Path) -> None:
    """A token id means the same to both. Whoever saves a tokenizer anew may write other bytes of the same tokenizer."""
    one, other = (ChatTokenizer(folder).tokenizer for folder in (path, base))
    if one.get_vocab() != other.get_vocab():
        raise QuantkitError(f"{path} and the baseline {base} have different tokenizers", "compare a model with the one it was made from")


def _run_baseline(
    base: Path, passes: list[list[Window]], folder: Path, device: str, backend: str, tell: Report
) -> Callable[[Tensor], Tensor]:
    """Leave a trace of every pass in `folder`; returns the output head, the only part of the baseline that is needed on."""
    watched = _open(base, device, backend)
    done, total = 0, sum(len(window.ids) for together in passes for window in together)
    for number, together in enumerate(passes):
        trace = watched([window.ids for window in together])
        tensors = {f"hidden.{layer}": value for layer, value in trace.hidden.items()}
        tensors |= {f"topk_ids.{layer}": value.int() for layer, value in trace.topk_ids.items()}
        save_file({name: value.cpu().contiguous() for name, value in (tensors | {"final": trace.final}).items()}, _file(folder, number))
        done += len(trace.final)
        tell(TextProgress("baseline", done, total))
    return watched.head


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.safetensors"


def _read(folder: Path, number: int, device: torch.device) -> Trace:
    """The baseline's trace of one pass; its file is removed."""
    file = _file(folder, number)
    tensors = load_file(file, device=str(device))
    file.unlink()
    hidden = {int(name.removeprefix("hidden.")): value for name, value in tensors.items() if name.startswith("hidden.")}
    topk_ids = {int(name.removeprefix("topk_ids.")): value for name, value in tensors.items() if name.startswith("topk_ids.")}
    return Trace(hidden, topk_ids, tensors["final"])


def _add_tokens(
    sums: _Sums,
    windows: list[Window],
    trace: Trace,
    head: Callable[[Tensor], Tensor],
    theirs: Trace | None,
    their_head: Callable[[Tensor], Tensor] | None,
) -> None:
    """Next-token figures of one pass: each position from the one before a window's first scored token on predicts the token after it."""
    device = trace.final.device
    starts = _starts([len(window.ids) for window in windows])
    rows_of = [torch.arange(window.first - 1, len(window.ids) - 1) + start for window, start in zip(windows, starts)]
    positions = torch.cat(rows_of).to(device)
    targets = torch.cat([window.ids[window.first :] for window in windows]).to(device)
    divergences = []
    for part in _chunks(len(positions)):
        rows, wanted = positions[part], targets[part, None]
        logs = head(trace.final[rows]).float().log_softmax(dim=-1)
        sums.nll -= float(logs.gather(1, wanted).double().sum())
        if theirs is None or their_head is None:
            continue
        base = their_head(theirs.final[rows]).float().log_softmax(dim=-1)
        if base.shape != logs.shape:
            raise QuantkitError(f"the vocabularies have {logs.shape[1]} and {base.shape[1]} entries", "compare a model with its original")
        sums.baseline_nll -= float(base.gather(1, wanted).double().sum())
        # Rounding alone can make the sum negative where the two agree.
        divergences.append((base.exp() * (base - logs)).sum(dim=-1).double().clamp(min=0))
        sums.same_top1 += int((base.argmax(dim=-1) == logs.argmax(dim=-1)).sum())
    sums.tokens += len(positions)
    if divergences:
        sums.document_kl += [part.tolist() for part in torch.cat(divergences).split([window.scored for window in windows])]


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)][:-1]


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK))


def _add_layers(sums: _Sums, ours: Trace, theirs: Trace) -> None:
    if ours.hidden.keys() != theirs.hidden.keys() or ours.topk_ids.keys() != theirs.topk_ids.keys():
        raise QuantkitError("the model and its baseline have different layers", "compare a model with the one it was made from")
    for layer, base in theirs.hidden.items():
        exact = base.double()
        sums.error[layer] = sums.error.get(layer, 0.0) + float((ours.hidden[layer].double() - exact).square().sum())
        sums.norm[layer] = sums.norm.get(layer, 0.0) + float(exact.square().sum())
    for layer, chosen in theirs.topk_ids.items():
        sums.same_experts += int((chosen[:, :, None] == ours.topk_ids[layer][:, None, :]).any(dim=-1).sum())
        sums.experts += chosen.numel()


def _quality(sums: _Sums, documents: int, compared: bool) -> Quality:
    ppl = math.exp(sums.nll / sums.tokens)
    if not compared:
        return Quality(ppl, sums.tokens, documents)
    means = torch.tensor([sum(row) / len(row) for row in sums.document_kl], dtype=torch.float64)
    return Quality(
        ppl=ppl,
        tokens=sums.tokens,
        documents=documents,
        baseline_ppl=math.exp(sums.baseline_nll / sums.tokens),
        kl=sum(map(sum, sums.document_kl)) / sums.tokens,
        kl_stderr=float(means.std() / math.sqrt(documents)) if documents > 1 else None,
        top1_agree=sums.same_top1 / sums.tokens,
        expert_agree=sums.same_experts / sums.experts if sums.experts else None,
        layer_errors=[math.sqrt(sums.error[layer] / sums.norm[layer]) for layer in sorted(sums.error)],
    )
