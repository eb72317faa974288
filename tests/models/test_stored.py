"""config.json against what the headers hold, before a table is built; and a linear that is stored
unquantized and not listed so, which every command that opens the checkpoint refuses."""

import json

import make_model
import other_names
import pytest
import torch
from commands import command
from edited import edited
from packed_model import write_packed
from refused import refused
from safetensors.torch import save_file
from tiny_models import CASES, CONFIGS

from quantkit.checkpoint.formats import compressed_int4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.deploy.launch import deploy
from quantkit.diagnosis.inspect import describe
from quantkit.executor.weights.load import load_model
from quantkit.grids.int_groups import IntGrid
from quantkit.models import table
from quantkit.models.stored_parameters import read_model
from quantkit.quantization.checks import take_inventory
from quantkit.quantization.convert import convert

CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
}
CONFIG |= {"num_experts_per_tok": 2, "vocab_size": 272}


def written(folder, change=lambda config: None, *, mtp=True):
    """A small checkpoint whose config.json is changed afterwards."""
    config = make_model.tiny_config(**CONFIG)
    tensors = make_model.random_tensors(config)
    if not mtp:
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith("model.layers.2.")
        }
    make_model.write_dense(folder, config, tensors)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("change", "fault"), CASES["larger_refused"])
def test_a_model_far_larger_than_its_headers_is_refused_before_its_table(
    change, fault, tmp_path, monkeypatch
):
    checkpoint = Checkpoint.open(written(tmp_path / "model", lambda config: config.update(change)))

    def built(*_):
        raise AssertionError("a table was built")

    monkeypatch.setattr(table.Parameter, "__init__", built)
    with refused(rf"model/config\.json has .*{fault}"):
        read_model(checkpoint)


def test_mtp_layers_that_are_not_stored_are_left_out_from_the_last(tmp_path):
    """One that lacks before another that is stored is a shard that lacks."""
    folder = written(tmp_path / "model", lambda config: config.update(num_nextn_predict_layers=3))
    checkpoint = Checkpoint.open(folder)
    found = read_model(checkpoint)
    assert (
        found.config.num_nextn_predict_layers
        == found.effective_config["num_nextn_predict_layers"]
        == 1
    )
    assert "promises MTP layers 3 to 4, of which no tensor is stored: left out" in found.warning
    assert take_inventory(checkpoint).rows == found.rows
    assert describe(checkpoint).missing == []
    later = {
        name.replace("layers.2.", "layers.3."): tensor
        for name, tensor in make_model.random_tensors(make_model.tiny_config(**CONFIG)).items()
    }
    make_model.write_dense(
        tmp_path / "later", make_model.tiny_config(**CONFIG, num_nextn_predict_layers=2), later
    )
    with refused(r"lacks model\.layers\.2\.\S+; download the missing shard"):
        take_inventory(Checkpoint.open(tmp_path / "later"))


@pytest.mark.parametrize(
    ("layers", "mtp", "told"),
    [
        (1, 0, "stores layers 1 to 2, and its config.json has 1 layers and 0 for MTP"),
        (2, 0, "stores layer 2, and"),
        (2, 1, ""),
    ],
)
def test_layers_that_config_does_not_count_are_told_of(layers, mtp, told, tmp_path):
    """`run` computed the first layers alone, and said nothing."""
    path = written(
        tmp_path / "model",
        lambda config: config.update(num_hidden_layers=layers, num_nextn_predict_layers=mtp),
    )
    found = load_model(path, device="cpu").warning
    assert told in found
    assert bool(found) == bool(told)


def test_a_null_field_is_held_against_the_tensors(tmp_path):
    path = written(tmp_path / "model", lambda config: config.update(q_lora_rank=None))
    with refused(
        r"has q_lora_rank null, and model\.layers\.0\.self_attn\.q_a_proj\.weight is stored; "
        r"use the config",
    ):
        take_inventory(Checkpoint.open(path), calibrated=False)


@pytest.mark.parametrize("prefix", ["model.model.", "module.model.", "language_model.model."])
def test_a_prefix_of_another_writer_is_named_and_repaired(prefix, tmp_path):
    """The remedy is the one that check prints, and works as printed."""
    config = make_model.tiny_config(**CONFIG)
    tensors = make_model.random_tensors(config)
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    folder = make_model.write_dense(tmp_path / "model", config, renamed)
    with refused(r"where model.* is expected") as fault:
        take_inventory(Checkpoint.open(folder))
    words = fault.value.remedy.split(" writes")[0].replace("OUT", str(tmp_path / "out"))
    command(*words.removeprefix("quantkit ").split())
    assert take_inventory(Checkpoint.open(tmp_path / "out"))


def test_shapes_are_compared_by_every_command(tmp_path):
    folder = written(tmp_path / "model", lambda config: config.update(vocab_size=280))
    fault = (
        r"model\.embed_tokens\.weight in .*\.safetensors has shape \[272, 128\], and its "
        r"config\.json makes it \[280, 128\]"
    )
    checkpoint = Checkpoint.open(folder)
    assert (describe(checkpoint).misshapen or [""])[0] == "model.embed_tokens.weight"
    for check in (lambda: take_inventory(checkpoint), lambda: load_model(folder, device="cpu")):
        with refused(fault):
            check()


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("hidden_size", None, "hidden_size = None, expected an integer from 1"),
        ("hidden_size", True, "hidden_size = True, expected an integer"),
        ("hidden_size", 128.0, r"hidden_size = 128\.0, expected an integer"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps = nan, expected a number above 0"),
        ("rms_norm_eps", 10**400, "rms_norm_eps = 1000.*, expected a number"),
        ("norm_topk_prob", "yes", "norm_topk_prob = 'yes', expected true or false"),
        ("n_group", 3, "n_group = 3, which does not divide n_routed_experts = 4"),
        ("topk_group", 3, "topk_group = 3, more than n_group = 2"),
        ("num_experts_per_tok", 3, "num_experts_per_tok = 3, more than"),
        ("n_group", 4, "n_group = 4, expected groups of at least two"),
        ("rope_interleave", 1, "rope_interleave = 1, expected true or false"),
        ("quantization_config", "fp8", "quantization_config = 'fp8', expected an object"),
        (
            "quantization_config",
            {"quant_method": "awq", "modules_to_not_convert": "x"},
            "expected a list of module names",
        ),
        (
            "quantization_config",
            {"quant_method": "compressed-tensors", "ignore": ["re:("]},
            "which is not a regular expression",
        ),
    ],
)
def test_every_field_is_told_by_name(field, value, fault, tmp_path):
    folder = written(tmp_path / "model", lambda config: config.update({field: value}))
    with refused(rf"model/config\.json has .*{fault}"):
        read_model(Checkpoint.open(folder))


def test_what_the_architecture_decides_is_not_read(tmp_path):
    """`routing` and `qk_norm` are fields of our own dataclass, and no keys of config.json."""
    config = {**CONFIGS["llama"], "routing": {"x": 1}, "qk_norm": True, "dense_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    norm = {"model.norm.weight": torch.ones(256)}
    save_file(norm, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_model(Checkpoint.open(tmp_path)).config
    assert found.routing is None
    assert not any("q_norm" in row.name for row in read_model(Checkpoint.open(tmp_path)).rows)


def test_a_slow_expression_in_a_list_of_modules_is_refused(packed):
    with edited(packed / "config.json") as config:
        config["quantization_config"]["ignore"] = ["re:(.|..)+[A-Z]$"]
    with refused("takes too long to match; write a simpler expression"):
        read_model(Checkpoint.open(packed))


GRID = IntGrid(4, 128, True)
COMMANDS = {
    "inspect": lambda path: describe(Checkpoint.open(path)),
    "convert": lambda path: convert(path, path.with_name("out"), dtype="bf16"),
    "run": lambda path: load_model(path, device="cpu"),
    "deploy": lambda path: deploy(path, "vllm"),
}


KV_B = r"re:.*self_attn\.kv_b_proj$"


def change(path, without=None, listing=(), **fields):
    """Of config.json: an entry less in the list of plain modules, others more, other fields."""
    with edited(path / "config.json") as config:
        config |= fields
        ignore = config["quantization_config"]["ignore"]
        if without is not None:
            ignore.remove(without)
        ignore += listing


@pytest.fixture
def packed(tmp_path):
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return write_packed(
        tmp_path / "model", config, make_model.random_tensors(config), compressed_int4.FORMAT, GRID
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it(command, packed):
    change(packed, KV_B)
    with refused(r"kv_b_proj is unquantized, but .*config\.json does not list it so"):
        COMMANDS[command](packed)
    assert not packed.with_name("out").exists()


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_an_architecture_without_a_table_goes_by_names(command, packed):
    change(packed, model_type="mystery")
    COMMANDS[command](packed)
    change(packed, KV_B)
    with refused("kv_b_proj is unquantized, but"):
        COMMANDS[command](packed)


def test_a_tensor_beside_the_table_goes_by_its_name(packed):
    change(packed, num_nextn_predict_layers=0)
    read_model(Checkpoint.open(packed))
    change(packed, KV_B, [f"model.layers.{n}.self_attn.kv_b_proj" for n in (0, 1)])
    with refused(r"layers\.2\.self_attn\.kv_b_proj is unquantized, but"):
        read_model(Checkpoint.open(packed))


def test_the_table_tells_linears_with_other_names(monkeypatch, tmp_path):
    other_names.register(monkeypatch)
    config = other_names.tiny_config()
    tensors = other_names.random_tensors(config)
    path = write_packed(
        tmp_path / "model",
        config,
        tensors,
        compressed_int4.FORMAT,
        GRID,
        lambda row: row.expert is not None,
    )
    read_model(Checkpoint.open(path))
    ignore = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    change(path, next(entry for entry in ignore if "wq" in entry))
    with refused(r"blocks\.0\.att\.wq is unquantized, but .*config\.json does not list it so"):
        read_model(Checkpoint.open(path))
