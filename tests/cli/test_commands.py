"""The main job as a user types it: every scheme and format through the command line, and what bad
input gets."""

import json
import shutil
from pathlib import Path
from typing import Any

import make_model
import numpy as np
import pytest
import torch
from commands import command
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from small_recipe import SMALL
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.grids.base import dequantize


def answer(*arguments: str | Path) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    done = command(*map(str, arguments), "--json")
    assert done.code == 0, done.err
    return done.json


def refusal(*arguments: str | Path) -> str:
    """The one line that a refused command prints."""
    done = command(*map(str, arguments))
    assert done.code == 1, done
    assert sum("error:" in line for line in done.err.splitlines()) == 1, done.err
    return done.error


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    words = ["the", "one", "who", "asks", "is", "told", "what", "many", "have", "found"]
    path.write_text(
        "\n\n".join(
            " ".join(words[(i * 7 + j) % len(words)] for j in range(200)) for i in range(40)
        )
    )
    return path


# Independent decoding: from the formats' descriptions with NumPy, and by compressed-tensors' own
# code. W is [out, in].


def decode_awq(tensors: dict[str, Tensor], module: str) -> np.ndarray:
    order = [0, 4, 1, 5, 2, 6, 3, 7]

    def nibbles(name: str) -> np.ndarray:
        words = tensors[f"{module}.{name}"].numpy().view(np.uint32)
        planes = np.stack([(words >> (4 * place)) & 15 for place in order], axis=-1)
        return planes.reshape(words.shape[0], -1).astype(np.float64)

    scales = tensors[f"{module}.scales"].double().numpy()
    group = nibbles("qweight").shape[0] // scales.shape[0]
    return ((nibbles("qweight") - nibbles("qzeros").repeat(group, 0)) * scales.repeat(group, 0)).T


def decode_modelopt(tensors: dict[str, Tensor], module: str) -> np.ndarray:
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = tensors[f"{module}.weight"].numpy()
    values = table[np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)]
    scale = tensors[f"{module}.weight_scale"].double().numpy().repeat(16, 1)
    return values * scale * tensors[f"{module}.weight_scale_2"].double().numpy()


def decode_compressed_fp4(tensors: dict[str, Tensor], module: str) -> np.ndarray:
    as_modelopt = {
        f"{module}.weight": tensors[f"{module}.weight_packed"],
        f"{module}.weight_scale": tensors[f"{module}.weight_scale"],
        f"{module}.weight_scale_2": 1 / tensors[f"{module}.weight_global_scale"].double(),
    }
    return decode_modelopt(as_modelopt, module)


def decode_compressed_int4(tensors: dict[str, Tensor], module: str) -> np.ndarray:
    shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
    codes = unpack_from_int32(tensors[f"{module}.weight_packed"], 4, shape).double().numpy()
    scale = tensors[f"{module}.weight_scale"].double().numpy()
    rows = torch.Size((shape[0], scale.shape[1]))
    zeros = (
        unpack_from_int32(tensors[f"{module}.weight_zero_point"], 4, rows, packed_dim=0)
        .double()
        .numpy()
    )
    group = shape[1] // scale.shape[1]
    return (codes - zeros.repeat(group, 1)) * scale.repeat(group, 1)


def decode_int8(tensors: dict[str, Tensor], module: str) -> np.ndarray:
    return (
        tensors[f"{module}.weight"].double().numpy()
        * tensors[f"{module}.weight_scale"].double().numpy()
    )


CASES = [
    ("awq-w4a16", "awq", decode_awq),
    ("awq-w4a16", "compressed-tensors", decode_compressed_int4),
    ("rtn-w4a16", "awq", decode_awq),
    ("fp4-w4a16", "modelopt", decode_modelopt),
    ("fp4-w4a16", "compressed-tensors", decode_compressed_fp4),
    ("int8-a8w8c16", "compressed-tensors", decode_int8),
    ("int8-a8w8c16", "modelslim", decode_int8),
]


@pytest.fixture(scope="module")
def few_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return make_model.write_fp8(
        tmp_path_factory.mktemp("models") / "few-experts", config, make_model.random_tensors(config)
    )


@pytest.mark.parametrize(
    ("scheme", "format_name", "decode"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quantize_writes_what_it_says(
    few_experts: Path, calibration: Path, tmp_path: Path, scheme: str, format_name: str, decode: Any
) -> None:
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    recipe.write_text(
        "".join(f"{key}: {value}\n" for key, value in {"scheme": scheme, **SMALL}.items())
    )
    asked = (
        "--scheme",
        scheme,
        "--format",
        format_name,
        "--recipe",
        recipe,
        "--calibration",
        calibration,
    )
    report = answer("quantize", few_experts, *asked, "--out", out)
    assert (report["scheme"], report["format"]) == (scheme, format_name)
    about = answer("inspect", out)
    assert about["format"] == format_name
    assert about["missing"] == []
    assert about["mtp_layers"] == 1
    source = Checkpoint.open(few_experts)
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(source.tensors) == set(manifest["tensors"])
    assert {fate for entry in manifest["tensors"].values() for fate in entry["became"]} == set(
        Checkpoint.open(out).tensors
    )

    written: dict[str, Tensor] = {}
    for shard in out.glob("*.safetensors"):
        written |= load_file(shard)
    checkpoint = Checkpoint.open(out)
    assert len(checkpoint.linears) > 20
    for module in checkpoint.linears:
        ours = dequantize(checkpoint.weight(module), torch.float64).numpy()
        np.testing.assert_allclose(decode(written, module), ours, rtol=2e-7, atol=1e-12)


def test_run_answers_as_json(tiny_checkpoint: Path) -> None:
    reply = answer("run", tiny_checkpoint, "--prompt", "hello", "--max-new-tokens", "4")
    assert reply["tokens"] <= 4
    assert {"text", "prompt_tokens", "tokens_per_second"} <= reply.keys()


def test_a_base_model_is_run_raw_and_scored_by_its_protocol(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    base = _copy(tiny_checkpoint, tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    reply = answer("run", base, "--raw", "--prompt", "hello", "--max-new-tokens", "4")
    assert reply["prompt_tokens"] == 5  # a byte each, and nothing around them
    assert "has no chat template" in refusal("run", base, "--prompt", "hello")
    assert "--raw needs --prompt" in refusal("run", base, "--raw")
    said = command("eval", str(base), "--tasks", "tiny-math")
    assert "protocol lm-eval for" in said.err
    assert "no chat template" in said.err


def test_kernels_and_deploy_answer(tiny_checkpoint: Path) -> None:
    rows = answer("kernels", "--device", "cpu")["rows"]
    assert all(row["usable"] or row["reason"] for row in rows)
    table = command("kernels", "--device", "cpu").out
    assert all(f"{row['operator']} " in table for row in rows)
    assert table.count("runs on CUDA, not on cpu") == 1  # said once, for all operators
    slow = command("kernels", "--device", "cpu", "--backend", "reference").err
    assert [
        f"SLOW: linear_{kind} runs on the reference" in slow
        for kind in ("int4", "int8", "fp4", "dense")
    ] == [True] * 3 + [False]
    assert (
        "triton runs nothing on cpu: runs on GPUs"
        in command("kernels", "--device", "cpu", "--backend", "triton").err
    )
    assert "runs nothing" not in slow
    for more, said in (
        ("--tune", "it is a CPU"),
        ("--tune --check", "two measurements"),
        ("--model tiny-r1", "--model is for --tune"),
        ("--tune --tp 2", "--tp is for --model"),
        ("--check --backend cpu", "--backend is for the table"),
    ):
        assert said in command("kernels", "--device", "cpu", *more.split()).error
    launch = "deploy", tiny_checkpoint, "--engine", "vllm", "--devices", "2"
    assert answer(*launch, "--boxes", "1")["launches"]
    close, apart = (
        answer(*launch, "--hosts", f"10.0.0.1,{space}10.0.0.2", "--boxes", "2")
        for space in ("", " ")
    )
    assert close == apart


def test_deploy_takes_devices_as_plan_does(tiny_checkpoint: Path) -> None:
    """A number alone is of the recipe's memory; a size, or a name, says how much a device has, and
    a name of which kind it is."""

    def told(engine: str, devices: str) -> tuple[str, str, float]:
        made = command(
            "deploy", str(tiny_checkpoint), "--engine", engine, "--devices", devices, "--json"
        ).json
        ((_, words),) = made["launches"][0]["commands"]
        size = words[
            words.index(
                "--tensor-parallel-size" if "--tensor-parallel-size" in words else "--tp-size"
            )
            + 1
        ]
        return made["device"], size, round(made["memory"]["server"]["usable_bytes"] / 2**30, 1)

    assert told("vllm", "2") == ("cuda", "2", 72.0)
    assert told("vllm", "2x20GiB") == ("cuda", "2", 18.0)
    assert told("vllm", "4xH100") == ("cuda", "4", 71.1)
    assert [told("sglang", devices)[0] for devices in ("2", "2x910B1", "2xH100")] == [
        "npu",
        "npu",
        "cuda",
    ]
    for devices, said in (
        ("2xH100", "no deployment recipe for vllm-ascend on cuda"),
        ("0", "devices '0' make no sense; write 8, 8x64GiB"),
    ):
        assert (
            said
            in command(
                "deploy", str(tiny_checkpoint), "--engine", "vllm-ascend", "--devices", devices
            ).error
        )


def test_deploy_fails_where_the_engine_does_not_load_the_checkpoint(tiny_checkpoint: Path) -> None:
    for more in ((), ("--json",)):
        refused = command(
            "deploy", str(tiny_checkpoint), "--engine", "vllm-ascend", "--boxes", "1", *more
        )
        assert refused.code == 1
        assert (
            f"vllm-ascend cannot serve {tiny_checkpoint}: vllm-ascend does not load fp8-block"
            in refused.error
        )
        assert refused.err.count("error: ") == 1
        assert (
            "vllm serve" in refused.out or refused.json["launches"]
        )  # the commands are printed all the same


def test_usage_errors_exit_2() -> None:
    assert command("quantize").code == 2
    assert command("bench", "tiny-r1", "--input-len", "many").code == 2
    for named in (
        ("bench", "--cache", "int9"),
        ("plan", "--scheme", "nope"),
        ("plan", "--hardware", "nope"),
        ("serve", "--tool-parser", "nope"),
    ):
        assert command(named[0], "tiny-r1", *named[1:]).code == 2, named
    for formats in ((), ("--format", "awq", "--dtype", "bf16")):
        assert command("convert", "tiny-r1", "out", *formats).code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "tiny-r1", "--scheme", ""),
        ("quantize", "tiny-r1", "--scheme", "awq-w4a16", "--calibration", ""),
        ("quantize", "tiny-r1", "--scheme", "rtn-w4a16", "--memory="),
        ("eval", "tiny-r1", "--tasks", "tiny-math", "--out", ""),
        ("serve", "tiny-r1", "--api-key", ""),
        ("inspect", ""),
    ],
)
def test_what_a_shell_left_empty_is_not_taken_for_the_default(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command(*arguments)
    assert (ended.code, ended.errors, ended.out) == (2, 1, "")
    assert "it is empty" in ended.error
    assert not list(tmp_path.iterdir())


def test_a_home_that_the_shell_left_is_not_a_folder_of_its_name(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells leave --out=~/model as it is."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert command("convert", str(tiny_checkpoint), "~/plain", "--dtype=bf16").code == 0
    assert command("quantize", str(tiny_checkpoint), "--scheme=rtn-w4a16", "--out=~/rtn").code == 0
    assert {"plain", "rtn"} <= {path.name for path in (tmp_path / "home").iterdir()}
    assert not (tmp_path / "~").exists()


def test_a_recipe_that_is_no_yaml_is_told_so(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """It was said not to exist."""
    recipe = tmp_path / "recipe.txt"
    recipe.write_text("{")
    assert f"{recipe} is not valid: line " in refusal(
        "quantize", tiny_checkpoint, "--recipe", recipe
    )


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--scheme", "awq-w4a16", "--format", "modelopt"),
            "no engine loads awq-w4a16 in format modelopt",
        ),
        (("--scheme", "awq-w4a16", "--calibration", "text.pdf"), "is not a file"),
    ],
)
def test_bad_requests(
    tiny_checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refusal("quantize", tiny_checkpoint, "--out", tmp_path / "out", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_scheme_of_no_name_leaves_nothing_behind(tiny_checkpoint: Path, tmp_path: Path) -> None:
    ended = command(
        "quantize", str(tiny_checkpoint), "--out", str(tmp_path / "out"), "--scheme", "w3"
    )
    assert (ended.code, ended.errors) == (2, 1)
    assert "scheme 'w3' is not known" in ended.error
    assert not list(tmp_path.iterdir())


def test_bench_says_that_its_folder_cannot_be_before_it_opens_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        "quantkit.evaluation.speed.engine.open_target",
        lambda model, *_, **options: opened.append(model),
    )
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refusal(
        "bench", "tiny-r1", "--out", tmp_path / "file" / "results"
    )
    assert not opened


def test_bad_sources(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Each fault is one line that names the thing, and leaves nothing behind."""
    out = tmp_path / "out"

    def said(path: Path, scheme: str = "rtn-w4a16") -> str:
        line = refusal("quantize", path, "--scheme", scheme, "--out", out)
        assert not out.exists()
        return line

    shard = sorted(tiny_checkpoint.glob("*.safetensors"))[1].name
    missing = _copy(tiny_checkpoint, tmp_path / "missing")
    (missing / shard).unlink()
    assert shard in said(missing)

    truncated = _copy(tiny_checkpoint, tmp_path / "truncated")
    with (truncated / shard).open("r+b") as file:
        file.truncate((truncated / shard).stat().st_size - 100)
    assert shard in said(truncated)

    phantom = _copy(tiny_checkpoint, tmp_path / "phantom")
    index = json.loads((phantom / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.ghost.weight"] = shard
    (phantom / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.layers.0.ghost.weight" in said(phantom)

    foreign = _copy(tiny_checkpoint, tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "foreign/config.json: model_type 'mamba'" in said(foreign, "awq-w4a16")

    pickle = tmp_path / "pickle"
    pickle.mkdir()
    (pickle / "config.json").write_text(json.dumps(config))
    (pickle / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pytorch_model.bin" in said(pickle)

    assert "there is no folder" in said(tmp_path / "nowhere")
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert "quantkit did not make it" in refusal(
        "quantize", tiny_checkpoint, "--scheme", "rtn-w4a16", "--out", out
    )
    assert (out / "config.json").read_text() == "{}"


def test_a_source_without_a_tokenizer_is_told(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = _copy(tiny_checkpoint, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    made = command("quantize", str(source), "--scheme", "rtn-w4a16", "--out", str(tmp_path / "out"))
    assert made.code == 0
    assert f"warning: {source} has no tokenizer, and so the output has none" in made.err


def test_damaged_weights(tmp_path: Path) -> None:
    """A scale that is missing or of the wrong shape, NaN in a weight, a group size that does not
    divide."""
    config = make_model.tiny_config()
    tensors = make_model.random_tensors(config)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"

    def said(path: Path, *arguments: str | Path) -> str:
        line = refusal(
            "quantize", path, "--scheme", "rtn-w4a16", "--out", tmp_path / "out", *arguments
        )
        assert not (tmp_path / "out").exists()
        return line

    poisoned = {**tensors, name: torch.full_like(tensors[name], float("nan"))}
    assert name.removesuffix(".weight") in said(
        make_model.write_dense(tmp_path / "nan", config, poisoned)
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("scheme: rtn-w4a16\ngroup_size: 96\n")
    source = make_model.write_fp8(tmp_path / "fp8", config, tensors)
    for given in (("--recipe", recipe), ("--group-size", "96")):
        assert "group size 96 does not divide the" in (line := said(source, *given))
        assert "give --group-size 64" in line

    shard = next(
        path for path in source.glob("*.safetensors") if f"{name}_scale_inv" in load_file(path)
    )
    whole = load_file(shard)
    from safetensors.torch import save_file

    save_file({key: value for key, value in whole.items() if key != f"{name}_scale_inv"}, shard)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"][f"{name}_scale_inv"]
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert name in said(source)
    index["weight_map"][f"{name}_scale_inv"] = shard.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({**whole, f"{name}_scale_inv": torch.ones(7, 7)}, shard)
    assert name in said(source)


@pytest.mark.parametrize(
    ("engine", "scheme", "format_name"),
    [
        ("vllm", "rtn-w4a16", "awq"),
        ("vllm-ascend", "rtn-w4a16", "compressed-tensors"),
        ("sglang", "fp4-w4a16", "modelopt"),
        ("omni-infer", "int8-a8w8c16", "compressed-tensors"),
        ("chitu", "fp4-w4a16", "modelopt"),
    ],
)
def test_quantize_for_an_engine(
    tiny_checkpoint: Path, tmp_path: Path, engine: str, scheme: str, format_name: str
) -> None:
    """What is written for an engine passes that engine's own checks."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"scheme: {scheme}\nmethods: []\n")
    out = tmp_path / "out"
    report = answer(
        "quantize",
        tiny_checkpoint,
        "--scheme",
        scheme,
        "--engine",
        engine,
        "--recipe",
        recipe,
        "--out",
        out,
    )
    assert report["format"] == format_name
    about = answer("inspect", out, "--engine", engine)
    assert not [problem for problem in about["problems"] if problem["severity"] == "error"], about[
        "problems"
    ]
    assert about["quantized_linears"] > 20


def test_an_engine_without_the_scheme_says_why(tiny_checkpoint: Path, tmp_path: Path) -> None:
    said = refusal(
        "quantize",
        tiny_checkpoint,
        "--scheme",
        "fp4-w4a16",
        "--engine",
        "vllm-ascend",
        "--out",
        tmp_path / "out",
    )
    assert "vllm-ascend does not load fp4-w4a16" in said


def test_a_server_whose_cache_holds_no_whole_request_is_refused() -> None:
    told = refusal(
        "serve", "tiny-r1", "--device", "cpu", "--cache-tokens", "64", "--max-model-len", "128"
    )
    assert "the cache holds 64 tokens, fewer than the context of 128; raise --cache-tokens" in told


@pytest.mark.parametrize("option", ["--prompt-lookup", "--draft-length"])
def test_more_guesses_than_a_step_can_choose_from_are_refused(option: str) -> None:
    """With 100,000 a server answered nobody: it chose how many to make."""
    done = command("serve", "tiny-r1", "--device", "cpu", option, "100000")
    assert done.code == 2
    assert f"'{option}': Input should be less than or equal to 128" in done.err
