"""Hub models: headers by range requests, counted by a hub on loopback; whole models downloaded and
found again."""

import re
import shutil

import hub_server
import make_model
import output_files
import pytest
import r1_headers
import torch
from commands import command
from huggingface_hub import constants
from refused import refused
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.hub import find_local, find_model
from quantkit.checkpoint.reader import Checkpoint, open_headers
from quantkit.diagnosis.diagnose import diagnose

NAME = "org/model"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(tiny_checkpoint, monkeypatch):
    with hub_server.serve(tiny_checkpoint, NAME) as server:
        use(server, monkeypatch)
        yield server


def use(server, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.address + "/{repo_id}/resolve/{revision}/{filename}",
    )


def test_headers_are_those_of_the_files(hub, tiny_checkpoint):
    remote, local = open_headers(NAME), Checkpoint.open(tiny_checkpoint)
    assert remote.config == local.config
    assert {name: (t.dtype, t.shape, t.shard) for name, t in remote.tensors.items()} == {
        name: (t.dtype, t.shape, t.shard) for name, t in local.tensors.items()
    }
    assert remote.linears.keys() == local.linears.keys()
    assert "tokenizer.json" not in hub.sent


def test_another_copy_beside_the_only_shard_is_not_read(tmp_path, monkeypatch):
    config = make_model.tiny_config(num_hidden_layers=1, num_nextn_predict_layers=0)
    folder = make_model.write_dense(tmp_path / "dense", config, make_model.random_tensors(config))
    tensors = {
        name: tensor
        for shard in folder.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
    }
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    save_file(
        {"layers.0.attention.wq.weight": tensors["lm_head.weight"]},
        folder / "consolidated.safetensors",
    )
    with hub_server.serve(folder, NAME) as server:
        use(server, monkeypatch)
        assert open_headers(NAME).tensors.keys() == tensors.keys()


def test_shards_in_a_folder_below_are_those_that_the_index_names(
    tiny_checkpoint, tmp_path, monkeypatch
):
    folder = output_files.shards_below(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    (folder / "original").mkdir()
    save_file(
        {"layers.0.attention.wq.weight": torch.zeros(2, 2)},
        folder / "original" / "consolidated.safetensors",
    )
    with hub_server.serve(folder, NAME) as server:
        use(server, monkeypatch)
        remote, local = open_headers(NAME), Checkpoint.open(folder)
        assert {name: (t.shape, t.shard) for name, t in remote.tensors.items()} == {
            name: (t.shape, t.shard) for name, t in local.tensors.items()
        }
        assert {diagnose(one, depth="headers").findings.verdict for one in (NAME, str(folder))} == {
            "good"
        }
        assert find_local(NAME) is None
        assert Checkpoint.open(find_model(NAME)).fingerprint == local.fingerprint


def test_a_weight_that_was_not_downloaded_is_named(hub):
    with refused(r"lm_head\.weight of org/model was not downloaded"):
        open_headers(NAME).read("lm_head.weight")


def test_planning_r1_takes_less_than_20_mb_and_no_weight(tmp_path, monkeypatch):
    folder = r1_headers.write_headers(
        tmp_path / "r1", r1_headers.r1_config(num_nextn_predict_layers=1)
    )
    with hub_server.serve(folder, NAME) as server:
        use(server, monkeypatch)
        planned = quantkit.plan(NAME, "awq-w4a16", engine="vllm")
    assert planned.source_bytes > 680e9
    assert round(planned.output_bytes_without_mtp / 1e9) == 353
    assert len([file for file in server.sent if file.endswith(".safetensors")]) == 163
    assert server.total < 20e6
    assert {path.name for path in (tmp_path / "cache").rglob("*") if path.is_symlink()} == {
        "config.json"
    }, "nothing else was downloaded"


def test_a_download_is_found_again(hub, tiny_checkpoint, tmp_path, monkeypatch):
    assert find_local(NAME) is None
    path = find_model(NAME)
    assert Checkpoint.open(path).fingerprint == Checkpoint.open(tiny_checkpoint).fingerprint
    sent = hub.weights
    assert sent == sum(file.stat().st_size for file in tiny_checkpoint.glob("*.safetensors"))
    assert find_model(NAME) == find_local(NAME) == path
    assert hub.weights == sent, "nothing is downloaded twice"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_model(NAME) == path, "the hub need not be there"
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).parent.mkdir()
    assert find_model(NAME) == path, "it was downloaded by this name, whatever lies beside"


def test_half_a_download_is_not_taken_for_a_model(hub):
    path = find_model(NAME)
    next(path.glob("*.safetensors")).unlink()
    assert find_local(NAME) is None


def test_a_model_that_the_hub_does_not_have(hub):
    with refused("cannot download org/other from Hugging Face"):
        open_headers("org/other")


def test_a_path_that_leads_nowhere_is_no_hub_model_alone(hub, tmp_path, monkeypatch):
    """out/awq has the form of a hub id. Nobody is asked for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for find in (find_model, find_local, open_headers):
        for name in (
            "out/awq",
            "./awq",
            "../awq",
            "out/x/awq",
            "my models/awq",
            "out/größer",
            str(tmp_path / "out" / "awq"),
        ):
            with refused(f"^there is no folder {re.escape(name)}; "):
                find(name)
    assert not hub.sent
    (tmp_path / "out" / "awq.partial").mkdir()
    for name in ("out/awq", str(tmp_path / "out" / "awq")):
        with refused("out/awq is not finished; give the command that makes it again"):
            find_model(name)


@pytest.mark.parametrize("name", ["127.0.0.1:8000", "localhost:8000/v1"])
def test_an_address_without_its_scheme_is_told(name):
    with refused(f"model {name} does not exist; give a server's address as http://{name}"):
        find_model(name)


def test_a_model_without_safetensors(tmp_path, tiny_checkpoint, monkeypatch):
    folder = tmp_path / "pickles"
    folder.mkdir()
    shutil.copy(tiny_checkpoint / "config.json", folder)
    with hub_server.serve(folder, NAME) as server:
        use(server, monkeypatch)
        with refused("has no safetensors file"):
            open_headers(NAME)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            ["refs/main", "snapshots/0a1b/config.json"],
            "holds no config.json; give the directory of the model, such as .*snapshots/0a1b",
        ),
        (
            ["tiny/config.json"],
            "holds no config.json; give the directory of the model, such as .*/tiny",
        ),
    ],
)
def test_a_directory_that_is_something_else_is_told(files, told, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    for arguments in (("plan", "--scheme", "rtn-w4a16"), ("check",), ("run", "--prompt", "?")):
        done = command(arguments[0], str(tmp_path), *arguments[1:])
        assert (done.code, done.errors) == (1, 1), done.err
        assert re.match(f"error: {re.escape(str(tmp_path))} {told}", done.error), done.error


def test_a_model_is_deployed_by_its_headers(hub):
    """DeepSeek-R1 has 688 GB, which the boxes need and the machine that asks does not."""
    made = command("deploy", NAME, "--engine", "vllm", "--json").json
    ((_, words),) = made["launches"][0]["commands"]
    assert words[:3] == ["vllm", "serve", NAME]
    assert words[words.index("--served-model-name") + 1] == "model"
    assert made["memory"]["server"]["weight_bytes"] > 0
    assert find_local(NAME) is None, "nothing of it was downloaded"
