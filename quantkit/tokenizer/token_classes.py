"""Classes of tokens with one normalized text, over which DeepSeek-V4.1 hashes n-grams: " The",
"the" and "THE" are one.

Rules of the release's inference/engram.py: NFKC, NFD, no accents, lower case, one space for each run
of white space, none around a text but where it is all there is. A part of a character is its own.
"""

import functools
from pathlib import Path

import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from quantkit.tokenizer.loader import read_tokenizer

_SPACE = "\ue000"
"""Stands for a text that is one space while spaces around texts are removed."""


@functools.lru_cache(maxsize=4)
def token_classes(path: Path) -> Tensor:
    """Of the tokenizer of a checkpoint's directory: int64 [tokens], the class of each, numbered as
    they first occur."""
    tokenizer, _ = read_tokenizer(path, {})
    rules = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = (
            tokenizer.id_to_token(token) if "\ufffd" in text else rules.normalize_str(text) or text
        )
        found.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(found)
