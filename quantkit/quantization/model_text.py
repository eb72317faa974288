"""Calibration text that the model writes itself: `--calibration self`.

What a model reads and writes when it is used is nearer to its own text than to anybody else's
(LLM-QAT, arXiv 2305.17888). Half of the documents are the model's, at temperature 1: answers to the
questions of quantkit's own text, texts that begin with a word drawn at random, and code. The other
half are quantkit's own, which have what a model seldom writes unasked: tools, tables, reasoning.

OUT.calibration.jsonl     the documents; part of OUT as calibration.jsonl when it is complete
"""

import gc
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import torch

from quantkit.calibrate.data import BUILTIN, SHIPPED_TEXT, WRITTEN, own_documents
from quantkit.calibrate.documents import Document
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.atomic_write import write_atomic
from quantkit.common.errors import QuantkitError
from quantkit.common.progress import Note, OnEvent
from quantkit.common.result import JsonObject
from quantkit.common.sizes import format_duration
from quantkit.executor.engine import Engine
from quantkit.executor.hf_engine import WholeEngine, open_engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Completion
from quantkit.tokenizer.chat import ChatTokenizer

SELF = "self"
"""The value of --calibration."""
_AT_ONCE = 128
"""Texts written together."""
_LONGEST_QUESTION = 0.25
"""Of a document, as a share of its tokens."""
_TRIES = 1000
"""Tokens drawn until one is a word, which hardly any of a vocabulary of digits is."""
_NOTE_S = 30.0
"""Between lines of progress."""
_CODE = (
    "import ",
    "def ",
    "#include <",
    "package main\n",
    "SELECT ",
    "<!DOCTYPE html>\n",
    "public class ",
    "const ",
    "use std::",
    "#!/bin/bash\n",
    "from typing import ",
    '{\n  "',
    "class ",
    "async function ",
    "## Installation\n",
    "\\section{",
    "@dataclass\nclass ",
    "fn main() {\n",
    "interface ",
    "template <typename ",
    "name: ",
    "CREATE TABLE ",
    "    try:\n",
    "struct ",
)
"""Beginnings of programs, markup and documentation."""


def model_text(
    checkpoint: Checkpoint, out: Path, recipe: Recipe, device: str, on_event: OnEvent
) -> Path:
    """The file of the documents, written now if neither `out` nor an interrupted run has it.

    Raises QuantkitError where the model does not fit `device`, on which it is loaded whole, and
    where another file has the text's name.
    """
    source = checkpoint.path
    wanted = (checkpoint.fingerprint, recipe.samples, recipe.held_out)
    key = hashlib.sha256(repr((*wanted, recipe.seq_len, recipe.seed)).encode()).hexdigest()
    for path in (text_path(out), out / SHIPPED_TEXT):
        if path.is_file() and _key(path) == key:
            return path
    if text_path(out).exists() and _key(text_path(out)) is None:
        raise QuantkitError(
            f"{text_path(out)} is there, and no model wrote it for this output",
            "move it away, or choose another --out",
        )
    tokenizer = ChatTokenizer(source)
    own = own_documents(tokenizer, recipe.seed)
    count = (recipe.samples + recipe.held_out) // 2
    prompts = list(islice(_prompts(tokenizer, own, recipe), count))
    records = _written(source, device, prompts, recipe, on_event)
    records += [_record(document) for document in own[: recipe.samples + recipe.held_out - count]]
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"key": key} | one, ensure_ascii=False) for one in records)
    write_atomic(text_path(out), "\n".join(lines) + "\n")
    return text_path(out)


def with_own_text(recipe: Recipe) -> Recipe:
    """The recipe on quantkit's own text where the model writes half of it."""
    return recipe.model_copy(update={"calibration": None}) if recipe.calibration == SELF else recipe


def text_path(out: Path) -> Path:
    """Where the text is until the output is complete."""
    return out.with_name(f"{out.name}.{SHIPPED_TEXT}")


def _key(path: Path) -> object:
    """The key of a file's first record; None for a file of something else."""
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            record = json.loads(file.readline())
        except ValueError:
            return None
    return record.get("key") if isinstance(record, dict) else None


def _record(document: Document) -> JsonObject:
    found: JsonObject = {"kind": document.kind}
    if not document.messages:
        return found | {"text": document.text}
    tools = {"tools": document.tools} if document.tools else {}
    return found | tools | {"messages": document.messages}


_Prompt = tuple[str, list[int]]
"""A question, or "" for a text; the token ids to be continued."""


def _prompts(tokenizer: ChatTokenizer, own: list[Document], recipe: Recipe) -> Iterator[_Prompt]:
    """Without end: a question, a word and an opening of code in turn; no questions for a model
    without a chat template, whose documents are texts."""
    rng, longest = random.Random(recipe.seed), int(recipe.seq_len * _LONGEST_QUESTION)
    code = (("", tokenizer.encode(text)) for text in cycle(_CODE))
    turns: list[Iterator[_Prompt]] = [_openings(tokenizer, rng), code]
    if tokenizer.templates and (questions := list(_questions(tokenizer, own, longest))):
        turns.insert(0, cycle(questions))
    for turn in cycle(turns):
        yield next(turn)


def _questions(tokenizer: ChatTokenizer, own: list[Document], longest: int) -> Iterator[_Prompt]:
    for document in own:
        first = next((one for one in document.messages if one["role"] == "user"), None)
        if first is None or document.tools:
            continue
        try:
            ids = tokenizer.encode_chat([{"role": "user", "content": first["content"]}])
        except QuantkitError:  # a template that wants other roles: then texts alone
            continue
        if len(ids) <= longest:
            yield first["content"], ids


def _openings(tokenizer: ChatTokenizer, rng: random.Random) -> Iterator[_Prompt]:
    """Words of the vocabulary, after what begins a text."""
    begin = tokenizer.encode("")
    size = tokenizer.tokenizer.get_vocab_size()
    size = min(size, tokenizer.vocab_size or size)
    while True:
        tokens = (rng.randrange(size) for _ in range(_TRIES))
        words = (one for one in tokens if tokenizer.decode([one]).strip().isalpha())
        yield "", [*begin, next(words, rng.randrange(size))]


def _written(
    source: Path, device: str, prompts: list[_Prompt], recipe: Recipe, on_event: OnEvent
) -> list[JsonObject]:
    """The records of the finished prompts."""
    at_once = min(len(prompts), _AT_ONCE)
    options = EngineOptions(
        source,
        device=device,
        max_batch=at_once,
        cache_tokens=at_once * recipe.seq_len,
        prefix_cache=False,
    )
    try:
        engine = open_engine(options)
    except QuantkitError as error:
        raise QuantkitError(
            f"the model cannot write its calibration text here: {error.problem}",
            f"use --calibration {BUILTIN} for quantkit's own text, or give a file",
        ) from error
    on_event(Note(f"the model writes {len(prompts)} documents of calibration text"))
    longest = min(recipe.seq_len, engine.max_model_len)
    prompts = [(question, ids[: longest // 2]) for question, ids in prompts]
    total = sum(longest - len(ids) for _, ids in prompts)
    began = shown = time.monotonic()
    written = 0

    def report(tokens: int) -> None:
        nonlocal written, shown
        written, now = written + tokens, time.monotonic()
        if now > shown + _NOTE_S and written:
            shown, left = now, (now - began) * (total / written - 1)
            said = f"{written:,} of at most {total:,} tokens written"
            on_event(Note(f"{said}, {format_duration(left)} left"))

    params = [
        SamplingParams(
            temperature=1.0, max_new_tokens=longest - len(ids), seed=recipe.seed + number
        )
        for number, (_, ids) in enumerate(prompts)
    ]
    finished = list(_finished(engine, [ids for _, ids in prompts], params, report))
    if fault := next((one.fault for one in finished if one.fault is not None), None):
        raise fault
    texts = [
        one.text if question else engine.tokenizer.decode(ids) + one.text
        for (question, ids), one in zip(prompts, finished)
    ]
    engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return [
        {"kind": WRITTEN} | _content(question, text) for (question, _), text in zip(prompts, texts)
    ]


def _finished(
    engine: Engine | WholeEngine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    report: Callable[[int], None],
) -> Iterator[Completion]:
    """In the order of the prompts. report: is called with the tokens of every step."""
    if not isinstance(engine, Engine):
        for done in engine.generate(prompts, params):
            report(len(done.token_ids))
            yield done
        return
    sequences = [
        engine.sequence(ids, one, number, streams=False)
        for number, (ids, one) in enumerate(zip(prompts, params))
    ]
    for one in sequences:
        engine.add(one)
    while any(one.finish_reason is None for one in sequences):
        report(len(engine.step()))
    for one in sequences:
        yield one.completion()


def _content(question: str, text: str) -> JsonObject:
    if not question:
        return {"text": text}
    turns = (("user", question), ("assistant", text))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}
