"""Calibration text that the model writes itself."""

import json
from pathlib import Path

import pytest
import transformers
from make_model import write_dense
from quantized import stop_when
from small_recipe import SMALL
from transformers_peers import checkpoint_tensors

from quantkit import quantize
from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.calibrate.recipe import Recipe
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.quantization import model_text

OWN = "written by the model"
ASKED = {
    "scheme": "awq-w4a16",
    "recipe": Recipe(scheme="awq-w4a16", **SMALL | {"seq_len": 160}),
    "calibration": model_text.SELF,
    "device": "cpu",
}


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def never(options):
    raise AssertionError("the text is there")


def test_half_of_the_documents_are_the_models(tiny_checkpoint, tmp_path, monkeypatch):
    """A stopped run and a complete output keep them; as a file they give the same weights."""
    out = tmp_path / "out"
    monkeypatch.setattr(model_text, "_LONGEST_QUESTION", 0.8)  # a letter is a token

    stop = stop_when(lambda event: getattr(event, "phase", "") == "solving")
    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_checkpoint, out, **ASKED, on_event=stop)
    text = model_text.text_path(out)
    written = records(text)
    assert [one["kind"] == OWN for one in written] == [True] * 4 + [False] * 4
    assert any(one["kind"] == OWN and one.get("messages") for one in written)
    assert any(one["kind"] == OWN and one.get("text", "").strip() for one in written)
    content = text.read_bytes()
    monkeypatch.setattr(model_text, "open_engine", never)
    report = quantize(tiny_checkpoint, out, **ASKED)
    assert not report.done_already
    assert (out / SHIPPED_TEXT).read_bytes() == content
    assert not text.exists()
    assert quantize(tiny_checkpoint, out, **ASKED).done_already
    again = tmp_path / "again"
    quantize(tiny_checkpoint, again, **ASKED | {"calibration": out / SHIPPED_TEXT})
    weights = "model-00001-of-00001.safetensors"
    assert (again / weights).read_bytes() == (out / weights).read_bytes()
    monkeypatch.undo()
    quantize(tiny_checkpoint, out, **ASKED, seed=1, overwrite=True)
    assert (out / SHIPPED_TEXT).read_bytes() != content, "another seed's"


def test_a_model_that_transformers_computes_writes_its_text(tmp_path):
    """One without a chat template: texts alone; of a shorter context than documents."""
    config = transformers.StableLmConfig(
        vocab_size=512,
        max_position_embeddings=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.StableLmForCausalLM(config).bfloat16()
    source = write_dense(tmp_path / "source", config.to_dict(), checkpoint_tensors(model))
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (source / file).unlink(missing_ok=True)
    quantize(source, tmp_path / "out", **ASKED)
    own = [one for one in records(tmp_path / "out" / SHIPPED_TEXT) if one["kind"] == OWN]
    assert len(own) == 4
    assert all(one["text"].strip() for one in own)


def test_it_is_refused_where_the_model_may_not_be_loaded_whole(tiny_checkpoint, tmp_path):
    with pytest.raises(UsageError, match=SHIPPED_TEXT):
        quantize(tiny_checkpoint, tmp_path / "out", **ASKED, memory="4GiB")

    def without_room(options):
        raise QuantkitError("it needs 9 GB, and 1 GB is free", "use a smaller model")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_text, "open_engine", without_room)
        with pytest.raises(QuantkitError, match="9 GB"):
            quantize(tiny_checkpoint, tmp_path / "out", **ASKED)
    assert not list(tmp_path.iterdir())


def test_a_users_file_of_the_texts_name_is_kept(tiny_checkpoint, tmp_path):
    out = tmp_path / "out"
    own = model_text.text_path(out)
    own.write_text("".join(f'{{"text": "document {number}"}}\n' for number in range(9)))
    before = own.read_bytes()
    with pytest.raises(QuantkitError, match="move it away"):
        quantize(tiny_checkpoint, out, **ASKED)
    quantize(tiny_checkpoint, out, **ASKED | {"calibration": own})
    assert own.read_bytes() == before
