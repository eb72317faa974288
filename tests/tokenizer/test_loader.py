"""Tokenizers that are no tokenizer.json, against the libraries that made them and against
transformers."""

import base64
import json

import pytest
import sentencepiece
import tiktoken as peer
from refused import refused
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from quantkit.checkpoint.aux_files import read_aux_files
from quantkit.common.assets import calibration_text
from quantkit.tokenizer import tiktoken
from quantkit.tokenizer.chat import ChatTokenizer, TextStream

_LINES = [
    json.loads(line) for line in calibration_text().read_text(encoding="utf-8").splitlines()[:528:6]
]
TEXTS = [
    one.get("text") or "\n".join(message["content"] for message in one["messages"])
    for one in _LINES
]
SAMPLES = [
    *TEXTS,
    "",
    " ",
    "  two  spaces ",
    "  \n  ",
    "    indented\n\t\tx\r\n\r\nA",
    "émigré naïve Zürich ß ſ ﬁ",
    "🙂👍🏽👨‍👩‍👧 emoji",
    "日本語テキスト 한국어 中文English混合123HelloWorld",
    "don't I'LL we've 1234567 3.14",
    "zero\u200bwidth\u00a0space",
    "aaaaaaaaaaaaaaaaaaaaaaa ababababab",
]
MODELS = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "normalized": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "unigram": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "nfkc",
        "remove_extra_whitespaces": False,
    },
    "no prefix": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<think>"],
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for each of MODELS with a tokenizer.model in it."""
    root = tmp_path_factory.mktemp("sentencepiece")
    (root / "text").write_text("\n".join(TEXTS), encoding="utf-8")
    for name, options in MODELS.items():
        (root / name).mkdir()
        sentencepiece.SentencePieceTrainer.train(
            input=str(root / "text"),
            model_prefix=str(root / name / "tokenizer"),
            vocab_size=1500,
            character_coverage=0.98,
            minloglevel=2,
            **options,
        )
    return root


def configured(path, **settings):
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTokenizer(path)


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_makes_the_ids_of_the_library(trained, name):
    chat = configured(trained / name, tokenizer_class="PanguTokenizer")
    peer = sentencepiece.SentencePieceProcessor(model_file=str(trained / name / "tokenizer.model"))
    for text in SAMPLES:
        ids, theirs = chat.encode(text), peer.encode(text)
        if (
            name == "unigram" and ids != theirs
        ):  # "0", "00" is as likely as "00", "0": each library takes another
            assert len(ids) == len(theirs)
            assert sum(map(peer.get_score, ids)) == pytest.approx(sum(map(peer.get_score, theirs)))
            continue
        assert ids == theirs, text
        if name in ("llama", "no prefix") and text.strip() == text:
            assert chat.decode(chat.encode(text)) == peer.decode(peer.encode(text)), text
    assert (chat.bos, chat.eos, chat.unknown_id) == ("<s>", "</s>", 0)


def test_added_tokens_have_the_ids_that_are_written(trained):
    added = {
        "1500": {"content": "<|user|>", "special": True},
        "1503": {"content": "<tool>", "special": False},
    }
    chat = configured(trained / "llama", added_tokens_decoder=added)
    ids = chat.encode_rendered("<|user|>a<tool>")
    assert (ids[0], ids[-1]) == (1500, 1503)
    assert chat.decode(ids) == "a<tool>"
    with refused(r"gives '<think>' the id 7, and by tokenizer\.model it has 1500"):
        configured(trained / "llama", added_tokens_decoder={"7": {"content": "<think>"}})


SPECIAL = {"[BOS]": 2256, "[EOS]": 2257, "<|im_end|>": 2258, "<|im_user|>": 2261}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A tiktoken.model of bytes and 2,000 merges, with special tokens as Kimi has them."""
    trainer = trainers.BpeTrainer(
        vocab_size=2256, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(tiktoken.KIMI), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    byte_of = {letter: byte for byte, letter in tiktoken.byte_letters().items()}
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    path = tmp_path_factory.mktemp("tiktoken")
    lines = [
        base64.b64encode(bytes(byte_of[letter] for letter in token)) + b" %d\n" % rank
        for token, rank in tokens
    ]
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    listed = {str(one): {"content": name, "special": True} for name, one in SPECIAL.items()}
    configured(
        path,
        tokenizer_class="TikTokenTokenizer",
        bos_token="[BOS]",
        eos_token="[EOS]",
        added_tokens_decoder=listed,
    )
    return path


def library(path, pattern):
    lines = (path / "tiktoken.model").read_bytes().splitlines()
    merged = {
        base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)
    }
    return peer.Encoding("peer", pat_str=pattern, mergeable_ranks=merged, special_tokens=SPECIAL)


def test_bytes_of_tokens_are_those_of_the_libraries(ranks, trained):
    ours, theirs = ChatTokenizer(ranks), library(ranks, tiktoken.KIMI)
    for token in range(2256):
        assert ours.token_bytes(token) == theirs.decode_single_token_bytes(token)
    chat = configured(trained / "llama", tokenizer_class="LlamaTokenizer")
    for byte in range(256):
        token = chat.tokenizer.token_to_id(f"<0x{byte:02X}>")
        assert chat.token_bytes(token) == bytes([byte])
    for text in SAMPLES:
        joined = b"".join(map(chat.token_bytes, chat.encode(text)))
        assert joined.decode().removeprefix(" ") == chat.decode(chat.encode(text)), text


def test_tiktoken_makes_the_ids_of_the_library(ranks):
    chat, encoding = ChatTokenizer(ranks), library(ranks, tiktoken.KIMI)
    for text in [*SAMPLES, "[BOS]hi<|im_end|>你好<|im_user|> x"]:
        ids = encoding.encode(text, allowed_special="all")
        assert chat.encode(text) == ids, text
        assert chat.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert chat.eos_ids == {2257}
    stream = TextStream(chat.tokenizer)
    assert "".join(map(stream.push, chat.encode("五🙂 done"))) == "五🙂 done"


@pytest.mark.parametrize(
    "code",
    [
        'class T:\n    pat_str = "|".join([r"""\\p{L}+""", r"""\\P{L}"""])\n',
        'PAT_STR: str = r"\\p{L}+|" + r"\\P{L}"\n',
        "import os\nos._exit(3)\nclass T:\n    def __init__(self):\n        self.pat_str = "
        'r"\\p{L}+|\\P{L}"\n',
    ],
)
def test_the_pattern_is_read_and_no_code_is_run(ranks, tmp_path, code):
    for file in ranks.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenization_own.py").write_text(code)
    chat, encoding = ChatTokenizer(tmp_path), library(ranks, r"\p{L}+|\P{L}")
    assert all(chat.encode(text) == encoding.encode(text) for text in SAMPLES)
    assert "tokenization_own.py" in read_aux_files(tmp_path)
    (tmp_path / "tokenization_own.py").write_text("pat_str = make()\n")
    with refused(r"can be read in tokenization_own\.py, which is not run"):
        ChatTokenizer(tmp_path)


def test_ranks_under_the_name_of_a_sentencepiece_model(ranks, tmp_path):
    """As Llama 3's; transformers reads it with the same pattern."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    (tmp_path / "tokenizer.model").write_bytes((ranks / "tiktoken.model").read_bytes())
    chat, converted = (
        ChatTokenizer(tmp_path),
        TikTokenConverter(vocab_file=str(tmp_path / "tokenizer.model")).converted(),
    )
    assert all(chat.encode(text) == converted.encode(text).ids for text in SAMPLES)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.model", b"no model at all", "is not a sentencepiece model"),
        ("tokenizer.model", b"", "it has no pieces"),
        ("tiktoken.model", b"IQ== 0\n??? 1\n", "line 2 is not a token in base64"),
        ("tiktoken.model", b"IQ== 0\nIg== 2\n", "whose ranks are not 0, 1, 2"),
        ("vocab.txt", b"a\nb\n", r"has no tokenizer\.json, tiktoken\.model or tokenizer\.model"),
        ("vocab.json", b"{}", r"transformers write tokenizer\.json from vocab\.json"),
    ],
)
def test_damaged_files_are_told(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with refused(said):
        ChatTokenizer(tmp_path)


def test_a_missing_library_is_told(trained, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with refused("pip install sentencepiece protobuf"):
        ChatTokenizer(trained / "llama")


def test_tiktoken_without_transformers(ranks, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers.convert_slow_tokenizer", None)
    with refused(r"needs transformers.*pip install transformers"):
        ChatTokenizer(ranks)
