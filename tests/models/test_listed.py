"""A linear that is stored unquantized and not listed so is refused by every command that opens the
checkpoint."""

import json

import make_model
import other_names
import pytest
from packed_model import write_packed
from refused import refused

from quantkit.checkpoint.formats import compressed_int4
from quantkit.checkpoint.reader import Checkpoint
from quantkit.deploy.launch import deploy
from quantkit.diagnosis.inspect import describe
from quantkit.executor.weights.load import load_model
from quantkit.grids.int_groups import IntGrid
from quantkit.models.stored_parameters import read_model
from quantkit.quantization.convert import convert

GRID = IntGrid(4, 128, True)
COMMANDS = {
    "inspect": lambda path: describe(Checkpoint.open(path)),
    "convert": lambda path: convert(path, path.with_name("out"), dtype="bf16"),
    "run": lambda path: load_model(path, device="cpu"),
    "deploy": lambda path: deploy(path, "vllm"),
}


def edited(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))
    return path


def without(entry):
    return lambda config: config["quantization_config"]["ignore"].remove(entry)


@pytest.fixture
def packed(tmp_path):
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return write_packed(
        tmp_path / "model", config, make_model.random_tensors(config), compressed_int4.FORMAT, GRID
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_it(command, packed):
    edited(packed, without(r"re:.*self_attn\.kv_b_proj$"))
    with refused(r"kv_b_proj is unquantized, but .*config\.json does not list it so"):
        COMMANDS[command](packed)
    assert not packed.with_name("out").exists()


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_an_architecture_without_a_table_goes_by_names(command, packed):
    edited(packed, lambda config: config.update(model_type="mystery"))
    COMMANDS[command](packed)
    edited(packed, without(r"re:.*self_attn\.kv_b_proj$"))
    with refused("kv_b_proj is unquantized, but"):
        COMMANDS[command](packed)


def test_a_tensor_beside_the_table_goes_by_its_name(packed):
    edited(packed, lambda config: config.update(num_nextn_predict_layers=0))
    read_model(Checkpoint.open(packed))
    edited(packed, without(r"re:.*self_attn\.kv_b_proj$"))
    edited(
        packed,
        lambda config: config["quantization_config"]["ignore"].extend(
            f"model.layers.{n}.self_attn.kv_b_proj" for n in (0, 1)
        ),
    )
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
    edited(path, without(next(entry for entry in ignore if "wq" in entry)))
    with refused(r"blocks\.0\.att\.wq is unquantized, but .*config\.json does not list it so"):
        read_model(Checkpoint.open(path))
