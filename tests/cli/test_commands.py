"""The main job as a user types it: every scheme and format through the command line, and what bad
input gets."""

import json
import re
import shutil

import pytest
import tiny_models
from commands import typed
from edited import edited
from letters import write_letters
from small_recipe import SMALL


def answer(line):
    """The one JSON object that a command prints."""
    done = typed(f"{line} --json")
    assert done.code == 0, done.err
    return done.json


def refusal(line):
    """The one line that a refused command prints."""
    done = typed(line)
    assert done.code == 1, done
    assert sum("error:" in line for line in done.err.splitlines()) == 1, done.err
    return done.error


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    return write_letters(tmp_path_factory.mktemp("text") / "calibration.txt", 3000)


def test_the_command_of_the_card_makes_it_again(calibration, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_models.write(tmp_path / "llama", "llama", num_hidden_layers=1)
    (tmp_path / "mine.yaml").write_text(json.dumps({"scheme": "awq-w4a16", **SMALL}))
    asked = "--recipe mine.yaml --kv-cache fp8 --ignore 're:.*down_proj' --override 're:.*o_proj bits=8'"
    answer(f"quantize llama {asked} --calibration {calibration} --out out")
    card = (tmp_path / "out/README.md").read_text()
    settings = re.search(r"^\| recipe.yaml \| `(.*)` \|$", card, re.M)[1]
    (tmp_path / "recipe.yaml").write_text(settings)
    answer(re.search("^quantkit (quantize .*)$", card, re.M)[1] + " --out again")
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_base_model_is_run_raw_and_scored_by_its_protocol(tiny_checkpoint, tmp_path):
    base = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    with edited(base / "tokenizer_config.json") as settings:
        del settings["chat_template"]
    reply = answer(f"run {base} --raw --prompt hello --max-new-tokens 4")
    assert reply["prompt_tokens"] == 5  # a byte each, and nothing around them
    assert "has no chat template" in refusal(f"run {base} --prompt hello")
    assert "--raw needs --prompt" in refusal(f"run {base} --raw")
    said = typed(f"eval {base} --tasks tiny-math").err
    assert "protocol lm-eval for" in said
    assert "no chat template" in said


KINDS = ("int4", "int8", "fp4", "dense")


def test_kernels_answers():
    rows = answer("kernels --device cpu")["rows"]
    assert all(row["usable"] or row["reason"] for row in rows)
    table = typed("kernels --device cpu").out
    assert all(f"{row['operator']} " in table for row in rows)
    assert table.count("runs on CUDA, not on cpu") == 1  # said once, for all operators
    slow = typed("kernels --device cpu --backend reference").err
    found = {kind for kind in KINDS if f"SLOW: linear_{kind} runs on the reference" in slow}
    assert found == {"int4", "int8", "fp4"}
    nothing = typed("kernels --device cpu --backend triton").err
    assert "triton runs nothing on cpu: runs on GPUs" in nothing
    assert "runs nothing" not in slow
    for more, said in (
        ("--tune", "it is a CPU"),
        ("--tune --check", "two measurements"),
        ("--check --backend cpu", "--backend is for the table"),
    ):
        assert said in typed(f"kernels --device cpu {more}").error


def test_deploy_takes_hosts_with_spaces(tiny_dense_checkpoint):
    launch = f"deploy {tiny_dense_checkpoint} --engine vllm --devices 2 --boxes 2"
    close, apart = (answer(f"{launch} --hosts '10.0.0.1,{space}10.0.0.2'") for space in ("", " "))
    assert close == apart


def test_deploy_takes_devices_as_plan_does(tiny_checkpoint, tiny_dense_checkpoint):
    """A number alone is of the recipe's memory; a size, or a name, says how much a device has, and
    a name of which kind it is."""
    for devices, count, gib in (("2", "2", 72.0), ("2x20GiB", "2", 18.0), ("4xH100", "4", 71.1)):
        made = answer(f"deploy {tiny_dense_checkpoint} --engine vllm --devices {devices}")
        ((_, words),) = made["launches"][0]["commands"]
        assert words[words.index("--tensor-parallel-size") + 1] == count
        usable = made["memory"]["server"]["usable_bytes"]
        assert (made["device"], round(usable / 2**30, 1)) == ("cuda", gib)
    for engine, devices, said in (
        ("sglang", "2x910B1", "sglang does not load fp8-block e4m3-128x128 of fp8 on npu"),
        ("vllm-ascend", "2xH100", "no deployment recipe for vllm-ascend on cuda"),
        ("vllm-ascend", "0", "devices '0' make no sense; write 8, 8x64GiB"),
        ("vllm", "2", "192 outputs, which 2 ranks cannot share in steps of 128"),
    ):
        refused = typed(f"deploy {tiny_checkpoint} --engine {engine} --devices {devices}")
        assert said in refused.error


def test_deploy_fails_where_the_engine_does_not_load_the_checkpoint(tiny_checkpoint):
    for more in ("", "--json"):
        refused = typed(f"deploy {tiny_checkpoint} --engine vllm-ascend --boxes 1 {more}")
        assert refused.code == 1
        told = f"vllm-ascend cannot serve {tiny_checkpoint}: vllm-ascend does not load fp8-block"
        assert told in refused.error
        assert refused.err.count("error: ") == 1
        assert told in refused.json["error"]["message"] if more else refused.out == ""


@pytest.mark.parametrize(
    "line",
    [
        "quantize tiny-r1 --scheme ''",
        "quantize tiny-r1 --scheme awq-w4a16 --calibration ''",
        "quantize tiny-r1 --scheme rtn-w4a16 --memory=",
        "eval tiny-r1 --tasks tiny-math --out ''",
        "serve tiny-r1 --api-key ''",
        "inspect ''",
    ],
)
def test_what_a_shell_left_empty_is_not_taken_for_the_default(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = typed(line)
    assert (ended.code, ended.errors, ended.out) == (2, 1, "")
    assert "it is empty" in ended.error
    assert not list(tmp_path.iterdir())


def test_a_home_that_the_shell_left_is_not_a_folder_of_its_name(
    tiny_checkpoint, tmp_path, monkeypatch
):
    """Shells leave --out=~/model as it is."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert typed(f"convert {tiny_checkpoint} '~/plain' --dtype=bf16").code == 0
    assert typed(f"quantize {tiny_checkpoint} --scheme=rtn-w4a16 '--out=~/rtn'").code == 0
    assert {"plain", "rtn"} <= {path.name for path in (tmp_path / "home").iterdir()}
    assert not (tmp_path / "~").exists()


def test_bad_requests(tiny_checkpoint, tmp_path):
    """Each is one line that names the thing, and leaves nothing behind."""
    foreign = shutil.copytree(tiny_checkpoint, tmp_path / "foreign")
    with edited(foreign / "config.json") as config:
        config["model_type"] = "mamba"
    (tmp_path / "recipe.txt").write_text("{")
    (tmp_path / "yours").mkdir()
    (tmp_path / "yours/config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for source, asked, code, said in (
        (
            tiny_checkpoint,
            "--scheme awq-w4a16 --format modelopt",
            1,
            "no engine loads awq-w4a16 in",
        ),
        (tiny_checkpoint, "--scheme awq-w4a16 --calibration text.pdf", 1, "text.pdf"),
        (tiny_checkpoint, "--scheme w3", 2, "scheme 'w3' is not known"),
        (tiny_checkpoint, "--scheme rtn-w4a16 --group-size 96", 1, "give --group-size 64"),
        (tiny_checkpoint, "--recipe recipe.txt", 1, "recipe.txt is not valid: line "),
        (tiny_checkpoint, "--scheme rtn-w4a16 --out yours", 1, "quantkit did not make it"),
        (foreign, "--scheme awq-w4a16", 1, "foreign/config.json: model_type 'mamba'"),
        (tmp_path / "nowhere", "--scheme rtn-w4a16", 1, "there is no folder"),
    ):
        out = "" if "--out" in asked else f"--out {tmp_path}/out"
        asked = asked.replace("recipe.txt", f"{tmp_path}/recipe.txt")
        ended = typed(f"quantize {source} {out} {asked.replace('yours', f'{tmp_path}/yours')}")
        assert (ended.code, ended.errors) == (code, 1), ended
        assert said in ended.error
        assert sorted(tmp_path.rglob("*")) == before


def test_bench_says_that_its_folder_cannot_be_before_it_opens_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "quantkit.evaluation.speed.targets.open_target", lambda *_, **__: pytest.fail("opened")
    )
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file" in refusal(f"bench tiny-r1 --out {tmp_path}/file/results")


def test_a_source_without_a_tokenizer_is_told(tiny_checkpoint, tmp_path):
    source = shutil.copytree(tiny_checkpoint, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    made = typed(f"quantize {source} --scheme rtn-w4a16 --out {tmp_path}/out")
    assert made.code == 0
    assert f"warning: {source} has no tokenizer, and so the output has none" in made.err


@pytest.mark.parametrize(
    "case",
    [
        "vllm rtn-w4a16 awq",
        "vllm-ascend rtn-w4a16 compressed-tensors",
        "sglang fp4-w4a16 modelopt",
        "omni-infer int8-a8w8c16 compressed-tensors",
    ],
)
def test_quantize_for_an_engine(tiny_checkpoint, tmp_path, case):
    """What is written for an engine passes that engine's own checks."""
    engine, scheme, format_name = case.split()
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(f"scheme: {scheme}\nmethods: []\n")
    asked = f"--engine {engine} --recipe {recipe} --out {out}"
    report = answer(f"quantize {tiny_checkpoint} --scheme {scheme} {asked}")
    assert (report["scheme"], report["format"]) == (scheme, format_name)
    about = answer(f"inspect {out} --engine {engine}")
    assert not [one for one in about["problems"] if one["severity"] == "error"], about["problems"]
    assert about["quantized_linears"] > 20
    assert (about["format"], about["missing"], about["mtp_layers"]) == (format_name, [], 1)


def test_inspect_exits_with_1_where_the_engine_does_not_load_it():
    for engine, code in (("vllm", 0), ("omni-infer", 1)):
        done = typed(f"inspect tiny-r1 --engine {engine} --json")
        assert done.code == code
        assert code == any(one["severity"] == "error" for one in done.json["problems"])


@pytest.mark.parametrize("option", ["--prompt-lookup", "--draft-length"])
def test_more_guesses_than_a_step_can_choose_from_are_refused(option):
    """With 100,000 a server answered nobody: it chose how many to make."""
    done = typed(f"serve tiny-r1 --device cpu {option} 100000")
    assert done.code == 2
    assert f"'{option}': Input should be less than or equal to 128" in done.err
