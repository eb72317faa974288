"""Loads the tokenizer of a checkpoint's directory, from any file format, as a
`tokenizers.Tokenizer`.

tokenizer.json is read directly. tokenizer.model (SentencePiece) and tiktoken.model are converted to
the same ids as the libraries that wrote them (sentencepiece.py, tiktoken.py). Code that comes with
a model is never run.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors

from quantkit.common.errors import QuantkitError, library_errors
from quantkit.common.model_files import LARGEST, is_there, read_json, read_text
from quantkit.common.result import JsonObject
from quantkit.tokenizer import sentencepiece, tiktoken

_COPY_AGAIN = "copy it from the original model"
_MAX_GROWTH = 64.0
"""How many times a tokenizer may lengthen a text. Published ones replace one or several characters
by one."""
_MAX_MISSING = 0.01
"""Share of a draft model's tokens that the target may lack, or the reverse: later releases of a
family add some for tools and reasoning."""
FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")
"""In order of preference."""


def tokenizer_file(path: Path) -> Path:
    """The file of the directory's tokenizer. Raises QuantkitError where there is none."""
    for name in FILES:
        if is_there(path / name):
            return path / name
    problem = f"{path} has no {', '.join(FILES[:-1])} or {FILES[-1]}"
    if is_there(path / "vocab.json"):  # the split pattern of such a tokenizer is in its class
        remedy = (
            "have transformers write tokenizer.json from vocab.json: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
        raise QuantkitError(problem, remedy)
    raise QuantkitError(problem, "copy the tokenizer from the original model")


def read_tokenizer(path: Path, settings: JsonObject) -> tuple[Tokenizer, JsonObject]:
    """The tokenizer of a checkpoint's directory, and `settings` (tokenizer_config.json) completed
    by what the file itself declares.

    Raises QuantkitError for a damaged file, and where a library that reads it is not installed.
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
        _set_bos_eos(tokenizer, settings)
    # As in transformers, truncation and padding left by training are removed: callers decide.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, settings


def _from_json(file: Path) -> Tokenizer:
    text = read_text(file, LARGEST)
    with library_errors(f"{file} is not a tokenizer", _COPY_AGAIN):
        tokenizer = Tokenizer.from_str(text)
    for part in (tokenizer.normalizer, tokenizer.decoder):
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MAX_GROWTH:
            raise QuantkitError(
                f"{file} replaces parts of a text so that it may be {growth:.0g} times as long",
                _COPY_AGAIN,
            )
    return tokenizer


def check_same_ids(target: Tokenizer, draft: Tokenizer, path: Path, draft_path: Path) -> None:
    """Raises QuantkitError where an id is another token in the tokenizer of the draft model at
    `draft_path`, or one of the two lacks many tokens of the other."""
    tokens, draft_tokens = (
        {token_id: token for token, token_id in one.get_vocab(with_added_tokens=True).items()}
        for one in (target, draft)
    )
    remedy = "bring a draft model of the same family, with the same tokenizer"
    both = tokens.keys() & draft_tokens.keys()
    differing = [token_id for token_id in both if tokens[token_id] != draft_tokens[token_id]]
    if differing:
        first = min(differing)
        raise QuantkitError(
            f"{draft_path} has other tokens than {path}: {len(differing)} of {len(both)} ids "
            f"differ, {first} is {draft_tokens[first]!r:.60} there and {tokens[first]!r:.60} here",
            remedy,
        )
    most = max(len(tokens), len(draft_tokens))
    if most - len(both) > _MAX_MISSING * most:
        raise QuantkitError(
            f"{draft_path} has {len(draft_tokens)} tokens, {path} has {len(tokens)}, and "
            f"{len(both)} are in both",
            remedy,
        )


def _growth(part: JsonObject) -> float:
    """How many times a normalizer or decoder may lengthen a text, by the lengths of pattern and
    replacement."""
    steps = part.get("normalizers") or part.get("decoders") or []
    if part.get("type") == "Sequence":
        return math.prod(_growth(step) for step in steps)
    if part.get("type") != "Replace":
        return 1.0
    # A regular expression may match the empty string before every character.
    found = len(part["pattern"].get("String", ""))
    return max(len(part["content"]) / found if found else len(part["content"]) + 1.0, 1.0)


def _add_special(file: Path, tokenizer: Tokenizer, path: Path, settings: JsonObject) -> None:
    """Add the tokens of tokenizer_config.json and added_tokens.json under the ids given there."""
    for token_id, token in sorted(_added_tokens(path, settings), key=lambda one: one[0]):
        known = tokenizer.get_vocab_size(with_added_tokens=True)
        if known < token_id < known + 10_000:  # ids without a name
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
                _COPY_AGAIN,
            )


def _set_bos_eos(tokenizer: Tokenizer, settings: JsonObject) -> None:
    """Set the post-processor that adds bos and eos as the settings ask."""
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


def _added_tokens(path: Path, settings: JsonObject) -> Iterator[tuple[int, AddedToken]]:
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
            f"{path / 'tokenizer_config.json'} has an added_tokens_decoder that is not one",
            _COPY_AGAIN,
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
