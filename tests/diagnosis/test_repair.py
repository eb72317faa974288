"""What can be repaired is cured: the copy is good, and what was no fault is the same to the bit."""

from collections.abc import Callable
from pathlib import Path

import faulty
import good_checkpoints
import make_model
import pytest
import torch
from commands import command
from output_files import shards_below
from packed_model import write_packed

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.engine_keys import missing_keys
from quantkit.diagnosis.repair import repair

CONFIG = make_model.tiny_config(num_hidden_layers=2)
CURED = (
    (faulty.structure.names_have_another_prefix, "ct-int4"),
    (faulty.structure.names_lack_their_prefix, "awq"),
    (faulty.structure.experts_have_mixtrals_names, "ct-int8"),
    (faulty.files.index_is_missing, "awq"),
    (faulty.files.index_names_the_wrong_shard, "ct-int4"),
    (faulty.description.another_group_size_is_said, "ct-int4"),
    (faulty.description.another_group_size_is_said, "awq"),
    (faulty.description.experts_are_listed_as_plain, "ct-int4"),
    (faulty.description.experts_are_listed_as_plain, "modelopt"),
    (faulty.codes.gptq_is_said_to_be_the_other_version, "gptq"),
    (faulty.codes.gptq_is_said_to_be_the_other_version, "gptq-v2"),
    (faulty.codes.zero_points_are_one_less, "awq"),
    (faulty.codes.global_scales_are_inverted, "ct-nvfp4"),
    (faulty.codes.one_global_scale_is_inverted, "modelopt"),
    (faulty.mtp.mtp_is_stored_and_not_announced, "awq"),
    (faulty.files.the_index_leaves_tensors_out, "ct-int4"),
    (faulty.files.two_shards_hold_other_values, "awq"),
    (faulty.files.two_shards_hold_other_shapes, "ct-int8"),
    (faulty.description.the_description_has_its_old_key, "ct-int8"),
    (faulty.description.routers_are_listed_under_another_name, "ct-int4"),
    (faulty.description.a_group_is_for_no_module, "ct-int8"),
    (faulty.description.the_group_is_for_attention_alone, "ct-int4"),
    (faulty.description.groups_are_said_to_be_channels, "ct-int4"),
)
FROM_SOURCE = (
    (faulty.mtp.mtp_was_dropped, "ct-int4"),
    (faulty.mtp.mtp_was_dropped_and_config_agrees, "awq"),
    (faulty.mtp.mtp_was_dropped, "modelopt"),
    (faulty.mtp.mtp_was_dropped, "modelslim"),
    (faulty.structure.the_head_is_lost, "ct-int4"),
    (faulty.settings.the_tokenizer_is_missing, "ct-int4"),
    (faulty.settings.rope_is_lost, "awq"),
    (faulty.settings.eos_is_no_token, "ct-int8"),
    (faulty.settings.the_class_is_another_models, "awq"),
    (faulty.settings.texts_end_after_twenty_tokens, "awq"),
    (faulty.settings.texts_are_said_to_be_short, "ct-int4"),
    (faulty.settings.the_template_is_another_familys, "ct-int4"),
    (faulty.settings.a_file_that_is_a_pointer_hides_the_template, "awq"),
    (faulty.structure.the_head_is_lost_and_said_to_be_tied, "ct-int4"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, tensors = tmp_path_factory.mktemp("models"), good_checkpoints.random_weights(CONFIG)
    made = {"source": make_model.write_dense(folder / "source", CONFIG, tensors)}
    for name in sorted({name for _, name in (*CURED, *FROM_SOURCE)}):
        made[name] = write_packed(folder / name, CONFIG, tensors, *good_checkpoints.FORMATS[name])
    return made


@pytest.mark.parametrize(
    ("fault", "format"), [*CURED, *FROM_SOURCE], ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_is_cured(
    fault: Callable[[faulty.Contents], None], format: str, models: dict[str, Path], tmp_path: Path
) -> None:
    contents = faulty.Contents.of(models[format])
    fault(contents)
    source = str(models["source"]) if (fault, format) in FROM_SOURCE else None
    found = diagnose(str(contents.write(tmp_path / "bad")), source=source, depth="tensors")
    assert found.findings.verdict != "good"
    assert repair(found, tmp_path / "out", source)
    again = diagnose(str(tmp_path / "out"), source=source, depth="tensors")
    assert again.findings.verdict == "good", again.to_json()
    ours, good = Checkpoint.open(tmp_path / "out"), Checkpoint.open(models[format])
    mtp = f"model.layers.{CONFIG['num_hidden_layers']}."
    for name in good.tensors:
        if not name.startswith(mtp) and "global_scale" not in name and "scale_2" not in name:
            assert torch.equal(
                ours.read(name).view(torch.uint8), good.read(name).view(torch.uint8)
            ), name


def test_shards_stay_in_their_folder(models: dict[str, Path], tmp_path: Path) -> None:
    contents = faulty.Contents.of(models["ct-int4"])
    faulty.description.experts_are_listed_as_plain(contents)
    bad = shards_below(contents.write(tmp_path / "bad"))
    assert repair(diagnose(str(bad), depth="tensors"), tmp_path / "out")
    assert {
        tensor.shard.partition("/")[0]
        for tensor in Checkpoint.open(tmp_path / "out").tensors.values()
    } == {"weights"}


def test_the_command_says_what_it_changed(models: dict[str, Path], tmp_path: Path) -> None:
    contents = faulty.Contents.of(models["awq"])
    faulty.structure.names_lack_their_prefix(contents)
    answer = command(
        "check", str(contents.write(tmp_path / "bad")), "--repair", str(tmp_path / "out"), "--json"
    )
    assert answer.code == 2
    assert "renamed to what engines expect" in answer.json["repaired"]["changes"][0]
    again = command("check", str(tmp_path / "bad"), "--repair", str(tmp_path / "out"), "--json")
    assert again.code == 1
    assert "exists" in again.error


@pytest.mark.parametrize(("engine", "format"), [("vllm-ascend", "ct-int4"), ("sglang", "modelopt")])
def test_what_an_engine_reads_is_set(
    engine: str, format: str, models: dict[str, Path], tmp_path: Path
) -> None:
    contents = faulty.Contents.of(models[format])
    del contents.config["topk_method"]
    answer = command(
        "check",
        str(contents.write(tmp_path / "bad")),
        "--engine",
        engine,
        "--repair",
        str(tmp_path / "out"),
        "--json",
    )
    assert answer.code in (1, 2)
    told = answer.json["repaired"]["changes"]
    assert all(change.startswith(f"for {engine}, ") for change in told)
    ours, good = Checkpoint.open(tmp_path / "out"), Checkpoint.open(models[format])
    assert ours.config["topk_method"] == "noaux_tc"
    assert engine != "vllm-ascend" or ours.config["quantization_config"]["group_size"] == 32
    assert not missing_keys(engine, ours).changes
    for name in good.tensors:
        assert torch.equal(
            ours.read(name).reshape(-1).view(torch.uint8),
            good.read(name).reshape(-1).view(torch.uint8),
        ), name


def test_what_has_no_cure_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    contents = faulty.Contents.of(models["awq"])
    faulty.codes.codes_are_constant(contents)
    with pytest.raises(QuantkitError, match="can be repaired"):
        repair(diagnose(str(contents.write(tmp_path / "bad")), depth="tensors"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_copy_is_chosen_where_no_index_names_one(
    models: dict[str, Path], tmp_path: Path
) -> None:
    contents = faulty.Contents.of(models["awq"])
    faulty.files.two_shards_hold_a_tensor_and_no_index_says_which(contents)
    with pytest.raises(QuantkitError, match="there is no index to choose by"):
        repair(diagnose(str(contents.write(tmp_path / "bad")), depth="tensors"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
