"""`check` of a model that is only on the Hub: headers give the same findings as a folder, and no
weight is downloaded."""

from contextlib import ExitStack
from pathlib import Path

import faulty
import hub_server
import pytest
from commands import command
from huggingface_hub import constants

from quantkit.diagnosis.diagnose import diagnose

NAME = "org/model"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def findings(model):
    return {(one.name, one.severity) for one in diagnose(model, depth="headers").findings.found}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serves a folder as NAME."""
    with ExitStack() as servers:

        def serve(folder):
            server = servers.enter_context(hub_server.serve(folder, NAME))
            monkeypatch.setattr(constants, "ENDPOINT", server.address)
            template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return server

        yield serve


def test_a_good_model_is_good_and_no_weight_is_read(tiny_checkpoint, served):
    hub = served(tiny_checkpoint)
    answer = command("check", NAME, "--json")
    assert (answer.code, answer.json["verdict"]) == (0, "good"), answer.json
    assert (
        hub.weights < sum(file.stat().st_size for file in tiny_checkpoint.glob("*.safetensors")) / 4
    )


@pytest.mark.parametrize(
    "fault",
    [
        *("shard_is_missing", "index_names_the_wrong_shard", "mtp_was_dropped", "a_norm_is_lost"),
        *("eos_is_no_token", "the_tokenizer_is_cut_short", "fp8_linears_are_listed_as_plain"),
    ],
)
def test_a_fault_is_found_as_in_a_folder(
    tiny_checkpoint,
    tmp_path,
    served,
    fault,
):
    folder = faulty.damaged(tiny_checkpoint, fault, tmp_path)
    served(Path(folder))
    assert findings(NAME) == findings(folder) != set()
