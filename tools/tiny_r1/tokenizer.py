"""The tokenizer of tiny-r1: every word of the problems is one token, anything else falls back to
bytes.

A byte-level BPE without merges and with `ignore_merges`: a piece in the vocabulary is one token,
any other is spelled in bytes. Special tokens, chat template and file names are those of
DeepSeek-R1; `<think>` and `</think>` are visible tokens, as they are there.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from problems import SUFFIX, sample
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL = (BOS, EOS, PAD, USER, ASSISTANT)
VOCAB_SIZE = 640
PIECES = r"\n+| ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\s"
CHAT_TEMPLATE = (
    "{% if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}{% endif "
    "%}{{ bos_token }}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{{ message['content'] "
    "}}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- "
    "endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)


def _words() -> list[str]:
    """Pieces that the problems consist of, in a fixed order."""
    rng = random.Random(20260)
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated")
    found: set[str] = set()
    for _ in range(30000):
        problem = sample(rng, "train")
        text = (
            f"{problem.question}\n{problem.reasoning}\n\n{problem.sentence.format(f'{chr(92)}boxed{{1}}')} "
            ""
            ""
            ""
            ""
            ""
            f"{SUFFIX}"
        )
        found.update(piece for piece, _ in cut.pre_tokenize_str(text))
    return sorted(found)


def build() -> Tokenizer:
    """The tokenizer, `VOCAB_SIZE` entries with R1's placeholders in the unused ones."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {token: i for i, token in enumerate((*SPECIAL, THINK, END_THINK))}
    for token in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[token] = len(vocab)
    for word in _words():
        vocab.setdefault(spell.pre_tokenize_str(word)[0][0], len(vocab))
    spare = VOCAB_SIZE - len(vocab)
    assert spare >= 0, f"{len(vocab)} entries do not fit a vocabulary of {VOCAB_SIZE}"
    holders = [f"<｜place▁holder▁no▁{i}｜>" for i in range(spare)]
    for token in holders:
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), spell]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *holders)]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in (THINK, END_THINK)]
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """`tokenizer_config.json`, with R1's template that opens the thought."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": 163840,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
    }


def save(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build().save(str(directory / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
