"""The main job as a user types it: every scheme and format through the command line, and what bad
input gets."""

import json
import os
import re
import shutil

import make_model
import pytest
import tiny_models
import torch
from commands import typed
from edited import edited
from safetensors.torch import load_file, save_file
from small_recipe import SMALL

from quantkit.checkpoint.reader import Checkpoint


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
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    words = ["the", "one", "who", "asks", "is", "told", "what", "many", "have", "found"]
    path.write_text(
        "\n\n".join(
            " ".join(words[(i * 7 + j) % len(words)] for j in range(200)) for i in range(40)
        )
    )
    return path


CASES = """
awq-w4a16 awq
awq-w4a16 compressed-tensors
rtn-w4a16 awq
fp4-w4a16 modelopt
fp4-w4a16 compressed-tensors
int8-a8w8c16 compressed-tensors
int8-a8w8c16 modelslim
"""


@pytest.fixture(scope="module")
def few_experts(tmp_path_factory):
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return make_model.write_fp8(
        tmp_path_factory.mktemp("models") / "few-experts", config, make_model.random_tensors(config)
    )


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_quantize_writes_what_it_says(few_experts, calibration, tmp_path, case):
    """That the bytes are those of the format is held by tests/checkpoint/formats."""
    (scheme, format_name), out, recipe = case.split(), tmp_path / "out", tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"scheme": scheme, **SMALL}))
    asked = f"--format {format_name} --recipe {recipe} --calibration {calibration} --out {out}"
    report = answer(f"quantize {few_experts} --scheme {scheme} {asked}")
    assert (report["scheme"], report["format"]) == (scheme, format_name)
    about = answer(f"inspect {out}")
    assert (about["format"], about["missing"], about["mtp_layers"]) == (format_name, [], 1)
    assert len(Checkpoint.open(out).linears) > 20


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


def test_run_answers_as_json(tiny_checkpoint):
    reply = answer(f"run {tiny_checkpoint} --prompt hello --max-new-tokens 4")
    assert reply["tokens"] <= 4
    assert {"text", "prompt_tokens", "tokens_per_second"} <= reply.keys()


def test_a_base_model_is_run_raw_and_scored_by_its_protocol(tiny_checkpoint, tmp_path):
    base = _copy(tiny_checkpoint, tmp_path / "base")
    _change(base / "tokenizer_config.json", lambda settings: settings.pop("chat_template"))
    reply = answer(f"run {base} --raw --prompt hello --max-new-tokens 4")
    assert reply["prompt_tokens"] == 5  # a byte each, and nothing around them
    assert "has no chat template" in refusal(f"run {base} --prompt hello")
    assert "--raw needs --prompt" in refusal(f"run {base} --raw")
    said = typed(f"eval {base} --tasks tiny-math").err
    assert "protocol lm-eval for" in said
    assert "no chat template" in said


def test_kernels_and_deploy_answer(tiny_dense_checkpoint):
    rows = answer("kernels --device cpu")["rows"]
    assert all(row["usable"] or row["reason"] for row in rows)
    table = typed("kernels --device cpu").out
    assert all(f"{row['operator']} " in table for row in rows)
    assert table.count("runs on CUDA, not on cpu") == 1  # said once, for all operators
    slow = typed("kernels --device cpu --backend reference").err
    assert [
        f"SLOW: linear_{kind} runs on the reference" in slow
        for kind in ("int4", "int8", "fp4", "dense")
    ] == [True] * 3 + [False]
    nothing = typed("kernels --device cpu --backend triton").err
    assert "triton runs nothing on cpu: runs on GPUs" in nothing
    assert "runs nothing" not in slow
    for more, said in (
        ("--tune", "it is a CPU"),
        ("--tune --check", "two measurements"),
        ("--model tiny-r1", "--model is for --tune"),
        ("--tune --tp 2", "--tp is for --model"),
        ("--check --backend cpu", "--backend is for the table"),
    ):
        assert said in typed(f"kernels --device cpu {more}").error
    launch = f"deploy {tiny_dense_checkpoint} --engine vllm --devices 2 --boxes"
    assert answer(f"{launch} 1")["launches"]
    close, apart = (answer(f"{launch} 2 --hosts '10.0.0.1,{space}10.0.0.2'") for space in ("", " "))
    assert close == apart


def test_deploy_takes_devices_as_plan_does(tiny_checkpoint, tiny_dense_checkpoint):
    """A number alone is of the recipe's memory; a size, or a name, says how much a device has, and
    a name of which kind it is."""

    def told(engine, devices):
        made = answer(f"deploy {tiny_dense_checkpoint} --engine {engine} --devices {devices}")
        ((_, words),) = made["launches"][0]["commands"]
        option = "--tensor-parallel-size" if engine == "vllm" else "--tp-size"
        usable = made["memory"]["server"]["usable_bytes"]
        return made["device"], words[words.index(option) + 1], round(usable / 2**30, 1)

    assert told("vllm", "2") == ("cuda", "2", 72.0)
    assert told("vllm", "2x20GiB") == ("cuda", "2", 18.0)
    assert told("vllm", "4xH100") == ("cuda", "4", 71.1)
    for devices, device in (("2", "cuda"), ("2xH100", "cuda")):
        assert told("sglang", devices)[0] == device
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


def test_usage_errors_exit_2():
    for line in (
        "quantize",
        "bench tiny-r1 --input-len many",
        "bench tiny-r1 --cache int9",
        "plan tiny-r1 --scheme nope",
        "plan tiny-r1 --hardware nope",
        "serve tiny-r1 --tool-parser nope",
        "convert tiny-r1 out",
        "convert tiny-r1 out --format awq --dtype bf16",
    ):
        assert typed(line).code == 2, line


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


def test_a_recipe_that_is_no_yaml_is_told_so(tiny_checkpoint, tmp_path):
    """It was said not to exist."""
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("{")
    said = refusal(f"quantize {tiny_checkpoint} --recipe {recipe}")
    assert f"{recipe} is not valid: line " in said


def _copy(source, target):
    shutil.copytree(source, target)
    return target


def _change(file, change):
    with edited(file) as content:
        change(content)


def test_bad_requests(tiny_checkpoint, tmp_path):
    for asked, code, said in (
        ("awq-w4a16 --format modelopt", 1, "no engine loads awq-w4a16 in format modelopt"),
        ("awq-w4a16 --calibration text.pdf", 1, "text.pdf"),
        ("fp4-w4a16 --engine vllm-ascend", 1, "vllm-ascend does not load fp4-w4a16"),
        ("w3", 2, "scheme 'w3' is not known"),
    ):
        ended = typed(f"quantize {tiny_checkpoint} --out {tmp_path}/out --scheme {asked}")
        assert (ended.code, ended.errors) == (code, 1)
        assert said in ended.error
        assert not list(tmp_path.iterdir())


def test_bench_says_that_its_folder_cannot_be_before_it_opens_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "quantkit.evaluation.speed.engine.open_target", lambda *_, **__: pytest.fail("opened")
    )
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file" in refusal(f"bench tiny-r1 --out {tmp_path}/file/results")


def test_bad_sources(tiny_checkpoint, tmp_path):
    """Each fault is one line that names the thing, and leaves nothing behind."""
    out, index = tmp_path / "out", "model.safetensors.index.json"

    def said(path, scheme="rtn-w4a16"):
        line = refusal(f"quantize {path} --scheme {scheme} --out {out}")
        assert not out.exists()
        return line

    shard = sorted(tiny_checkpoint.glob("*.safetensors"))[1].name
    missing = _copy(tiny_checkpoint, tmp_path / "missing")
    (missing / shard).unlink()
    assert shard in said(missing)

    truncated = _copy(tiny_checkpoint, tmp_path / "truncated")
    os.truncate(truncated / shard, (truncated / shard).stat().st_size - 100)
    assert shard in said(truncated)

    phantom, ghost = _copy(tiny_checkpoint, tmp_path / "phantom"), "model.layers.0.ghost.weight"
    _change(phantom / index, lambda found: found["weight_map"].update({ghost: shard}))
    assert ghost in said(phantom)

    foreign = _copy(tiny_checkpoint, tmp_path / "foreign")
    _change(foreign / "config.json", lambda config: config.update(model_type="mamba"))
    assert "foreign/config.json: model_type 'mamba'" in said(foreign, "awq-w4a16")

    pickle = tmp_path / "pickle"
    pickle.mkdir()
    shutil.copy(tiny_checkpoint / "config.json", pickle)
    (pickle / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin" in said(pickle)

    assert "there is no folder" in said(tmp_path / "nowhere")
    out.mkdir()
    (out / "config.json").write_text("{}")
    refused = refusal(f"quantize {tiny_checkpoint} --scheme rtn-w4a16 --out {out}")
    assert "quantkit did not make it" in refused
    assert (out / "config.json").read_text() == "{}"


def test_a_source_without_a_tokenizer_is_told(tiny_checkpoint, tmp_path):
    source = _copy(tiny_checkpoint, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    made = typed(f"quantize {source} --scheme rtn-w4a16 --out {tmp_path}/out")
    assert made.code == 0
    assert f"warning: {source} has no tokenizer, and so the output has none" in made.err


def test_damaged_weights(tmp_path):
    """A scale that is missing or of the wrong shape, NaN in a weight, a group size that does not
    divide."""
    config = make_model.tiny_config()
    tensors = make_model.random_tensors(config)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    scale = f"{name}_scale_inv"

    def said(path, more=""):
        line = refusal(f"quantize {path} --scheme rtn-w4a16 --out {tmp_path}/out {more}")
        assert not (tmp_path / "out").exists()
        return line

    poisoned = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    nan = make_model.write_dense(tmp_path / "nan", config, poisoned)
    assert name.removesuffix(".weight") in said(nan)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("scheme: rtn-w4a16\ngroup_size: 96\n")
    source = make_model.write_fp8(tmp_path / "fp8", config, tensors)
    for given in (f"--recipe {recipe}", "--group-size 96"):
        assert "group size 96 does not divide the" in (line := said(source, given))
        assert "give --group-size 64" in line

    shard = next(path for path in source.glob("*.safetensors") if scale in load_file(path))
    whole, index = load_file(shard), source / "model.safetensors.index.json"
    save_file({key: value for key, value in whole.items() if key != scale}, shard)
    _change(index, lambda found: found["weight_map"].pop(scale))
    assert name in said(source)
    _change(index, lambda found: found["weight_map"].update({scale: shard.name}))
    save_file({**whole, scale: torch.ones(7, 7)}, shard)
    assert name in said(source)


@pytest.mark.parametrize(
    "case",
    [
        "vllm rtn-w4a16 awq",
        "vllm-ascend rtn-w4a16 compressed-tensors",
        "sglang fp4-w4a16 modelopt",
        "omni-infer int8-a8w8c16 compressed-tensors",
        "chitu fp4-w4a16 modelopt",
    ],
)
def test_quantize_for_an_engine(tiny_checkpoint, tmp_path, case):
    """What is written for an engine passes that engine's own checks."""
    engine, scheme, format_name = case.split()
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(f"scheme: {scheme}\nmethods: []\n")
    asked = f"--engine {engine} --recipe {recipe} --out {out}"
    report = answer(f"quantize {tiny_checkpoint} --scheme {scheme} {asked}")
    assert report["format"] == format_name
    about = answer(f"inspect {out} --engine {engine}")
    assert not [one for one in about["problems"] if one["severity"] == "error"], about["problems"]
    assert about["quantized_linears"] > 20


def test_a_server_whose_cache_holds_no_whole_request_is_refused():
    told = refusal("serve tiny-r1 --device cpu --cache-tokens 64 --max-model-len 128")
    assert "the cache holds 64 tokens, fewer than the context of 128; raise --cache-tokens" in told


@pytest.mark.parametrize("option", ["--prompt-lookup", "--draft-length"])
def test_more_guesses_than_a_step_can_choose_from_are_refused(option):
    """With 100,000 a server answered nobody: it chose how many to make."""
    done = typed(f"serve tiny-r1 --device cpu {option} 100000")
    assert done.code == 2
    assert f"'{option}': Input should be less than or equal to 128" in done.err
