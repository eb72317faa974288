"""Distance of two models on replies to a task's prompts, sampled by the baseline or by a server.

Locally the baseline samples, and both models score its tokens; their greedy replies are compared as
well.

With a server only log-probabilities of its own replies are available: it samples at temperature 1,
where raw and scaled log-probabilities are the same, and returns the most likely tokens at every
position. The local model scores the same tokens. KL is taken over the returned tokens and all
others as one outcome; merging outcomes never increases KL (data processing inequality), so the
result is a lower bound, tight where the returned tokens have nearly all probability.

Replies that `quantkit eval` stored are texts to score, too: what a model wrote by itself, on any
machine and by any server.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from quantkit.checkpoint.hub import find_model
from quantkit.common.errors import QuantkitError
from quantkit.common.result import JsonObject
from quantkit.evaluation.distance.documents import Window
from quantkit.evaluation.distance.quality import (
    GreedyPaths,
    Quality,
    Sums,
    TextProgress,
    summarize,
)
from quantkit.evaluation.distance.tracing import open_traced
from quantkit.evaluation.generation import TaskRun, prepare
from quantkit.evaluation.generators.endpoint import Endpoint
from quantkit.evaluation.generators.generator import Generation, ModelReply, Prompt
from quantkit.evaluation.generators.local import Local, encode_prompt
from quantkit.evaluation.options import PerplexityOptions
from quantkit.evaluation.results.stored import read_prompts, read_samples
from quantkit.evaluation.tasks.prompts import RAW
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.tokenizer.chat import ChatTokenizer
from quantkit.tokenizer.reasoning_tags import REASONING_TAGS


def read_replies(folder: Path, tokenizer: ChatTokenizer, limit: int | None) -> list[Window]:
    """Of every problem the first reply that is not empty, in the order of the run: its prompt is
    context, its own tokens are scored, those of a cut reply as far as they go. Further repeats are
    left out, so that intervals over documents are over problems.

    Reasoning that a server kept apart is put back between the model's tags; the token that ends a
    reply was not stored and is not scored. Raises QuantkitError where the folder has no replies, or
    more than MAX_LOST of their prompts have other numbers of tokens here than in the run.
    """
    prompts = {(row["task"], row["problem"]): row["prompt"] for row in _stored(folder, "prompts")}
    windows, replies, lost = list[Window](), 0, ""
    for key, row in _first_replies(_stored(folder, "samples")):
        if replies == limit:
            break
        if key not in prompts:
            raise QuantkitError(
                f"{folder} has a reply to {key[1]} of {key[0]} and no prompt of it",
                "give the --out folder of an evaluation, as quantkit wrote it",
            )
        replies += 1
        prompt = _prompt(prompts[key], bool(row.get("think_open")))
        ids, is_open = encode_prompt(tokenizer, prompt)
        counted = row.get("prompt_tokens") or len(ids)
        if counted != len(ids):
            lost = f"the prompt of {key[1]} had {counted} tokens and has {len(ids)} here"
            continue
        written = tokenizer.encode_rendered(_written(row, is_open, tokenizer))
        if written:
            windows.append(Window(torch.tensor(ids + written, dtype=torch.int64), len(ids)))
        else:
            lost = f"the reply to {key[1]} has no token here"
    if not replies:
        raise QuantkitError(f"{folder} has no reply with a text", "give the folder of another run")
    if len(windows) < (1 - MAX_LOST) * replies:
        raise QuantkitError(
            f"{replies - len(windows)} of {replies} replies in {folder} cannot be scored: {lost}",
            "give the replies of a model with the same tokenizer and chat template",
        )
    return windows


def _stored(folder: Path, name: str) -> list[JsonObject]:
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise QuantkitError(
            f"{folder} has no {path.name}",
            "give the --out folder of a finished evaluation, or a file with texts",
        )
    return read_prompts(path) if name == "prompts" else read_samples(path)


def _first_replies(
    rows: list[JsonObject],
) -> Iterator[tuple[tuple[str, str], JsonObject]]:
    """By task and problem."""
    seen = set[tuple[str, str]]()
    for row in rows:
        key = row["task"], row["problem"]
        if key not in seen and (row["text"] or row.get("reasoning")):
            seen.add(key)
            yield key, row


def _prompt(parts: list[dict[str, str]], think: bool) -> Prompt:
    """As `prompt_parts` stored it."""
    if parts[0]["role"] == RAW:
        return Prompt(text=parts[0]["content"])
    return Prompt(messages=tuple(parts), think=think)


def _written(row: JsonObject, is_open: bool, tokenizer: ChatTokenizer) -> str:
    """The reply as the model wrote it. is_open: the prompt ends inside the reasoning."""
    text, reasoning = str(row["text"]), row.get("reasoning")
    if reasoning is None:
        return text
    known = tokenizer.tokenizer.token_to_id
    tags = [pair for pair in REASONING_TAGS if None not in map(known, pair)]
    if not tags:
        raise QuantkitError(
            f"the server kept reasoning apart, and {tokenizer.path} has no tokens around it",
            "run eval again on a server without a reasoning parser",
        )
    opened, closed = tags[0]
    begun = reasoning if is_open else f"{opened}\n{reasoning}"
    is_cut = row.get("finish_reason") == "length" and not text
    return begun if is_cut else f"{begun.rstrip()}\n{closed}\n\n{text.lstrip()}"


def task_prompts(options: PerplexityOptions) -> tuple[TaskRun, list[Prompt]]:
    """The task `options.sampled` under protocol r1, and its prompts in order, each with its
    seed."""
    assert options.sampled is not None
    generation = {"max_tokens": options.max_tokens} if options.max_tokens else None
    work = prepare(
        options.sampled, "r1", options.data_dir, options.limit, 2, generation, options.seed
    )
    return work, [work.prompt(problem, 0) for problem in work.problems]


def sample_replies(
    path: Path, work: TaskRun, prompts: list[Prompt], options: EngineOptions
) -> list[Window]:
    """One sampled reply of the model at `path` to every prompt, as windows: the prompt is
    context, the reply is scored."""
    replies = _generate(replace(options, model_path=path), prompts, work.setting.generation)
    windows = [
        Window(torch.tensor(ids + reply, dtype=torch.int64), len(ids))
        for ids, reply in replies
        if reply
    ]
    if not windows:
        raise QuantkitError(
            f"{path} generated no reply to the prompts of {work.setting.task.name}",
            "check it with quantkit run",
        )
    return windows


def greedy_paths(
    path: Path, base: Path, work: TaskRun, prompts: list[Prompt], options: EngineOptions
) -> GreedyPaths:
    """Compare both models' greedy replies token by token. options: of the model at `path`; the
    baseline's cache has 16 bits."""
    greedy = Generation(max_tokens=work.setting.generation.max_tokens)
    sides = replace(options, model_path=path), replace(options, model_path=base, cache=None)
    ours, theirs = ([reply for _, reply in _generate(side, prompts, greedy)] for side in sides)
    return GreedyPaths(
        len(prompts),
        sum(map(operator.eq, ours, theirs)) / len(prompts),
        float(median(map(common_prefix, ours, theirs))),
    )


def common_prefix(one: list[int], other: list[int]) -> int:
    """Tokens before the first difference."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)


def _generate(
    options: EngineOptions,
    prompts: list[Prompt],
    generation: Generation,
) -> list[tuple[list[int], list[int]]]:
    """(prompt, reply) as token ids, for every prompt in order."""
    model = Local(options, name=options.model_path.name)
    try:
        encoded = [model.encode(prompt) for prompt in prompts]
        longest = model.engine.max_model_len
        if too_long := next((len(ids) for ids in encoded if len(ids) >= longest), None):
            raise QuantkitError(
                f"a prompt has {too_long} tokens, the context is {longest}", "use another task"
            )
        sampling = [
            SamplingParams(
                max_new_tokens=generation.max_tokens or longest,
                temperature=generation.temperature,
                top_p=generation.top_p,
                seed=prompt.seed,
            )
            for prompt in prompts
        ]
        replies: dict[int, list[int]] = {
            done.index: list(done.token_ids) for done in model.engine.generate(encoded, sampling)
        }
        return [(ids, replies[number]) for number, ids in enumerate(encoded)]
    finally:
        model.close()


TOP = 20
"""Requested top log-probabilities per position; 20 is the maximum of OpenAI's interface."""
_MIN_REMAINDER = 1e-6  # minimum probability of all others; less is rounding of the server's values
MAX_LOST = 0.02
"""Share of replies that may not be comparable."""


@dataclass(frozen=True)
class ScoredReply:
    """A reply as `window`; for each of its tokens the server's top log-probabilities by token id
    (`top`) and its own (`own`)."""

    window: Window
    top: list[dict[int, float]]
    own: list[float]


@torch.inference_mode()
def measure_endpoint(
    local: str,
    url: str,
    options: PerplexityOptions,
    *,
    is_baseline: bool,
    progress: Callable[[TextProgress], None] | None = None,
) -> Quality:
    """KL(baseline || model) over the replies of the server at `url` to the prompts of
    `options.sampled`. is_baseline: the server's model is the baseline.

    Raises QuantkitError where more than 2 % of the replies are lost, or none can be compared.
    """
    path, report = find_model(local), progress or (lambda _: None)
    replies = _replies(path, url, options)
    traced = open_traced(path, options.device, options.backend, options.cache)
    total, done = sum(len(reply.window.ids) for reply in replies), 0
    sums, named = Sums(), 0.0
    for reply in replies:
        window = reply.window
        rows = traced([window.ids]).final[window.first - 1 : -1]
        logs = torch.cat(
            [traced.head(part).float().log_softmax(dim=-1) for part in rows.split(128)]
        ).cpu()
        named += add_reply(sums, reply, logs, is_baseline)
        done += len(window.ids)
        report(TextProgress("model", done, total))
    quality = summarize(sums)
    return replace(quality, named_share=named / quality.tokens)


def _replies(path: Path, url: str, options: PerplexityOptions) -> list[ScoredReply]:
    work, prompts = task_prompts(options)
    tokenizer = ChatTokenizer(path)
    endpoint = Endpoint(url, model=options.served_model, api_key=options.api_key, top_logprobs=TOP)
    sampling = Generation(temperature=1.0, top_p=1.0, max_tokens=work.setting.generation.max_tokens)
    texts, replies, lost = _ids_by_text(tokenizer), [], ""
    for reply in sorted(endpoint.generate(prompts, sampling), key=lambda reply: reply.index):
        try:
            prompt = prompts[reply.index]
            ids = (
                tokenizer.encode(prompt.text)
                if prompt.text is not None
                else tokenizer.encode_chat(list(prompt.messages))
            )
            replies.append(_scored_reply(reply, ids, texts))
        except ValueError as error:
            lost = str(error)
    if len(replies) < (1 - MAX_LOST) * len(prompts):
        raise QuantkitError(
            f"{len(prompts) - len(replies)} of {len(prompts)} replies of {url} cannot be "
            f"compared: {lost}",
            "compare with a server that returns log-probabilities (top_logprobs) and applies the "
            "same tokenizer and chat template",
        )
    return replies


def _ids_by_text(tokenizer: ChatTokenizer) -> dict[str | bytes, int]:
    """Token ids by text and by bytes, for those that belong to exactly one token."""
    ids = defaultdict[str | bytes, list[int]](list)
    for token in range(tokenizer.tokenizer.get_vocab_size()):
        for key in (tokenizer.token_text(token), tokenizer.token_bytes(token)):
            ids[key].append(token)
    return {key: found[0] for key, found in ids.items() if len(found) == 1}


def _key(entry: JsonObject) -> str | bytes:
    """The bytes of a token where they say more than its text: it is a part of a character."""
    text, own = entry["token"], bytes(entry.get("bytes") or ())
    return own if own and own != text.encode() else text


def _scored_reply(
    reply: ModelReply, prompt: list[int], texts: dict[str | bytes, int]
) -> ScoredReply:
    """The server's log-probabilities of a reply, up to the first token that is not unique. Raises
    ValueError where there are none."""
    if reply.error is not None or not reply.logprobs:
        raise ValueError(reply.error or reply.refusal or "the reply has no log-probabilities")
    if reply.prompt_tokens and reply.prompt_tokens != len(prompt):
        raise ValueError(
            f"the server counts {reply.prompt_tokens} tokens in a prompt that has {len(prompt)} "
            "here"
        )
    ids: list[int] = []
    top: list[dict[int, float]] = []
    own: list[float] = []
    for place in reply.logprobs:
        token = texts.get(_key(place))
        if token is None:
            break
        named = {
            texts[_key(one)]: float(one["logprob"])
            for one in place.get("top_logprobs") or []
            if _key(one) in texts
        }
        ids.append(token)
        own.append(float(place["logprob"]))
        top.append(named | {token: own[-1]})
    if not ids:
        raise ValueError(
            f"its first token {reply.logprobs[0]['token']!r} is not in the local tokenizer"
        )
    return ScoredReply(Window(torch.tensor(prompt + ids, dtype=torch.int64), len(prompt)), top, own)


def add_reply(sums: Sums, reply: ScoredReply, logs: Tensor, is_baseline: bool) -> float:
    """Add a reply's metrics; returns the probability of the returned tokens, summed over places.
    logs: float32 [reply tokens, vocabulary], of the local model."""
    targets = reply.window.ids[reply.window.first :].tolist()
    rows, named_mass = list[tuple[float, float, bool]](), 0.0
    for place, (named, target) in enumerate(zip(reply.top, targets)):
        ids, served = torch.tensor(list(named)), torch.tensor(list(named.values())).double()
        theirs, ours = _with_remainder(served), _with_remainder(logs[place, ids].double())
        base, model = (theirs, ours) if is_baseline else (ours, theirs)
        kl = max(0.0, float((base.exp() * (base - model)).sum()))
        same = int(logs[place].argmax()) == max(named, key=lambda token: named[token])
        rows.append((-float(logs[place, target]), kl, same))
        named_mass += min(1.0, float(served.exp().sum()))
    local, kl, same = torch.tensor(rows, dtype=torch.float64).T
    served = -torch.tensor(reply.own, dtype=torch.float64)
    nll, base_nll = (local, served) if is_baseline else (served, local)
    sums.documents.append({"nll": nll, "base_nll": base_nll, "kl": kl, "same": same})
    return named_mass


def _with_remainder(logs: Tensor) -> Tensor:
    """Log-probabilities of the returned tokens, and of all others as one."""
    rest = (1 - logs.exp().sum()).clamp(min=_MIN_REMAINDER)
    return torch.cat([logs, rest.log()[None]])
