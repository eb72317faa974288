"""tiktoken files: one line per token, its bytes in base64 and its rank, which is its id.

transformers converts the ranks to merges of `tokenizers`. The split pattern comes from the code
that is published with a model: it is parsed for a constant there, and the code is never run.
"""

import ast
import base64
import re
from pathlib import Path

from tokenizers import Tokenizer

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import read_file, read_text

_COPY_AGAIN = "copy it from the original model"
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
_NAMES = ("pat_str", "PAT_STR", "_pat_str", "pattern")
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's pattern, the same as cl100k's."""
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (
    rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}")
)
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def is_ranks(file: Path) -> bool:
    """Whether a file has this format, whatever its name: Llama 3's is called tokenizer.model."""
    return _LINE.match(read_file(file)[:1000]) is not None


def convert(file: Path) -> Tokenizer:
    """The tokenizer of a file of ranks. Raises QuantkitError for any other file, where the pattern
    cannot be found, and where transformers is not installed."""
    ranks = _ranks(file)
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise QuantkitError(
            f"{file} needs transformers, which is not installed",
            "pip install transformers tiktoken, or save tokenizer.json with transformers",
        ) from error

    class Converter(TikTokenConverter):  # type: ignore[misc]
        """Converts the ranks that were validated here, without the tiktoken library."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    try:
        tokenizer: Tokenizer = Converter(vocab_file=str(file), pattern=pattern(file)).converted()
    except QuantkitError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise QuantkitError(
            f"the split pattern next to {file} is not a regular expression: {error}", _COPY_AGAIN
        ) from error
    return tokenizer


def pattern(file: Path) -> str:
    """The split pattern: a constant in the code next to the file; without such code Llama's for
    tokenizer.model, and Kimi's otherwise."""
    codes = sorted(file.parent.glob("tokenization_*.py"))
    for code in codes:
        found = _constant(read_text(code))
        if found is not None:
            return found
    if codes:
        named = ", ".join(code.name for code in codes)
        raise QuantkitError(
            f"no split pattern for {file} can be read in {named}, which is not run",
            "save tokenizer.json with transformers",
        )
    return LLAMA if file.name == "tokenizer.model" else KIMI


def _constant(code: str) -> str | None:
    """The value of `pat_str = "..."` or `pat_str = "|".join([...])`, where all parts are string
    literals."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in nodes:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if any(
            isinstance(target, ast.Name | ast.Attribute) and _name(target) in _NAMES
            for target in targets
        ):
            found = _text(node.value)  # type: ignore[attr-defined]
            if found is not None:
                return found
    return None


def _name(target: ast.Name | ast.Attribute) -> str:
    return target.id if isinstance(target, ast.Name) else target.attr


def _text(node: ast.AST | None) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            parts = [_text(left), _text(right)]
            between = ""
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"),
            args=[ast.List(elts=given) | ast.Tuple(elts=given)],
        ):
            parts = [_text(one) for one in given]
        case _:
            return None
    known = [part for part in parts if part is not None]
    return between.join(known) if len(known) == len(parts) else None


def _ranks(file: Path) -> dict[bytes, int]:
    """Bytes of every token -> rank, in order of rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_file(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise QuantkitError(
                f"{file} line {number} is not a token in base64 with its rank", _COPY_AGAIN
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(
        bytes([byte]) in ranks for byte in range(256)
    ):
        raise QuantkitError(
            f"{file} has {len(ranks)} tokens whose ranks are not 0, 1, 2 and so on, or not all "
            "bytes",
            _COPY_AGAIN,
        )
    return dict(sorted(ranks.items(), key=lambda one: one[1]))


def byte_letters() -> dict[int, str]:
    """The letter that `tokenizers` writes for each byte: itself if it is a visible Latin-1
    character, else the next one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(0x100 + number) for number, byte in enumerate(hidden)
    }
