"""quantize() from end to end on a small random DeepSeek-V3: what is written, what it is worth, and
what a restart does."""

import json
import shutil
from dataclasses import replace

import make_model
import pytest
import torch
from letters import write_letters
from output_files import files
from quantized import quantized
from refused import refused
from small_recipe import sequences_of

from quantkit.calibrate import scales
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import Note, Progress
from quantkit.evaluation.distance.tracing import TracedModel
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import grid_label
from quantkit.grids.schemes import SCHEMES, find_scheme
from quantkit.models import deepseek_v3
from quantkit.models.context import CausalContext
from quantkit.quantization import quantize

CONFIG = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
"""A dense layer, one of experts and the MTP layer."""
SMALL = {
    "samples": 12,
    "held_out": 4,
    "seq_len": 48,
    "scale_points": 5,
    "fit_points": 3,
    "sweeps": 2,
    "search_rows": 32,
    "damping": 0.01,
    "min_expert_tokens": 32,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Channels of the norms differ as in a real model, so that scales have something to do."""
    tensors = make_model.random_tensors(CONFIG)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "layernorm" in name:
            tensors[name] = (
                tensor.float() * (1.5 * torch.randn(tensor.shape, generator=generator)).exp()
            ).bfloat16()
    return make_model.write_fp8(tmp_path_factory.mktemp("models") / "salient", CONFIG, tensors)


def run(source, out, scheme, text, on_event=lambda event: None, **changes):
    format_name = str(changes.pop("format", "auto"))
    recipe = Recipe(scheme=scheme, calibration=str(text), **{**SMALL, **changes})
    return quantized(source, out, recipe, format_name, on_event=on_event)


MADE = ("awq-w4a16", "fp4-w4a16", "mxfp4-w4a16", "int8-a8w8c16")
"""The other schemes: test_schemes.py, test_cache_scales.py."""


@pytest.fixture(scope="module")
def outputs(source, text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("outputs")
    return {scheme: run(source, directory / scheme, scheme, text) for scheme in MADE}


@pytest.mark.parametrize("scheme", MADE)
def test_the_output_is_a_checkpoint_of_the_scheme(outputs, scheme):
    written = Checkpoint.open(outputs[scheme].out)
    assert written.scheme.weight == SCHEMES[scheme].weight
    rows = deepseek_v3.parameters(deepseek_v3.Config.from_dict(written.config))
    for row in rows:
        quantized = written.format.quantizes(row.module, row.role, mtp=row.mtp)
        assert (row.module in written.linears) == quantized
        assert quantized or written.tensors[row.name].shape == row.shape
    assert sum(info.nbytes for info in written.tensors.values()) == outputs[scheme].output_bytes


@pytest.mark.parametrize("scheme", MADE)
def test_every_source_tensor_is_accounted_for(source, outputs, scheme):
    entries = json.loads((outputs[scheme].out / "manifest.json").read_text())["tensors"]
    before, after = Checkpoint.open(source), Checkpoint.open(outputs[scheme].out)
    assert entries.keys() == before.tensors.keys()
    grids = {entry["grid"] for entry in entries.values() if entry["status"] == "quantized"}
    assert grids == {grid_label(SCHEMES[scheme].weight)}
    assert {entry["status"] for entry in entries.values()} <= {"quantized", "copied", "transformed"}
    assert {name for entry in entries.values() for name in entry["became"]} == after.tensors.keys()
    for name, entry in entries.items():
        if entry["status"] == "copied":
            assert torch.equal(
                before.read(name).view(torch.uint8), after.read(name).view(torch.uint8)
            ), name
    assert any(
        name.startswith("model.layers.2.") and entry["status"] == "quantized"
        for name, entry in entries.items()
    ) == (scheme != "fp4-w4a16"), "the MTP layer: quantized but in ModelOpt's format"


def test_the_mtp_head_is_listed_as_sglang_calls_it(outputs):
    out = outputs["fp4-w4a16"].out
    config, side = (
        json.loads((out / name).read_text()) for name in ("config.json", "hf_quant_config.json")
    )
    assert "model.shared_head.head" in config["quantization_config"]["ignore"]
    assert "model.shared_head.head" in side["quantization"]["exclude_modules"]


def test_compensated_weights_lose_less_than_rounded_ones(outputs):
    """Of the inputs' error, on held-out text; every linear of the decoder is there. What int4 in
    groups of 128 loses on white inputs is a step's variance, 1/12, of 4.5 sigma in 15 steps."""
    errors = outputs["awq-w4a16"].findings.errors
    config = deepseek_v3.Config.from_dict(CONFIG)
    assert errors.keys() == {
        row.module for row in deepseek_v3.parameters(config) if row.role == "linear"
    }
    assert all(error < 0.02 for error in errors.values())
    assert outputs["awq-w4a16"].findings.mean_error < 0.7 * (4.5 / 15) ** 2 / 12


@pytest.mark.parametrize("scheme", ["awq-w4a16", "int8-a8w8c16"])
def test_the_report_says_what_both_models_say_on_held_out_text(source, text, outputs, scheme):
    """Run whole, by the executor, activations rounded where the scheme rounds them: some tokens
    choose other experts, and few tokens make the mean."""
    sequences = sequences_of(Recipe(scheme=scheme, calibration=str(text), **SMALL), source)
    said = []
    for path in (source, outputs[scheme].out):
        watched = TracedModel(load_model(path, device="cpu", dtype="float32"))
        said.append(
            watched.loaded.model.head(watched(sequences.held_out).final).float().log_softmax(-1)
        )
    facts = json.loads((outputs[scheme].out / "report.json").read_text())["held_out"]
    assert facts["tokens"] == len(said[0]) == sum(map(len, sequences.held_out))
    assert facts["kl"] == pytest.approx(
        float((said[0].exp() * (said[0] - said[1])).sum(-1).mean()), rel=0.3
    )
    assert facts["top1_agree"] == pytest.approx(
        float((said[0].argmax(-1) == said[1].argmax(-1)).float().mean()), abs=0.08
    )
    assert 0.5 < facts["expert_agree"] < 1


def test_the_group_size_of_the_recipe_and_the_format_that_is_asked_for(source, text, tmp_path):
    report = run(
        source, tmp_path / "out", "rtn-w4a16", text, group_size=32, format="compressed-tensors"
    )
    written = Checkpoint.open(report.out)
    assert written.format.name == "compressed-tensors"
    assert written.grid == replace(SCHEMES["rtn-w4a16"].weight, group_size=32)


class Stopped(Exception):
    pass


def stop_after(count, notes=None):
    """Stops a run at the count-th finished unit or phase, wherever that is; what it notes until
    then goes to `notes`."""
    seen = 0

    def on_event(event):
        nonlocal seen
        seen += isinstance(event, Progress)
        if notes is not None and isinstance(event, Note):
            notes.append(event)
        if seen >= count:
            raise Stopped

    return on_event


def test_a_stopped_run_goes_on_to_the_same_bytes(source, text, outputs, tmp_path):
    out, notes = tmp_path / "out", []
    for count in (3, 9, 14):
        with pytest.raises(Stopped):
            run(source, out, "awq-w4a16", text, stop_after(count, notes))
        assert not out.exists()
    report = run(source, out, "awq-w4a16", text)
    assert any("found finished" in note.text for note in notes)
    assert files(out) == files(outputs["awq-w4a16"].out)
    assert report.findings == outputs["awq-w4a16"].findings


def test_another_scheme_by_the_same_recipe_is_not_done_already(source, text, tmp_path):
    """One format holds both, and the recipe of one's own names a third."""
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), methods=("awq",), **SMALL)
    out, format = tmp_path / "out", "compressed-tensors"
    quantize(source, out, find_scheme("fp4-w4a16"), format, recipe, device="cpu")
    with refused("exists, made with a different recipe"):
        quantize(source, out, find_scheme("nvfp4-w4a4"), format, recipe, device="cpu")


def test_a_wrong_scale_group_stops_the_run(source, text, tmp_path, monkeypatch):
    """The fault two peers have: the router reads the scaled norm and is not compensated."""
    inside = scales._inside

    def forget_router(sublayer, group):
        found = inside(sublayer, group).items()
        return {name: module for name, module in found if not module.endswith("mlp.gate")}

    monkeypatch.setattr(scales, "_inside", forget_router)
    with refused(r"scaling changes the (output|routing) of layers.1"):
        run(source, tmp_path / "out", "awq-w4a16", text)


@pytest.mark.parametrize("name", ["model.layers.1.input_layernorm.weight", "lm_head.weight"])
def test_a_value_that_is_no_number_is_named(text, tmp_path, name):
    tensors = make_model.random_tensors(CONFIG)
    tensors[name].view(-1)[3] = float("nan")
    source = make_model.write_fp8(tmp_path / "broken", CONFIG, tensors)
    with refused(f"{name} holds 1 value"):
        run(source, tmp_path / "out", "rtn-w4a16", text)
    assert not (tmp_path / "out").exists()


def test_only_a_models_own_files_are_copied(source, text, tmp_path):
    own = shutil.copytree(source, tmp_path / "source")
    (own / "secrets.txt").write_text("not yours")
    report = run(own, tmp_path / "out", "rtn-w4a16", text)
    names = {path.name for path in report.out.iterdir()}
    assert {"tokenizer.json", "generation_config.json", "manifest.json"} <= names
    assert "secrets.txt" not in names


def test_accepted_drafts_are_those_of_both_models(tmp_path):
    """On all held-out text, and on what the model wrote of it. Some tokens are likelier than all
    others, so that drafts of a random model are accepted."""
    text = write_letters(tmp_path / "text.jsonl", 2000)
    config = make_model.tiny_config(num_hidden_layers=1, **make_model.NARROW)
    tensors, out = make_model.random_tensors(config), tmp_path / "out"
    for name in ("lm_head.weight", "model.layers.1.shared_head.head.weight"):
        tensors[name][:3] = 30 * tensors["lm_head.weight"][:3]
    source = make_model.write_dense(tmp_path / "source", config, tensors)
    found = run(source, out, "awq-w4a16", text).findings.next_token
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), **SMALL)
    sequences = sequences_of(recipe, source)
    for path, end in ((source, "_source"), (out, "")):
        loaded, agree = load_model(path, device="cpu", dtype="float32", mtp=1), []
        (layer,) = loaded.mtp_layers
        for ids in sequences.held_out:
            hidden = loaded.model(ids, CausalContext([len(ids)]))
            drafts = layer.logits(layer(ids[1:], hidden[:-1], CausalContext([len(ids) - 1])))
            agree.append(drafts.argmax(-1) == loaded.model.logits(hidden)[1:].argmax(-1))
        for name, right in (("", agree), ("_own", [agree[one] for one in sequences.written])):
            key = f"accepted_drafts{name}{end}"
            assert found[key] == pytest.approx(float(torch.cat(right).double().mean()), abs=0.02)
            assert 0.1 < found[key] < 0.95
    assert found["accepted_drafts_own_tokens"] == 31 * len(sequences.written)
    told = json.loads((out / "report.json").read_text())["held_out"]
    assert told["accepted_drafts_low"] < told["accepted_drafts"] < told["accepted_drafts_high"]
