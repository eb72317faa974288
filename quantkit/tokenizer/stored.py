"""The tokenizer that a checkpoint's directory holds, whatever the file, as a
`tokenizers.Tokenizer`.

tokenizer.json is read as it is. tokenizer.model (sentencepiece) and tiktoken.model are converted,
to the ids of the libraries that made them (sentencepiece.py, tiktoken.py). Code that came with a
model is never run.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from quantkit.common.errors import QuantkitError
from quantkit.common.model_files import LARGEST, is_there, read_json, read_text
from quantkit.tokenizer import sentencepiece, tiktoken

_AGAIN = "copy it from the original model"
_MOST_GROWTH = 64.0
"""Times that a tokenizer may lengthen a text. Published ones put one mark in the place of one, or
of several."""
FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
"""In the order in which they are looked for."""


def tokenizer_file(path: Path) -> Path:
    """The file that the directory's tokenizer is in. Raises QuantkitError where it has none."""
    for name in FILES:
        if is_there(path / name):
            return path / name
    problem = f"{path} has no {', '.join(FILES[:-1])} or {FILES[-1]}"
    if is_there(path / "vocab.json"):  # how such a tokenizer splits a text is in its class's code
        remedy = (
            "have transformers write tokenizer.json from vocab.json: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
        raise QuantkitError(problem, remedy)
    raise QuantkitError(problem, "copy the tokenizer from the original model")


def read_tokenizer(path: Path, settings: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a checkpoint's directory, and `settings` (tokenizer_config.json) with what
    the file itself says where they do not.

    Raises QuantkitError for a file that is damaged, and where a library that reads it is not
    installed.
    """
    file = tokenizer_file(path)
    if file.suffix == ".json":
        tokenizer = _from_json(file)
    elif file.name == "tiktoken.model" or tiktoken.is_ranks(file):
        tokenizer = tiktoken.convert(file)
        _add_special(file, tokenizer, path, settings)
    else:
        tokenizer, own = sentencepiece.convert(file, settings)
        settings = {**own, **{name: value for name, value in settings.items() if value is not None}}
        _add_special(file, tokenizer, path, settings)
    if file.suffix != ".json":
        _put_around(tokenizer, settings)
    # What a training run left there. As in transformers, whoever calls decides on lengths.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, settings


def _from_json(file: Path) -> Tokenizer:
    text = read_text(file, LARGEST)
    with naming(f"{file} is not a tokenizer"):
        tokenizer = Tokenizer.from_str(text)
    for part in (tokenizer.normalizer, tokenizer.decoder):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MOST_GROWTH:
            raise QuantkitError(
                f"{file} replaces parts of a text so that it may be {growth:.0g} times as long",
                _AGAIN,
            )
    return tokenizer


@contextmanager
def naming(problem: str) -> Iterator[None]:
    """Whatever `tokenizers` raises becomes a QuantkitError: it has no more special exceptions, and
    its panics are no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise QuantkitError(f"{problem}: {error}", _AGAIN) from error


def _growth(part: dict[str, Any]) -> float:
    """How many times as long a normalizer or decoder may make a text, by what it puts in the place
    of what it finds."""
    steps = part.get("normalizers") or part.get("decoders") or []
    if part.get("type") == "Sequence":
        return math.prod(_growth(step) for step in steps)
    if part.get("type") != "Replace":
        return 1.0
    found = len(
        part["pattern"].get("String", "")
    )  # an expression may match nothing, before every character
    return max(len(part["content"]) / found if found else len(part["content"]) + 1.0, 1.0)


def _add_special(file: Path, tokenizer: Tokenizer, path: Path, settings: dict[str, Any]) -> None:
    """Tokens that tokenizer_config.json and added_tokens.json add to the file's own, each under the
    id that they give it."""
    for token_id, token in sorted(_added(path, settings), key=lambda one: one[0]):
        known = tokenizer.get_vocab_size(with_added_tokens=True)
        if known < token_id < known + 10_000:  # ids that nothing has a name for
            tokenizer.add_tokens(
                [
                    AddedToken(f"<|reserved_token_{number}|>", normalized=False)
                    for number in range(known, token_id)
                ]
            )
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        found = tokenizer.token_to_id(token.content)
        if found != token_id:
            raise QuantkitError(
                f"{path} gives {token.content!r:.40} the id {token_id}, and by {file.name} it has "
                f"{found}",
                _AGAIN,
            )


def _put_around(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    """The tokens that the settings put before and behind every text."""
    named = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in settings.items()
    }
    bos, eos = (
        [str(named[name])] if settings.get(f"add_{name}") and named.get(name) else []
        for name in ("bos_token", "eos_token")
    )
    known = [(token, tokenizer.token_to_id(token)) for token in (*bos, *eos)]
    if known and all(token_id is not None for _, token_id in known):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], special_tokens=known
        )


def _added(path: Path, settings: dict[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    listed = settings.get("added_tokens_decoder") or {}
    try:
        for token_id, token in listed.items():
            flags = {
                name: bool(token.get(name, False))
                for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            yield int(token_id), AddedToken(str(token["content"]), **flags)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise QuantkitError(
            f"{path / 'tokenizer_config.json'} has an added_tokens_decoder that is not one", _AGAIN
        ) from error
    if is_there(path / "added_tokens.json"):
        already = {token["content"] for token in listed.values()}
        for content, token_id in read_json(path / "added_tokens.json").items():
            if content not in already and type(token_id) is int:
                yield (
                    token_id,
                    AddedToken(
                        content,
                        normalized=False,
                        special=content in settings.get("additional_special_tokens", []),
                    ),
                )
