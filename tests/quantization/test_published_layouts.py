"""Quantized checkpoints as others publish them: opened, run, scored, checked for engines and
converted like our own.

The models are tiny; names, files, dtypes and descriptions are those of the publishers' tools, named
at each test.
"""

import json
import shutil

import pytest
import torch
from edited import edited
from make_model import fp8_blocks, is_fp8, random_tensors, tiny_config
from packed_model import write_packed
from refused import refused
from safetensors.torch import load_file, save_file

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.formats import modelopt
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.grids.fp8_block import Fp8BlockWeight
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import find_scheme
from quantkit.quantization.convert import convert

MTP = "model.layers.3"
PROMPTS = [list(range(10 + i, 30 + 2 * i)) for i in range(3)]


def generate(path, **options):
    """Greedy continuations, and the MTP layer's acceptance."""
    engine = Engine.load(
        path, device="cpu", dtype="float32", max_batch=4, max_model_len=128, **options
    )
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True))
    return {one.index: one.token_ids for one in done}, engine.speculation.acceptance


def problems(engine, path):
    return [
        (found.severity, found.problem) for found in check_checkpoint(engine, Checkpoint.open(path))
    ]


@pytest.fixture(scope="module")
def fp4_with_fp8_mtp(tmp_path_factory):
    """ModelOpt's script for DeepSeek (examples/deepseek): MLP and experts in NVFP4 with an
    input_scale, attention plain, the MTP layer as in the FP8 source."""
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
    for name in [name for name in stored if name.endswith("weight_scale_2")]:
        stored[name.replace("weight_scale_2", "input_scale")] = torch.tensor(0.01)
        # A multiplier that no reciprocal gives back.
        stored[name] = torch.nextafter(stored[name] * 1.1, torch.tensor(1.0))
    for name in [name for name in stored if name.startswith(MTP) and is_fp8(name)]:
        stored[name], stored[f"{name}_scale_inv"] = fp8_blocks(tensors[name])
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with edited(path / "hf_quant_config.json") as said:
        said["quantization"] |= {
            "quant_algo": "NVFP4",
            "exclude_modules": ["lm_head", "model.layers.*.self_attn*", f"{MTP}*"],
        }
    with edited(path / "config.json") as described:
        del described["quantization_config"]  # the script leaves the description in that file alone
    return path


def test_an_fp8_mtp_layer_beside_fp4_is_read(fp4_with_fp8_mtp):
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


def test_an_fp8_mtp_layer_beside_fp4_runs_and_converts(fp4_with_fp8_mtp, tmp_path):
    """Drafting, so that the MTP layer is run too, gives the tokens and guesses of the same values
    stored plain."""
    convert(fp4_with_fp8_mtp, tmp_path / "plain", dtype="fp32")
    report = convert(fp4_with_fp8_mtp, tmp_path / "ct", format="compressed-tensors")
    assert report.changes["fp8-block to bfloat16: experts"].weights == 24
    errors = {name: change.max_relative_error for name, change in report.changes.items()}
    assert max(error for name, error in errors.items() if "fp8" not in name) <= 2**-23
    manifest = json.loads((tmp_path / "ct/manifest.json").read_text())["tensors"]
    assert "model.layers.1.mlp.experts.0.up_proj.input_scale" in manifest
    tokens, acceptance = generate(fp4_with_fp8_mtp, draft_length=1)
    assert (tokens, acceptance) == generate(tmp_path / "plain", draft_length=1)
    assert tokens == generate(tmp_path / "ct")[0]
    assert problems("vllm", tmp_path / "ct") == []


def test_an_fp8_linear_that_is_not_declared_plain_is_refused(fp4_with_fp8_mtp, tmp_path):
    """The list of unquantized modules is what tells an engine."""
    path = shutil.copytree(fp4_with_fp8_mtp, tmp_path / "model")
    with edited(path / "hf_quant_config.json") as said:
        said["quantization"]["exclude_modules"] = ["lm_head", "model.layers.*.self_attn*"]
    with refused(r"is float8_e4m3fn, which modelopt \(NVFP4\) does not have; formats are mixed"):
        Checkpoint.open(path)
