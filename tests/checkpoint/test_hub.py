"""Hub models: headers by range requests, counted by a hub on loopback; whole models downloaded and
found again."""

import re
import shutil
from pathlib import Path

import faulty
import hub_server
import make_model
import output_files
import pytest
import r1_headers
import torch
from commands import command
from huggingface_hub import constants
from refused import refused
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.hub import find_local, find_model
from quantkit.checkpoint.reader import Checkpoint, open_headers
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.repair import repair

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


def headers(checkpoint):
    return {name: (t.dtype, t.shape, t.shard) for name, t in checkpoint.tensors.items()}


def test_headers_are_those_of_the_files(hub, tiny_checkpoint):
    remote, local = open_headers(NAME), Checkpoint.open(tiny_checkpoint)
    assert remote.config == local.config
    assert headers(remote) == headers(local)
    assert remote.linears.keys() == local.linears.keys()
    assert "tokenizer.json" not in hub.sent
    with refused(r"lm_head\.weight of org/model was not downloaded"):
        remote.read("lm_head.weight")
    with refused("cannot download org/other from Hugging Face"):
        open_headers("org/other")


def test_another_copy_beside_the_only_shard_is_not_read(tmp_path, monkeypatch):
    config = make_model.tiny_config(num_hidden_layers=1, num_nextn_predict_layers=0)
    tensors, folder = make_model.random_tensors(config), tmp_path / "dense"
    make_model.write_dense(folder, config, {"lm_head.weight": tensors["lm_head.weight"]})
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    save_file({"layers.0.wq": torch.zeros(2, 2)}, folder / "consolidated.safetensors")
    with hub_server.serve(folder, NAME) as server:
        use(server, monkeypatch)
        assert open_headers(NAME).tensors.keys() == tensors.keys()


def test_shards_in_a_folder_below_are_those_that_the_index_names(
    tiny_checkpoint, tmp_path, monkeypatch
):
    folder = output_files.shards_below(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    (folder / "original").mkdir()
    save_file({"layers.0.wq": torch.zeros(2, 2)}, folder / "original/consolidated.safetensors")
    with hub_server.serve(folder, NAME) as server:
        use(server, monkeypatch)
        local = Checkpoint.open(folder)
        assert headers(open_headers(NAME)) == headers(local)
        for one in (NAME, str(folder)):
            assert diagnose(one, depth="headers").findings.verdict == "good"
        assert find_local(NAME) is None
        assert Checkpoint.open(find_model(NAME)).fingerprint == local.fingerprint


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


@pytest.mark.parametrize(
    "fault",
    [
        *("shard_is_missing", "index_names_the_wrong_shard", "mtp_was_dropped", "a_norm_is_lost"),
        *("eos_is_no_token", "the_tokenizer_is_cut_short", "fp8_linears_are_listed_as_plain"),
    ],
)
def test_check_finds_a_fault_as_in_a_folder(fault, tiny_checkpoint, tmp_path, monkeypatch):
    def findings(model):
        found = diagnose(model, depth="headers").findings.found
        return {(one.name, one.severity) for one in found}

    folder = faulty.damaged(tiny_checkpoint, fault, tmp_path)
    with hub_server.serve(Path(folder), NAME) as server:
        use(server, monkeypatch)
        assert findings(NAME) == findings(folder) != set()


def test_check_of_a_good_model_reads_no_weight(hub, tiny_checkpoint):
    answer = command("check", NAME, "--json")
    assert (answer.code, answer.json["verdict"]) == (0, "good"), answer.json
    weights = sum(file.stat().st_size for file in tiny_checkpoint.glob("*.safetensors"))
    assert hub.weights < weights / 4


def test_half_a_download_is_not_taken_for_a_model(hub):
    path = find_model(NAME)
    next(path.glob("*.safetensors")).unlink()
    assert find_local(NAME) is None


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


@pytest.mark.parametrize("file", ["snapshots/0a1b/config.json", "tiny/config.json"])
def test_a_directory_that_is_something_else_is_told(file, tmp_path):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("{}")
    told = f"holds no config.json; give the directory of the model, such as .*{file[:-12]}"
    for name, *more in (("plan", "--scheme", "rtn-w4a16"), ("check",), ("run", "--prompt", "?")):
        done = command(name, str(tmp_path), *more)
        assert (done.code, done.errors) == (1, 1), done.err
        assert re.match(f"error: {re.escape(str(tmp_path))} {told}", done.error), done.error


def test_a_source_of_which_the_headers_alone_are_read_repairs_nothing(
    hub, tiny_checkpoint, tmp_path
):
    bad = Path(shutil.copytree(tiny_checkpoint, tmp_path / "bad"))
    (bad / "tokenizer.json").unlink()
    with refused(f"{NAME} is not on this machine, and tokenizer-missing needs files of it"):
        repair(diagnose(str(bad), source=NAME), tmp_path / "out", NAME)
    assert repair(
        diagnose(str(bad), source=str(tiny_checkpoint)), tmp_path / "out", str(tiny_checkpoint)
    )
