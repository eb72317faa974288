"""Ordinary text of this machine for models that judge a quantization: code, documentation, manual
pages and prose.

    python benchmarks/judge_text.py DIR [--megabytes 36] [--python LIBRARY] [--html FOLDER]
    [--documents FOLDER] [--conversations FILE] [--chats FILE]

writes DIR/tokenizer.json (byte-level BPE of 8,192, made of the training part), DIR/tokens.bin
(uint16, documents one after another, each ended by token 0), DIR/own.jsonl (documents of the
training part, to calibrate on), DIR/held-out.jsonl and .bin (of other files). A paragraph that
occurred before, as licences and boilerplate do, is left out. What is found depends on the machine:
keep DIR. Held-out documents say whether they are prose, code or chat. A published model judges too,
as a folder or link in DIR: --conversations, lines with `messages`, are a third of what it is
calibrated on,
and --chats, lines of a question and its answer, what it is judged on.
"""

import argparse
import gzip
import html
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY, END = 8192, "<|end|>"
LEAST, MOST, A_FILE = 1_500, 12_000, 60_000
"""Characters of a document, and how many of a file are read."""
HELD_OUT_FILES, OWN_DOCUMENTS, ALIKE = 40, 768, 60
"""One file of so many is held out; documents that are kept to calibrate on; manual pages of one
program."""
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "sympy",
    "networkx",
    "pydantic",
    "rich",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "fastapi",
)


def python_files(library: Path) -> list[Path]:
    """Sources of the standard library and of a few packages, without tests."""
    site = Path(sysconfig.get_path("purelib"))
    found = [path for name in PACKAGES for path in sorted((site / name).rglob("*.py"))]
    found += [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    return [
        path
        for path in found
        if not {"test", "tests", "testing", "idle_test"} & set(path.parts)
        and "test_" not in path.name
    ]


def few_alike(paths: list[Path]) -> list[Path]:
    """At most `ALIKE` pages of one program, whose names begin with one word."""
    counts = Counter[str]()
    kept = []
    for path in paths:
        word = re.split(r"[-_.:]", path.name)[0]
        counts[word] += 1
        if counts[word] <= ALIKE:
            kept.append(path)
    return kept


def read(path: Path) -> str:
    """A file's text without its markup."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = data.decode("utf-8", errors="ignore").replace("\r\n", "\n")
    if path.suffix in (".html", ".htm"):
        return plain_html(text)
    return plain_manual(text) if "/man" in str(path.parent) else text


def plain_html(text: str) -> str:
    text = re.sub(r"(?s)<(script|style|nav|head|svg).*?</\1>", "", text)
    text = re.sub(r"(?i)</?(p|div|br|h\d|li|ul|ol|tr|table|pre|section)\b[^>]*>", "\n", text)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", text)))


def plain_manual(text: str) -> str:
    """Roff requests dropped, their text kept."""
    lines = []
    for line in text.splitlines():
        if line.startswith(
            ('.\\"', "'\\\"", ".de", ".ie", ".el", ".if", ".ds", ".nr", ".TH", ".so")
        ):
            continue
        line = re.sub(r"^[.'](SH|SS|Sh|Ss)\s*", "\n", line)
        line = re.sub(r"^[.'](PP|P|LP|IP|TP|sp|Pp|RS|RE|br|nf|fi)\b.*", "", line)
        line = re.sub(r"^[.'][A-Za-z]{1,3}\s*", "", line)
        line = re.sub(r"\\f(\[[A-Z]*\]|\([A-Z]{2}|.)|\\s[+-]?\d|\\[&/,|^%c]", "", line)
        lines.append(
            re.sub(
                r"\\(\((.{2})|(.))",
                lambda m: {"aq": "'", "em": "--", "bu": "*"}.get(m[2] or "", (m[3] or "")),
                line,
            )
        )
    return re.sub(r"\n\n+", "\n\n", "\n".join(lines))


def documents(path: Path, seen: set[int]) -> Iterator[str]:
    """What of a file was not read before, cut at paragraphs."""
    kept, size = [], 0
    for paragraph in read(path)[:A_FILE].split("\n\n"):
        key = hash(re.sub(r"\W+", " ", paragraph).strip())
        if (
            len(paragraph.strip()) < 2
            or key in seen
            or len(max(paragraph.split(), key=len, default="")) > 200
        ):
            continue
        seen.add(key)
        kept.append(paragraph)
        size += len(paragraph) + 2
        if size > MOST:
            yield "\n\n".join(kept)
            kept, size = [], 0
    if size >= LEAST:
        yield "\n\n".join(kept)


Record = dict[str, Any]
"""A line of own.jsonl or held-out.jsonl: `kind`, and `text` or `messages`."""


def collect(kinds: dict[str, list[Path]], megabytes: float) -> tuple[list[Record], list[Record]]:
    """Documents to train on, and those of held-out files; every kind gives as many characters,
    those of least text first."""
    seen: set[int] = set()
    parts: tuple[list[Record], list[Record]] = ([], [])
    left = megabytes * 1e6
    shuffled = {kind: random.Random(0).sample(files, len(files)) for kind, files in kinds.items()}
    ordered = sorted(shuffled, key=lambda kind: sum(path.stat().st_size for path in shuffled[kind]))
    for number, kind in enumerate(ordered):
        budget, taken = left / (len(ordered) - number), 0
        for index, path in enumerate(shuffled[kind]):
            if taken >= budget:
                break
            for text in documents(path, seen):
                record = {"kind": "code" if kind == "python" else "prose", "text": text}
                parts[index % HELD_OUT_FILES == 0].append(record)
                taken += len(text)
        left -= taken
        print(f"{kind}: {taken / 1e6:.1f} MB of {len(shuffled[kind])} files", flush=True)
    for part in parts:
        random.Random(1).shuffle(part)
    return parts


def make_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text[:6000] for text in texts[:2500]), trainer)
    return tokenizer


def write_lines(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def conversations(path: Path) -> list[Record]:
    """Those of FILE that have as many characters as a document."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {"kind": "chat", "messages": one["messages"]}
        for one in found
        if sum(len(turn["content"] or "") for turn in one.get("messages", ())) > 2 * LEAST
    ]


def chats(path: Path) -> list[Record]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    roles = {"user": "question", "assistant": "answer"}
    return [
        {"kind": "chat", "messages": [{"role": r, "content": row[k]} for r, k in roles.items()]}
        for row in rows[:OWN_DOCUMENTS]
    ]


def write_tokens(path: Path, tokenizer: Tokenizer, texts: list[str]) -> int:
    """How many there are."""
    with path.open("wb") as file:
        for start in range(0, len(texts), 256):
            for one in tokenizer.encode_batch_fast(texts[start : start + 256]):
                file.write(np.array([*one.ids, 0], dtype="<u2").tobytes())
    return path.stat().st_size // 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=float, default=36)
    parser.add_argument("--python", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--html", type=Path, action="append", default=[])
    parser.add_argument("--documents", type=Path, action="append", default=[])
    parser.add_argument("--conversations", type=Path)
    parser.add_argument("--chats", type=Path)
    given = parser.parse_args()
    manuals = few_alike(
        [
            path
            for path in sorted(Path("/usr/share/man").glob("man[1578]/*.gz"))
            if not path.is_symlink()
        ]
    )
    words = [
        path
        for top in given.documents
        for path in sorted(top.rglob("*"))
        if path.suffix in (".md", ".rst", ".txt") and path.is_file()
    ]
    kinds = {
        "python": python_files(given.python),
        "html": [
            path for top in given.html for path in sorted(top.rglob("*.html")) if path.is_file()
        ],
        "manuals": manuals,
        "documents": words,
    }
    train, held_out = collect(
        {kind: files for kind, files in kinds.items() if files}, given.megabytes
    )
    given.folder.mkdir(parents=True, exist_ok=True)
    parts = {"tokens.bin": train, "held-out.bin": held_out}
    texts_by_file = {name: [one["text"] for one in part] for name, part in parts.items()}
    tokenizer = make_tokenizer(texts_by_file["tokens.bin"])
    tokenizer.save(str(given.folder / "tokenizer.json"))
    more = conversations(given.conversations) if given.conversations else []
    count = 2 * len(more) or OWN_DOCUMENTS
    write_lines(given.folder / "own.jsonl", train[:count] + more)
    more = chats(given.chats) if given.chats else []
    write_lines(given.folder / "held-out.jsonl", held_out + more)
    for name, texts in texts_by_file.items():
        print(
            f"{name}: {len(texts)} documents, "
            f"{write_tokens(given.folder / name, tokenizer, texts):,} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main()
