"""Quantized checkpoints as others publish them: opened, run, scored, checked for engines and
converted like our own.

The models are tiny; names, files, dtypes and descriptions are those of the publishers' tools, named
at each test.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_model import fp8_blocks, is_fp8, random_tensors, tiny_config, write_dense
from packed_model import write_packed
from safetensors.torch import load_file, save_file

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats import compressed_int8, modelopt
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.errors import QuantkitError
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
from quantkit.executor.engine import Engine
from quantkit.executor.sampling.params import SamplingParams
from quantkit.grids.base import dequantize
from quantkit.grids.fp8_block import Fp8BlockWeight
from quantkit.grids.int_groups import IntWeight
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import find_scheme
from quantkit.models import find_architecture
from quantkit.models.pangu_ultra_moe import FIRST_RELEASE_NAMES
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert

MTP = "model.layers.3"
PROMPTS = [list(range(10 + i, 30 + 2 * i)) for i in range(3)]


def generate(path: Path, **options: int) -> tuple[list[list[int]], Any]:
    """Greedy continuations, and the MTP layer's acceptance."""
    engine = Engine.load(
        path, device="cpu", dtype="float32", max_batch=4, max_model_len=128, **options
    )
    done = sorted(
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True)),
        key=lambda one: one.index,
    )
    return [one.token_ids for one in done], engine.speculation.acceptance


def problems(engine: str, path: Path) -> list[tuple[str, str]]:
    return [
        (found.severity, found.problem) for found in check_checkpoint(engine, Checkpoint.open(path))
    ]


@pytest.fixture(scope="module")
def fp4_with_fp8_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ModelOpt's script for DeepSeek (examples/deepseek): MLP and experts in NVFP4, attention
    plain, the MTP layer as in the FP8 source."""
    config = tiny_config()
    tensors = random_tensors(config)
    path = tmp_path_factory.mktemp("fp4") / "model"
    write_packed(
        path,
        config,
        tensors,
        modelopt.FORMAT,
        Nvfp4Grid(),
        lambda row: row.role == "linear" and not row.mtp and ".mlp." in row.name,
    )
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if name.startswith(MTP) and is_fp8(name)]:
        stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensors[name])
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((path / "hf_quant_config.json").read_text())
    said["quantization"] |= {
        "quant_algo": "NVFP4",
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*", f"{MTP}*"],
    }
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    described = json.loads((path / "config.json").read_text())
    del described["quantization_config"]  # the script leaves the description in that file alone
    (path / "config.json").write_text(json.dumps(described))
    return path


def test_an_fp8_mtp_layer_beside_fp4_is_read(fp4_with_fp8_mtp: Path) -> None:
    checkpoint = Checkpoint.open(fp4_with_fp8_mtp)
    weight = checkpoint.weight(f"{MTP}.mlp.experts.0.up_proj")
    assert isinstance(weight, Fp8BlockWeight)
    assert checkpoint.scheme is find_scheme("fp4-w4a16")
    about = describe(checkpoint)
    assert (about.format, about.left_as, about.missing, about.unknown) == (
        "modelopt",
        {"fp8-block": 32},
        [],
        [],
    )
    assert problems("vllm", fp4_with_fp8_mtp) == [
        ("warning", f"vllm reads {MTP}.self_attn.q_a_proj as unquantized, and it is fp8-block")
    ]


def test_an_fp8_mtp_layer_beside_fp4_runs_and_converts(
    fp4_with_fp8_mtp: Path, tmp_path: Path
) -> None:
    """Drafting, so that the MTP layer is run too, gives the tokens and guesses of the same values
    stored plain."""
    convert(fp4_with_fp8_mtp, tmp_path / "plain", dtype="fp32")
    report = convert(fp4_with_fp8_mtp, tmp_path / "ct", format="compressed-tensors")
    assert report.changes["fp8-block to bfloat16: experts"].weights == 24
    tokens, acceptance = generate(fp4_with_fp8_mtp, draft_length=1)
    assert (tokens, acceptance) == generate(tmp_path / "plain", draft_length=1)
    assert tokens == generate(tmp_path / "ct")[0]
    assert problems("vllm", tmp_path / "ct") == []
    (tmp_path / "text.jsonl").write_text(
        json.dumps({"text": "12 sheep and 30 goats are 42 animals"}) + "\n"
    )
    told = measure(
        str(fp4_with_fp8_mtp),
        tmp_path / "text.jsonl",
        PerplexityOptions(baseline=str(tmp_path / "plain")),
    )
    assert told.kl is not None
    assert told.kl < 1e-6


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_an_fp8_linear_that_is_not_declared_plain_is_refused(
    fp4_with_fp8_mtp: Path, tmp_path: Path, part: str
) -> None:
    """The list of unquantized modules is what tells an engine; and half an FP8 linear is a fault
    wherever it stands."""
    stored = load_file(fp4_with_fp8_mtp / "model.safetensors")
    said = json.loads((fp4_with_fp8_mtp / "hf_quant_config.json").read_text())
    if part == "weight":
        said["quantization"]["exclude_modules"] = ["lm_head", "model.layers.*.self_attn*"]
        told = r"is float8_e4m3fn, which modelopt \(NVFP4\) does not have; formats are mixed"
    else:
        del stored[f"{MTP}.mlp.experts.0.up_proj.weight_scale_inv"]
        told = "up_proj.weight_scale_inv is missing"
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    (tmp_path / "config.json").write_bytes((fp4_with_fp8_mtp / "config.json").read_bytes())
    with pytest.raises(QuantkitError, match=told):
        Checkpoint.open(tmp_path)


def omni_block(layers: int) -> dict[str, Any]:
    """`quantization_config` as omni-infer's tools/quant/quant_deepseek_kimi2.py writes it,
    --pangu-mode included."""
    shared: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "group_size": None,
        "num_bits": 8,
        "observer_kwargs": {},
    }
    shared |= {"symmetric": True, "type": "int"}
    group = {
        "input_activations": {
            **shared,
            "dynamic": True,
            "observer": "memoryless",
            "strategy": "token",
        },
        "output_activations": None,
        "targets": ["Linear"],
        "weights": {**shared, "dynamic": False, "observer": "minmax", "strategy": "channel"},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "int-quantized",
        "global_compression_ratio": 1.5943962512751309,
        "ignore": [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(layers)],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def first_release(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the names that openPangu's V1.0 release and omni-infer's model use."""
    old = {new: old for old, new in FIRST_RELEASE_NAMES.items()}
    return {old.get(key, key): value for key, value in config.items()}


def test_openpangu_int8_is_written_and_read(tmp_path: Path) -> None:
    """A8W8C16 of openPangu: what quantkit writes for omni-infer, and the same tensors as
    omni-infer's own tool would describe them.

    No copy of the V1.1-Int8 release's config.json could be had; this is the layout of the vendor's
    engine and tool.
    """
    config = {
        key: value
        for key, value in tiny_config().items()
        if key not in ("rope_scaling", "n_group", "topk_group", "topk_method")
    }
    config = first_release(
        {**config, "model_type": "pangu_ultra_moe", "architectures": ["PanguUltraMoEForCausalLM"]}
    )
    architecture = find_architecture(config)
    rows = architecture.parameters(architecture.Config.from_dict(config))
    generator = torch.Generator().manual_seed(2)
    tensors = {
        row.name: (torch.randn(row.shape, generator=generator) / row.shape[-1] ** 0.5).bfloat16()
        for row in rows
    }
    tensors |= {row.name: 1 + 0.1 * tensors[row.name] for row in rows if row.role == "norm"}
    for row in rows:
        if (
            row.other_name is not None
        ):  # the router's bias: releases after V1.0 have one, under this name
            tensors[row.other_name] = tensors.pop(row.name).float()
    source = write_dense(tmp_path / "source", config, tensors)
    quantize(
        source,
        tmp_path / "ours",
        find_scheme("int8-a8w8c16"),
        "auto",
        Recipe(scheme="int8-a8w8c16", methods=()),
        engine="omni-infer",
        device="cpu",
    )
    assert problems("omni-infer", tmp_path / "ours") == []
    assert ("error", "vllm reads first_k_dense_replace, n_routed_experts") in [
        (severity, told.split(", kv_lora")[0])
        for severity, told in problems("vllm", tmp_path / "ours")
    ], "it knows the later release's names only"
    ours = Checkpoint.open(tmp_path / "ours")
    assert set(ours.linears) == {row.module for row in rows if row.role == "linear"}, (
        "MTP layer included"
    )
    for module in ours.linears:
        weight = ours.weight(module)
        assert isinstance(weight, IntWeight)
        assert int(weight.codes.min()) >= -127
        assert ours.tensors[f"{module}.weight_scale"].dtype == torch.float32
        assert ours.tensors[f"{module}.weight_scale"].shape == (weight.shape[0], 1)
    kv_b = {f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(4)}
    assert all(ours.tensors[f"{module}.weight"].dtype == torch.bfloat16 for module in kv_b)

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    stored = {name: ours.read(name) for name in ours.tensors}
    file = "quant_model_weight_w8a8_dynamic-00001-of-000001.safetensors"
    save_file(stored, theirs / file, metadata={"format": "pt"})
    (theirs / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(stored, file)})
    )
    (theirs / "config.json").write_text(
        json.dumps({**config, "quantization_config": omni_block(4)})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (theirs / name).write_bytes((source / name).read_bytes())
    assert Checkpoint.open(theirs).linears.keys() == ours.linears.keys()
    assert problems("omni-infer", theirs) == []
    tokens, _ = generate(theirs, draft_length=1)
    assert tokens == generate(tmp_path / "ours")[0]
    assert convert(theirs, tmp_path / "modelslim", format="modelslim").exact
    back = Checkpoint.open(tmp_path / "modelslim")
    assert all(
        torch.equal(dequantize(back.weight(module)), dequantize(ours.weight(module)))
        for module in ours.linears
    )
    assert compressed_int8.FORMAT is ours.format
