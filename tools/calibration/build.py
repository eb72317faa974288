"""The calibration text that ships with quantkit.

    python build.py [TARGET]        quantkit/builtin/calibration.jsonl

528 documents, a line each: {"kind", "messages"}, with "tools" where there are some, or {"kind", "text"}. Everything was written for quantkit
and copied from nowhere. english.txt, chinese.txt, code.txt, documentation.txt, reasoning.txt and facts.txt were written by hand, sentence by sentence. The rest
is made by programs from parts that were written by hand: mathematics.py and word_problems.py draw numbers and compute each step, programs.py writes code about
twenty things in five languages, tool_use.py draws what tools answer, tables.py draws tables and logs and computes what is said of them.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mathematics
import programs
import tables
import tool_use
import word_problems

HERE = Path(__file__).parent
TARGET = HERE.parent.parent / "quantkit" / "builtin" / "calibration.jsonl"
SHORTEST = 560
"""Estimated tokens: documents are to fill 512 with the tokenizers of large models, which need fewer tokens than this estimate says."""
WRITTEN = ("english", "chinese", "code", "documentation", "reasoning")
MADE = {
    "mathematics": 90,
    "mathematics, Chinese": 36,
    "word problems": 60,
    "programs": 54,
    "tools": 60,
    "tables": 56,
    "tables, Chinese": 24,
    "questions": 48,
    "questions, Chinese": 36,
    "translation": 14,
}
Document = dict[str, Any]


def tokens(text: str) -> float:
    """A careful estimate: a word of five letters is one, so are two digits, two signs, and nearly two Chinese characters."""
    letters = len(re.findall(r"[A-Za-z ]", text))
    chinese = len(re.findall(r"[\u3400-\u9fff]", text))
    return letters / 5 + chinese * 0.6 + (len(text) - letters - chinese) * 0.4


def length(messages: list[dict[str, Any]]) -> float:
    return tokens(
        "".join(
            f"{one.get('reasoning_content', '')}{one['content']}{one.get('tool_calls', '')}"
            for one in messages
        )
    )


def long_enough(messages: list[dict[str, Any]]) -> bool:
    return length(messages) >= SHORTEST


def written(name: str) -> Iterator[Document]:
    """Documents of a file: `#### name` begins one, `>>> role` a message; without roles it is plain text."""
    for part in (HERE / f"{name}.txt").read_text(encoding="utf-8").split("#### ")[1:]:
        body = part.partition("\n")[2].strip()
        if not body.startswith(">>> "):
            yield {"kind": name, "text": body}
            continue
        messages: list[dict[str, Any]] = []
        thought = None
        for turn in body.split(">>> ")[1:]:
            role, _, content = turn.partition("\n")
            if role == "think":
                thought = content.strip()
                continue
            messages.append(
                {"role": role}
                | ({"reasoning_content": thought} if thought else {})
                | {"content": content.strip()}
            )
            thought = None
        yield {"kind": name, "messages": messages}


def filled(documents: list[Document], pairs: Iterator[tuple[str, ...]]) -> Iterator[Document]:
    """Conversations that are too short begin with short questions; texts that are go on with the next one."""
    texts: list[str] = []
    for one in documents:
        if "text" in one:
            if texts and tokens(texts[-1]) < SHORTEST:
                texts[-1] += f"\n\n* * *\n\n{one['text']}"
            else:
                texts.append(one["text"])
            continue
        system = [turn for turn in one["messages"] if turn["role"] == "system"]
        rest = one["messages"][len(system) :]
        while not long_enough([*system, *rest]):
            question, reply = next(pairs)
            rest = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": reply},
                *rest,
            ]
        yield {"kind": one["kind"], "messages": [*system, *rest]}
    if len(texts) > 1 and tokens(texts[-1]) < SHORTEST:
        texts[-2:] = ["\n\n* * *\n\n".join(texts[-2:])]
    yield from ({"kind": documents[0]["kind"], "text": text} for text in texts)


def facts() -> list[tuple[str, ...]]:
    """Question and reply in English, and both in Chinese."""
    lines = (HERE / "facts.txt").read_text(encoding="utf-8").splitlines()
    return [tuple(part.strip() for part in line.split(" | ")) for line in lines]


def drawn(rng: random.Random) -> Iterator[tuple[str, ...]]:
    """All of them in some order, then in another."""
    while True:
        yield from rng.sample(facts(), len(facts()))


def questions(rng: random.Random, kind: str) -> Iterator[Document]:
    """Conversations of short questions and replies. Each question comes in several, among others each time."""
    fact = drawn(rng)
    while True:
        messages: list[dict[str, Any]] = []
        while not long_enough(messages):
            question, reply = next(fact)[2:] if "Chinese" in kind else next(fact)[:2]
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": reply},
            ]
        yield {"kind": kind, "messages": messages}


def translation(rng: random.Random) -> Iterator[Document]:
    """Into Chinese and into English in turn."""
    fact = drawn(rng)
    for into_chinese in itertools.cycle((True, False)):
        messages: list[dict[str, Any]] = []
        while not long_enough(messages):
            question, reply, zh_question, zh_reply = next(fact)
            english, chinese = f"{question} {reply}", f"{zh_question}{zh_reply}"
            asked = (
                f"Translate into Chinese: {english}" if into_chinese else f"请翻译成英文：{chinese}"
            )
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": chinese if into_chinese else english},
            ]
        yield {"kind": "translation", "messages": messages}


def pasted(rng: random.Random, kind: str, makers: tuple[Any, ...]) -> Document:
    messages: list[dict[str, Any]] = []
    while not long_enough(messages):
        messages += [
            one for one in rng.choice(makers)(rng) if not (messages and one["role"] == "system")
        ]
    return {"kind": kind, "messages": messages}


def made(kind: str) -> Iterator[Document]:
    """Endless documents of one kind, each kind from a seed of its own."""
    rng = random.Random(kind)
    if kind.startswith("questions"):
        yield from questions(rng, kind)
    elif kind == "translation":
        yield from translation(rng)
    for index in itertools.count():
        if kind.startswith("mathematics"):
            yield {
                "kind": kind,
                "messages": mathematics.conversation(rng, long_enough, chinese="Chinese" in kind),
            }
        elif kind == "word problems":
            yield {"kind": kind, "messages": word_problems.conversation(rng, long_enough)}
        elif kind == "programs":
            yield {"kind": kind, "messages": programs.conversation(rng, index)}
        elif kind == "tools":
            messages, offered = tool_use.conversation(rng, long_enough)
            yield {"kind": kind, "tools": offered, "messages": messages}
        else:
            yield pasted(rng, kind, tables.CHINESE if "Chinese" in kind else tables.ENGLISH)


def documents() -> Iterator[Document]:
    for number, name in enumerate(WRITTEN):
        fact = drawn(random.Random(number))
        chinese = name == "chinese"
        yield from filled(
            list(written(name)), ((one[2], one[3]) if chinese else (one[0], one[1]) for one in fact)
        )
    for kind, count in MADE.items():
        yield from itertools.islice(made(kind), count)


def main() -> None:
    found = list(documents())
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(
        "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found), encoding="utf-8"
    )
    sizes = sorted(
        length(one["messages"]) if "messages" in one else tokens(one["text"]) for one in found
    )
    print(
        f"{len(found)} documents, {target.stat().st_size / 1e6:.2f} MB, estimated tokens {sizes[0]:.0f} to {sizes[-1]:.0f}, median {sizes[len(sizes) // 2]:.0f}"
    )
    print(Counter(one["kind"] for one in found))


if __name__ == "__main__":
    main()
