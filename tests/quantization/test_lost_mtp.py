"""Models as transformers saves them: config.json keeps the number of MTP layers, and their weights
are dropped."""

import json
import shutil

import make_model
import pytest
import torch
import transformers
from commands import command
from safetensors import safe_open
from safetensors.torch import save_file

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose

PROMPT = [5, 60, 61, 62, 63, 64]
TOLD = "promises MTP layer 2, of which no tensor is stored: left out"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "deepseek_v3"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v3", **make_model.CONFIGS["saved"])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        path
    )
    make_model.write_tokenizer(path)
    assert json.loads((path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    return path


def greedy(path):
    """The next 12 tokens by quantkit."""
    engine = Engine.load(path, device="cpu", dtype="float32", max_batch=1, max_model_len=64)
    return next(iter(engine.generate([PROMPT], SamplingParams(max_new_tokens=12)))).token_ids


def test_it_runs_as_transformers_computes_it(saved):
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[
        0, len(PROMPT) :
    ].tolist()
    assert greedy(saved) == theirs
    answer = command(
        "run", str(saved), "--prompt", "1+1?", "--max-new-tokens", "4", "--device", "cpu"
    )
    assert answer.code == 0, answer.err
    assert answer.err.count(TOLD) == 1
    refused = command(
        "run", str(saved), "--prompt", "1+1?", "--draft-length", "1", "--device", "cpu"
    )
    assert f"{TOLD}; leave out --draft-length" in refused.error


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "int8-a8w8c16"])
def test_what_is_quantized_says_that_there_is_none(saved, tmp_path, scheme):
    out, few = tmp_path / "out", ("--samples", "4", "--seq-len", "32")
    planned = command("plan", str(saved), "--scheme", scheme, "--json")
    assert TOLD in planned.json["told"]
    made = command(
        "quantize", str(saved), "--scheme", scheme, "--out", str(out), "--device", "cpu", *few
    )
    assert made.code == 0, made.err
    assert made.err.count(TOLD) == 1
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    written = {name: tensor.nbytes for name, tensor in Checkpoint.open(out).tensors.items()}
    assert sum(written.values()) == planned.json["output_bytes"]
    assert len(greedy(out)) == 12
    answer = command(
        "run", str(out), "--prompt", "1+1?", "--max-new-tokens", "4", "--device", "cpu"
    )
    assert answer.code == 0
    assert "MTP" not in answer.err


def test_convert_and_place_and_inspect_go_on_too(saved, tmp_path):
    plain = command("convert", str(saved), str(tmp_path / "plain"), "--dtype", "fp32")
    assert plain.code == 0, plain.err
    assert plain.err.count(TOLD) == 1
    assert json.loads((tmp_path / "plain/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert greedy(tmp_path / "plain") == greedy(saved)
    found = command("inspect", str(saved), "--json").json
    assert (found["mtp_layers"], found["missing"], found["unknown"]) == (0, [], [])
    assert diagnose(str(saved)).findings.has(
        "mtp-missing"
    )  # whose verdict is a warning: the source may have had one
    launched = command("deploy", str(saved), "--engine", "vllm", "--draft-length", "1")
    assert "has no MTP layer for speculative decoding" in launched.error


def test_a_layer_of_which_a_part_is_stored_is_refused(saved, tmp_path):
    """A shard is missing, or its tensors are called otherwise: what is left out then would not be
    known."""
    part, first = shutil.copytree(saved, tmp_path / "part"), "model.layers.2.enorm.weight"
    save_file(
        {first: torch.ones(128, dtype=torch.bfloat16)},
        part / "more.safetensors",
        metadata={"format": "pt"},
    )
    with safe_open(part / "model.safetensors", framework="pt") as stored:
        places = dict.fromkeys(stored.keys(), "model.safetensors") | {first: "more.safetensors"}
    (part / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    asked = (str(part), "--scheme", "rtn-w4a16")
    for refused in (
        command("quantize", *asked, "--out", str(tmp_path / "out")),
        command("plan", *asked),
    ):
        assert refused.code != 0
        assert (
            "lacks model.layers.2.embed_tokens.weight; download the missing shard" in refused.error
        )
