"""Quantized checkpoints as others publish them: opened, run, scored, checked for engines and
converted like our own.

The models are tiny; names, files, dtypes and descriptions are those of the publishers' tools, named
at each test.
"""

import json

import pytest
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
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
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
    done = sorted(
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, ignore_eos=True)),
        key=lambda one: one.index,
    )
    return [one.token_ids for one in done], engine.speculation.acceptance


def problems(engine, path):
    return [
        (found.severity, found.problem) for found in check_checkpoint(engine, Checkpoint.open(path))
    ]


@pytest.fixture(scope="module")
def fp4_with_fp8_mtp(tmp_path_factory):
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
    assert told.kl < 1e-6


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_an_fp8_linear_that_is_not_declared_plain_is_refused(fp4_with_fp8_mtp, tmp_path, part):
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
    with refused(told):
        Checkpoint.open(tmp_path)
