"""Models as transformers saves them: config.json keeps the number of MTP layers, and their weights
are dropped."""

import json
import shutil

import make_model
import pytest
import torch
import transformers
from commands import command
from greedy import greedy
from safetensors.torch import load_file, save_file

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


RUN = ("--prompt", "1+1?", "--max-new-tokens", "4", "--device", "cpu")


def test_it_runs_as_transformers_computes_it(saved):
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    length = {"max_new_tokens": 12, "min_new_tokens": 12}
    theirs = model.generate(torch.tensor([PROMPT]), **length, do_sample=False)
    assert greedy(saved, [PROMPT], 12) == theirs[:, len(PROMPT) :].tolist()
    answer = command("run", str(saved), *RUN)
    assert answer.code == 0, answer.err
    assert answer.err.count(TOLD) == 1
    refused = command("run", str(saved), *RUN, "--draft-length", "1")
    assert f"{TOLD}; leave out --draft-length" in refused.error


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "int8-a8w8c16"])
def test_what_is_quantized_says_that_there_is_none(saved, tmp_path, scheme):
    out, asked = tmp_path / "out", (str(saved), "--scheme", scheme)
    few = ("--samples", "4", "--seq-len", "32", "--device", "cpu")
    planned = command("plan", *asked, "--json")
    assert TOLD in planned.json["told"]
    made = command("quantize", *asked, "--out", str(out), *few)
    assert made.code == 0, made.err
    assert made.err.count(TOLD) == 1
    written = Checkpoint.open(out)
    assert written.config["num_nextn_predict_layers"] == 0
    sizes = (tensor.nbytes for tensor in written.tensors.values())
    assert sum(sizes) == planned.json["output_bytes"]
    assert len(greedy(out, [PROMPT], 12)[0]) == 12
    assert "MTP" not in command("run", str(out), *RUN).err


def test_convert_and_place_and_inspect_go_on_too(saved, tmp_path):
    plain = command("convert", str(saved), str(tmp_path / "plain"), "--dtype", "fp32")
    assert plain.code == 0, plain.err
    assert plain.err.count(TOLD) == 1
    assert Checkpoint.open(tmp_path / "plain").config["num_nextn_predict_layers"] == 0
    assert greedy(tmp_path / "plain", [PROMPT], 12) == greedy(saved, [PROMPT], 12)
    found = command("inspect", str(saved), "--json").json
    assert (found["mtp_layers"], found["missing"], found["unknown"]) == (0, [], [])
    # Whose verdict is a warning: the source may have had one.
    assert diagnose(str(saved)).findings.has("mtp-missing")


def test_a_layer_of_which_a_part_is_stored_is_refused(saved, tmp_path):
    """A shard is missing, or its tensors are called otherwise: what is left out then would not be
    known."""
    part, first = shutil.copytree(saved, tmp_path / "part"), "model.layers.2.enorm.weight"
    tensors = load_file(part / "model.safetensors") | {first: torch.ones(128).bfloat16()}
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    asked = (str(part), "--scheme", "rtn-w4a16")
    for words in (("quantize", *asked, "--out", str(tmp_path / "out")), ("plan", *asked)):
        refused = command(*words)
        assert refused.code != 0
        assert "lacks model.layers.2.embed_tokens.weight; download the missing" in refused.error
