"""An answer ends at its stop string with the token that completes it, which is always one of those
behind which the text is looked at."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from quantkit.checkpoint.hub import find_model
from quantkit.tokenizer.chat import ChatTokenizer, StopTokens, TextStream, stop_tokens

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    "a",
    "b",
    "ab",
    "ba",
    "abc",
    "c",
    "。",
    "五",
    "▁",
    "▁a",
    "▁ab",
    "b▁",
    "▁▁",
    "\n",
    "\n\n",
    "</",
    "s>",
]
LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


def made(decoder):
    """Of the pieces and all bytes, with a special token."""
    vocab = {piece: number for number, piece in enumerate(["<unk>", *PIECES, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def tokenizers():
    return {
        "bytes": ChatTokenizer(find_model("tiny-r1")).tokenizer,
        "llama": made(LLAMA),
        "metaspace": made(decoders.Metaspace()),
        "none": made(None),
    }


@pytest.mark.parametrize("name", ["bytes", "llama", "metaspace", "none"])
@pytest.mark.parametrize("skip_special", [False, True])
def test_no_end_is_missed(name, skip_special):
    """Texts of random tokens, characters of several bytes among them, with stop strings that occur
    in them."""
    tokenizer, draw = tokenizers()[name], random.Random(name)
    known = range(tokenizer.get_vocab_size()) if name == "bytes" else range(1 + len(PIECES))
    characters = [tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in "é五🙂".encode()]
    ended = 0
    for _ in range(300):
        tokens = [
            token
            for _ in range(40)
            for token in (characters if draw.random() < 0.05 else [draw.choice(known)])
        ]
        text = tokenizer.decode(tokens, skip_special_tokens=skip_special)
        places = [draw.randrange(len(text)) for _ in range(2)]
        stop = tuple(
            found for place in places if (found := text[place : place + draw.randrange(1, 7)])
        )
        stream, ends = (
            TextStream(tokenizer, stop, skip_special=skip_special),
            StopTokens(tokenizer, stop, skip_special),
        )
        for token in tokens:
            stream.push(token)
            if stream.stopped:
                assert ends[token], (tokens, stop, token)
                ended += 1
                break
    assert ended > 100


def test_few_tokens_are_looked_at():
    tokenizer = tokenizers()["bytes"]
    vocab = range(tokenizer.get_vocab_size())
    ends = stop_tokens(tokenizer, ("never", "</answer>"), True)
    assert 0 < sum(ends[token] for token in vocab) < 0.25 * len(vocab)
    assert stop_tokens(tokenizer, ("never", "</answer>"), True) is ends
    assert all(StopTokens(made(None), ("x",), True)[token] for token in range(9)), (
        "what a token's text is, is not known"
    )
