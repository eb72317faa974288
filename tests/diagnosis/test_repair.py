"""What can be repaired is cured: the copy is good, and what was no fault is the same to the bit."""

import shutil
from pathlib import Path

import faulty
import good_checkpoints
import make_model
import pytest
import torch
from commands import typed
from edited import edited
from output_files import shards_below
from packed_model import write_packed
from quantized import quantized
from refused import refused
from tiny_models import write

from quantkit.calibrate.data import SHIPPED_TEXT
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.assets import builtin_model
from quantkit.diagnosis.corrections import missing_keys
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.repair import repair

FEW = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
CONFIG = make_model.tiny_config(num_hidden_layers=2, **FEW)
NESTED = {
    "kimi_k3": {"activation_situ_beta": 1.0, "routed_scaling_factor": 2.0},
    "deepseek_v41": {"hc_sinkhorn_iters": 3, "sliding_window": 8},
    "qwen4_exp": {"output_gate_type": "silu", "norm_topk_prob": False},
}
CURED = (
    ("names_have_another_prefix", "ct-int4"),
    ("names_lack_their_prefix", "awq"),
    ("experts_have_mixtrals_names", "ct-int8"),
    ("index_is_missing", "awq"),
    ("index_names_the_wrong_shard", "ct-int4"),
    ("another_group_size_is_said", "ct-int4"),
    ("another_group_size_is_said", "awq"),
    ("experts_are_listed_as_plain", "ct-int4"),
    ("experts_are_listed_as_plain", "modelopt"),
    ("gptq_is_said_to_be_the_other_version", "gptq"),
    ("gptq_is_said_to_be_the_other_version", "gptq-v2"),
    ("zero_points_are_one_less", "awq"),
    ("global_scales_are_inverted", "ct-nvfp4"),
    ("one_global_scale_is_inverted", "modelopt"),
    ("mtp_is_stored_and_not_announced", "awq"),
    ("the_index_leaves_tensors_out", "ct-int4"),
    ("two_shards_hold_other_values", "awq"),
    ("two_shards_hold_other_shapes", "ct-int8"),
    ("the_description_has_its_old_key", "ct-int8"),
    ("routers_are_listed_under_another_name", "ct-int4"),
    ("a_group_is_for_no_module", "ct-int8"),
    ("the_group_is_for_attention_alone", "ct-int4"),
    ("groups_are_said_to_be_channels", "ct-int4"),
)
FROM_SOURCE = (
    ("mtp_was_dropped", "ct-int4"),
    ("mtp_was_dropped_and_config_agrees", "awq"),
    ("mtp_was_dropped", "modelopt"),
    ("mtp_was_dropped", "modelslim"),
    ("the_head_is_lost", "ct-int4"),
    ("the_tokenizer_is_missing", "ct-int4"),
    ("rope_is_lost", "awq"),
    ("eos_is_no_token", "ct-int8"),
    ("the_class_is_another_models", "awq"),
    ("texts_end_after_twenty_tokens", "awq"),
    ("texts_are_said_to_be_short", "ct-int4"),
    ("the_template_is_another_familys", "ct-int4"),
    ("a_file_that_is_a_pointer_hides_the_template", "awq"),
    ("the_head_is_lost_and_said_to_be_tied", "ct-int4"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    names = {name for _, name in (*CURED, *FROM_SOURCE)}
    source, made = good_checkpoints.packed(tmp_path_factory.mktemp("models"), CONFIG, names)
    return made | {"source": source}


def assert_same(ours, good, changed=()):
    """All tensors to the bit, but those whose names hold one of `changed`."""
    for name in good.tensors:
        if not any(part in name for part in changed):
            one, other = (found.read(name).flatten().view(torch.uint8) for found in (ours, good))
            assert torch.equal(one, other), name


@pytest.mark.parametrize(("fault", "format"), [*CURED, *FROM_SOURCE])
def test_a_fault_is_cured(fault, format, models, tmp_path):
    source = str(models["source"]) if (fault, format) in FROM_SOURCE else None
    bad = faulty.damaged(models[format], fault, tmp_path)
    found = diagnose(bad, source=source, depth="tensors")
    assert found.findings.verdict != "good"
    assert repair(found, tmp_path / "out", source)
    again = diagnose(str(tmp_path / "out"), source=source, depth="tensors")
    assert again.findings.verdict == "good", again.to_json()
    changed = (f"model.layers.{CONFIG['num_hidden_layers']}.", "global_scale", "scale_2")
    assert_same(Checkpoint.open(tmp_path / "out"), Checkpoint.open(models[format]), changed)


@pytest.mark.parametrize("name", NESTED)
def test_a_config_within_a_config_is_cured(name, tmp_path):
    """Fields of text_config that are not the source's, which the behaviour shows."""
    path = write(tmp_path / "model", name)
    quantized(path, tmp_path / "out", "rtn-w4a16")
    file = tmp_path / "out/config.json"
    with edited(file) as config:
        config["text_config"] |= NESTED[name]
    found = diagnose(str(tmp_path / "out"), source=str(path), depth="behaviour")
    assert found.findings.has("config-differs")
    repair(found, tmp_path / "repaired", str(path))
    again = diagnose(str(tmp_path / "repaired"), source=str(path))
    assert not again.findings.has("config-differs")


def test_a_copy_that_predicts_worse_is_taken_back(tmp_path):
    """What was mistaken for a fault is not repaired: tiny-r1's zero points are right."""
    config, tensors = good_checkpoints.tiny_r1()
    path = write_packed(tmp_path / "good", config, tensors, *good_checkpoints.FORMATS["awq"])
    for file in (SHIPPED_TEXT, "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_model("tiny-r1") / file, path)
    found = diagnose(str(path), depth="tensors")
    found.findings.add("zero-points-off", "every linear", "mistaken")
    found.examined.offsets = dict.fromkeys(found.examined.description.linears, 1.0)
    with refused("was taken back: it predicts a text worse"):
        repair(found, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["good"]


def test_shards_stay_in_their_folder(models, tmp_path):
    bad = faulty.damaged(models["ct-int4"], "experts_are_listed_as_plain", tmp_path)
    assert repair(diagnose(str(shards_below(Path(bad))), depth="tensors"), tmp_path / "out")
    tensors = Checkpoint.open(tmp_path / "out").tensors.values()
    assert {tensor.shard.partition("/")[0] for tensor in tensors} == {"weights"}


def test_the_command_says_what_it_changed(models, tmp_path):
    bad = faulty.damaged(models["awq"], "names_lack_their_prefix", tmp_path)
    asked = f"check {bad} --repair {tmp_path}/out --json"
    answer, again = typed(asked), typed(asked)
    assert answer.code == 2
    assert "renamed to what engines expect" in answer.json["repaired"]["changes"][0]
    assert (again.code, "exists" in again.error) == (1, True)


@pytest.mark.parametrize(("engine", "format"), [("vllm-ascend", "ct-int4"), ("sglang", "modelopt")])
def test_what_an_engine_reads_is_set(engine, format, models, tmp_path):
    contents = faulty.Contents.of(models[format])
    del contents.config["topk_method"]
    bad, out = contents.write(tmp_path / "bad"), tmp_path / "out"
    answer = typed(f"check {bad} --engine {engine} --repair {out} --json")
    assert answer.code in (1, 2)
    told = answer.json["repaired"]["changes"]
    assert all(change.startswith(f"for {engine}, ") for change in told)
    ours = Checkpoint.open(out)
    assert ours.config["topk_method"] == "noaux_tc"
    assert engine != "vllm-ascend" or ours.config["quantization_config"]["group_size"] == 32
    assert not missing_keys(engine, ours).changes
    assert_same(ours, Checkpoint.open(models[format]))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("codes_are_constant", "can be repaired"),
        ("two_shards_hold_a_tensor_and_no_index_says_which", "there is no index to choose by"),
    ],
)
def test_what_has_no_cure_is_refused(fault, told, models, tmp_path):
    bad = faulty.damaged(models["awq"], fault, tmp_path)
    with refused(told):
        repair(diagnose(bad, depth="tensors"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fault", "of_source"),
    [
        ("the_tokenizer_is_missing", "the_tokenizer_is_missing"),
        ("a_merge_is_of_no_tokens", "the_tokenizer_is_missing"),
        ("mtp_was_dropped", "mtp_was_dropped"),
        ("the_head_is_lost", "the_head_is_lost"),
    ],
)
def test_what_the_source_lacks_too_is_not_taken_from_it(fault, of_source, models, tmp_path):
    bad = faulty.damaged(models["ct-int4"], fault, tmp_path / "bad")
    source = faulty.damaged(models["source"], of_source, tmp_path / "source")
    alone, both = diagnose(bad), diagnose(bad, source=source)
    cured = [one for one in alone.findings.found if "--source SRC --repair OUT" in one.remedy]
    assert cured
    for one in cured:
        (now,) = [other for other in both.findings.found if other.name == one.name]
        assert "--repair" not in now.remedy
    with refused("can be repaired"):
        repair(both, tmp_path / "out", source)
