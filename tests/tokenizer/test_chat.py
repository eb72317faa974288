"""Tokenizer, template and streamed text, against transformers where it does the same."""

import json
import shutil

import pytest
from edited import edited
from refused import refused

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


def test_renders_and_encodes_as_transformers(chat, tiny_checkpoint):
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    assert chat.render(MESSAGES) == peer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert (
        chat.encode_chat(MESSAGES)
        == peer.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    )
    assert chat.encode("plain text") == peer.encode("plain text")
    assert chat.eos_ids == {1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"text_config": {"eos_token_id": 7, "vocab_size": 320}}, {1, 7}),
        ({"text_config": {"eos_token_id": 7}, "eos_token_id": [8, 9]}, {1, 8, 9}),
    ],
)
def test_tokens_that_end_an_answer_may_stand_in_text_config(
    changes, expected, tiny_checkpoint, tmp_path
):
    """As Qwen3.5 has it: a text model inside another, and config.json says nothing beside it."""
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "eos_token_id": None, **changes})
    )
    assert ChatTokenizer(path).eos_ids == expected
    (path / "config.json").write_text(
        json.dumps(
            {"model_type": "qwen3_5", "text_config": {"eos_token_id": 320, "vocab_size": 320}}
        )
    )
    with refused("has eos_token_id = 320"):
        ChatTokenizer(path)


def test_a_processors_template_is_read_last(tiny_checkpoint, tmp_path):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (model / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ messages[0]['content'] }}!"})
    )
    assert ChatTokenizer(model).prefills_think
    with edited(model / "tokenizer_config.json") as settings:
        del settings["chat_template"]
    assert ChatTokenizer(model).render(MESSAGES) == "Be brief.!"
    (model / "chat_template.json").write_text('{"chat_template": 3}')
    with refused(r"chat_template\.json has a chat_template that is neither"):
        ChatTokenizer(model)


def test_bos_is_added_where_the_settings_say_so(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({**settings, "add_bos_token": True})
    )
    chat = ChatTokenizer(tmp_path / "model")
    assert chat.encode("x")[0] == 0
    assert chat.encode_chat(MESSAGES).count(0) == 1


def test_special_tokens_of_older_files(tiny_checkpoint, tmp_path):
    """They stand in a file of their own; transformers takes them from there, too."""
    from transformers import AutoTokenizer

    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (tmp_path / "model" / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<｜User｜>"}, "bos_token": "<think>"})
    )
    chat, peer = (
        ChatTokenizer(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    assert (chat.bos, chat.eos) == (peer.bos_token, peer.eos_token) == ("<think>", "<｜User｜>")


def test_a_template_that_is_none_is_told_as_that(tiny_checkpoint, tmp_path):
    """Not as messages that it refuses: nobody's messages are at fault."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ bos_token }}\n{% for x in %}")
    with refused(
        r"chat_template\.jinja is not a template: Expected an expression.*, line 2; copy it"
    ):
        ChatTokenizer(tmp_path / "model").render(MESSAGES)


def test_no_tokenizer_is_told(tmp_path):
    with refused(r"has no tokenizer\.json"):
        ChatTokenizer(tmp_path)


def stream_text(chat, text, stop=()):
    stream = TextStream(chat.tokenizer, stop)
    pieces = []
    for token in chat.tokenizer.encode(text, add_special_tokens=False).ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, True
    return [*pieces, stream.finish()], False


def test_streamed_text_is_whole_characters(chat):
    pieces, _ = stream_text(chat, "Zürich → 五 🙂 done")
    assert "".join(pieces) == "Zürich → 五 🙂 done"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("stop", "early", "shown"),
    [
        (("ab",), 2, "x"),
        (("ab",), 3, "xab x"),
        (("ab",), 7, "xab xabc"),
        (("abc",), 7, "xab x"),
        (("b", "bc"), 7, "xab xa"),
        (("b", "bd"), 7, "xab xabc"),
        (("xab xabc",), 7, ""),
    ],
)
def test_a_stop_string_that_ends_too_early_is_text(chat, stop, early, shown):
    """Also where its characters may begin another; one that begins early and ends late counts."""
    stream, text = TextStream(chat.tokenizer, stop, min_tokens=early), ""
    for character in "xab xabc":
        (token,) = chat.tokenizer.encode(character, add_special_tokens=False).ids
        text += "" if stream.stopped else stream.push(token)
    assert stream.stopped == (shown != "xab xabc")
    assert text + ("" if stream.stopped else stream.finish()) == shown


def test_what_only_looked_like_a_stop_string_comes_out(chat):
    pieces, stopped = stream_text(chat, "a EN EEND? EN", ("ENDING",))
    assert not stopped
    assert "".join(pieces) == "a EN EEND? EN"


def test_a_panic_of_the_library_is_a_fault_that_is_told(tiny_checkpoint, tmp_path):
    """An expression that takes too long on some text: a request's, and the server goes on."""
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with edited(model / "tokenizer.json") as described:
        described["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "(a|a|aa)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    chat = ChatTokenizer(model)
    with refused(r"tokenizer\.json cannot encode this text: .*retry-limit"):
        chat.encode("a" * 60 + "b")
    assert chat.encode("b")


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    ("pattern", "content"),
    [({"String": ""}, "a" * 30), ({"String": "a"}, "a" * 30), ({"Regex": "."}, "a" * 30)],
)
def test_a_tokenizer_that_makes_texts_far_longer_is_refused(
    part, pattern, content, tiny_checkpoint, tmp_path
):
    """Eight such steps make one letter into 30^8, and all memory is gone."""
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with edited(model / "tokenizer.json") as described:
        described[part] = {
            "type": "Sequence",
            f"{part}s": [{"type": "Replace", "pattern": pattern, "content": content}] * 8,
        }
    with refused(r"tokenizer\.json replaces parts of a text so that it may be \S+ times as long"):
        ChatTokenizer(model)


def test_a_tokenizer_may_put_one_mark_in_the_place_of_another(tiny_checkpoint, tmp_path):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    with edited(model / "tokenizer.json") as described:
        replaced = [{"Regex": " {2,}"}, {"String": "y"}]
        marks = [{"type": "Replace", "pattern": pattern, "content": "x"} for pattern in replaced]
        described["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, *marks]}
    chat = ChatTokenizer(model)
    assert chat.decode(chat.encode("a  by")) == "axbx"
