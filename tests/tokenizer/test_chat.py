"""Tokenizer, template and streamed text, against transformers where it does the same."""

import json
import shutil

import pytest
from edited import edited
from refused import refused
from transformers import AutoTokenizer

from quantkit.tokenizer.chat import ChatTokenizer, TextStream

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Zürich → 2+3?"},
    {"role": "assistant", "content": "<think>\n5</think>five"},
    {"role": "user", "content": "sure?"},
]


@pytest.fixture(scope="module")
def chat(tiny_checkpoint):
    return ChatTokenizer(tiny_checkpoint)


@pytest.fixture
def model(tiny_checkpoint, tmp_path):
    """A copy of the checkpoint, to be changed."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def test_renders_and_encodes_as_transformers(chat, tiny_checkpoint):
    peer, asked = AutoTokenizer.from_pretrained(tiny_checkpoint), {"add_generation_prompt": True}
    text = peer.apply_chat_template(MESSAGES, tokenize=False, **asked)
    assert chat.render(MESSAGES) == text
    assert chat.encode_chat(MESSAGES) == peer.apply_chat_template(MESSAGES, **asked)["input_ids"]
    assert chat.encode("plain text") == peer.encode("plain text")
    assert chat.eos_ids == {1}


def test_tokens_that_end_an_answer_may_stand_in_text_config(model):
    """As Qwen3.5 has it: a text model inside another, and config.json says nothing beside it."""
    (model / "generation_config.json").unlink()
    for own, inner, expected in ((None, 7, {1, 7}), ([8, 9], 7, {1, 8, 9}), (None, 320, None)):
        text = {"eos_token_id": inner, "vocab_size": 320}
        said = {"model_type": "qwen3_5", "eos_token_id": own, "text_config": text}
        (model / "config.json").write_text(json.dumps(said))
        if expected:
            assert ChatTokenizer(model).eos_ids == expected
    with refused("has eos_token_id = 320"):
        ChatTokenizer(model)


def test_a_processors_template_is_read_last(model):
    file = model / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}!"}))
    assert ChatTokenizer(model).prefills_think
    with edited(model / "tokenizer_config.json") as settings:
        del settings["chat_template"]
    assert ChatTokenizer(model).render(MESSAGES) == "Be brief.!"
    file.write_text('{"chat_template": 3}')
    with refused(r"chat_template\.json has a chat_template that is neither"):
        ChatTokenizer(model)


def test_bos_is_added_where_the_settings_say_so(model):
    with edited(model / "tokenizer_config.json") as settings:
        settings["add_bos_token"] = True
    chat = ChatTokenizer(model)
    assert chat.encode("x")[0] == 0
    assert chat.encode_chat(MESSAGES).count(0) == 1


def test_special_tokens_of_older_files(model):
    """They stand in a file of their own; transformers takes them from there, too."""
    own = {"eos_token": {"content": "<｜User｜>"}, "bos_token": "<think>"}
    (model / "special_tokens_map.json").write_text(json.dumps(own))
    chat, peer = ChatTokenizer(model), AutoTokenizer.from_pretrained(model)
    assert (chat.bos, chat.eos) == (peer.bos_token, peer.eos_token) == ("<think>", "<｜User｜>")


def test_a_template_that_is_none_is_told_as_that(model):
    """Not as messages that it refuses: nobody's messages are at fault."""
    (model / "chat_template.jinja").write_text("{{ bos_token }}\n{% for x in %}")
    with refused(r"chat_template\.jinja is not a template: Expected an expression.*, line 2; copy"):
        ChatTokenizer(model).render(MESSAGES)


def test_no_tokenizer_is_told(tmp_path):
    with refused(r"has no tokenizer\.json"):
        ChatTokenizer(tmp_path)


def streamed(chat, text, stop=(), **options):
    """Pieces of a text, and whether a stop string ended it."""
    stream, pieces = TextStream(chat.tokenizer, stop, **options), []
    for token in chat.encode_rendered(text):
        pieces.append("" if stream.stopped else stream.push(token))
    return [*pieces, "" if stream.stopped else stream.finish()], stream.stopped


@pytest.mark.parametrize("text", ["Zürich → 五 🙂 done", "a EN EEND? EN"])
def test_streamed_text_is_whole_characters(chat, text):
    """Of which some only look like a stop string."""
    pieces, stopped = streamed(chat, text, ("ENDING",))
    assert ("".join(pieces), stopped) == (text, False)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("stop", "early", "shown"),
    [
        (("ab",), 2, "x"),
        (("ab",), 3, "xab x"),
        (("ab",), 7, "xab xabc"),
        (("abc",), 7, "xab x"),
        (("b", "bc"), 7, "xab xa"),
        (("xab xabc",), 7, ""),
    ],
)
def test_a_stop_string_that_ends_too_early_is_text(chat, stop, early, shown):
    """Also where its characters may begin another; one that begins early and ends late counts."""
    pieces, stopped = streamed(chat, "xab xabc", stop, min_tokens=early)
    assert ("".join(pieces), stopped) == (shown, shown != "xab xabc")


def test_a_panic_of_the_library_is_a_fault_that_is_told(model):
    """An expression that takes too long on some text: a request's, and the server goes on."""
    split = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}}
    with edited(model / "tokenizer.json") as described:
        described["pre_tokenizer"] = split | {"behavior": "Isolated", "invert": False}
    chat = ChatTokenizer(model)
    with refused(r"tokenizer\.json cannot encode this text: .*retry-limit"):
        chat.encode("a" * 60 + "b")
    assert chat.encode("b")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize("pattern", [{"String": ""}, {"String": "a"}, {"Regex": "."}])
def test_a_tokenizer_that_makes_texts_far_longer_is_refused(part, pattern, model):
    """Eight such steps make one letter into 30^8, and all memory is gone."""
    step = {"type": "Replace", "pattern": pattern, "content": "a" * 30}
    with edited(model / "tokenizer.json") as described:
        described[part] = {"type": "Sequence", f"{part}s": [step] * 8}
    with refused(r"tokenizer\.json replaces parts of a text so that it may be \S+ times as long"):
        ChatTokenizer(model)


def test_a_tokenizer_may_put_one_mark_in_the_place_of_another(model):
    with edited(model / "tokenizer.json") as described:
        replaced = [{"Regex": " {2,}"}, {"String": "y"}]
        marks = [{"type": "Replace", "pattern": pattern, "content": "x"} for pattern in replaced]
        described["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *marks]}
    chat = ChatTokenizer(model)
    assert chat.decode(chat.encode("a  by")) == "axbx"
