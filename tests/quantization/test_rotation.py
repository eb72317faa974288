"""Rotations folded into weights: the rotated model computes what the source does, on every table
that allows it."""

import json

import make_model
import pytest
import tiny_models
import torch
from plain_weights import PlainWeights
from quantized import quantized
from quantkit_kernels.backends import use_backend
from refused import refused
from small_recipe import SMALL
from tied_model import TIED, tied_tensors

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.engines.check import check_checkpoint
from quantkit.engines.memory import ParallelSizes, check_split
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.weights.load import load_model
from quantkit.executor.weights.weights import ExecutorWeights
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.convert import convert
from quantkit.quantization.rotation import Rotation, open_rotated

NORM, VALUES, LATENTS, WRITES = (
    "not read by linears alone",
    "no layer passes its values",
    "no latent attention",
    "writes to the residual stream",
)
WITH_LATENTS = [
    *("kimi_k2", "kimi_k25", "kimi_linear", "kimi_k3", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v41", "glm5_next", "glm_moe_dsa", "hy_v4", "pangu_ultra_moe"),
]
DENSE = ["llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "PanguEmbedded"]
REFUSED = {
    "residual": {
        "deepseek_v41": WRITES,
        "qwen4_exp": WRITES,
        "qwen4_exp_text": WRITES,
        "openpangu_v2": NORM,  # norms after sublayers
        "pangu_ultra_moe": NORM,
    },
    "values": dict.fromkeys(
        [
            *("llama", "PanguEmbedded", "qwen2", "qwen2_moe", "glm4_moe", "solar_open", "gpt_oss"),
            *("qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v4", "openpangu_v2", "hy_v4"),
            "deepseek_v41",
            "kimi_k3",
            *("qwen4_exp", "qwen4_exp_text", "qwen3_5_text", "qwen3_5_moe_text"),
        ],
        VALUES,  # biases, gates, or a convolution of each channel
    ),
    "latents": dict.fromkeys({*tiny_models.CONFIGS}.difference(WITH_LATENTS), LATENTS)
    | {"openpangu_v2": "after a convolution of each channel"},
}


@torch.inference_mode()
def outputs(checkpoint):
    """Logits [T, vocab] in float32, and those of an MTP layer's drafts."""
    found = read_model(checkpoint)
    config, architecture = found.config, found.architecture
    tensors = {row.name: checkpoint.read(row.name) for row in found.rows}
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    names, ids = getattr(config, "mixture", None), torch.arange(7, 47)
    weights = PlainWeights(tensors, *([] if names is None else [names.linears]))
    with use_backend("reference"):
        weights.input_rotation = checkpoint.input_rotation
        model, mtp = architecture.Model(config, weights), None
        if config.num_nextn_predict_layers and architecture.MtpLayer:
            mtp = architecture.MtpLayer(config, weights, 0)
            mtp.follow(model)
        hidden = model(ids, CausalContext([len(ids)]))
        found = [(model, hidden)]
        if mtp is not None:
            found.append((mtp, mtp(ids.roll(-1), hidden, CausalContext([len(ids)]))))
        return [one.logits(states) for one, states in found]


def check_rotated(path, name, kinds, close):
    source = Checkpoint.open(path)
    expected, rotated = outputs(source), open_rotated(source, kinds, 3)
    norms = [row.name for row in read_model(source).rows if row.role == "norm" and not row.block]
    if "residual" in kinds:
        assert all(len(rotated.read(norm).unique()) == 1 for norm in norms)
    head = [row for row in read_model(rotated).rows if row.role in ("head", "embedding")][-1]
    part, first = rotated.weight_slice(head.module, "N", 64, 128)
    torch.testing.assert_close(part[64 - first :][:64], rotated.read(head.name)[64:128].float())
    for ours, theirs, bound in zip(outputs(rotated), expected, close):
        assert (ours - theirs).norm() < bound * theirs.norm()


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_a_rotated_model_is_the_source(tmp_path, name):
    """Of an MTP layer that reads hidden states after the final norm, or shares the head, drafts are
    near those of the source, and equal where that norm's gain is one number."""
    tiny_models.write(tmp_path / "source", name)
    kinds = []
    for kind, names in REFUSED.items():
        if name in names:
            with refused(names[name]):
                open_rotated(Checkpoint.open(tmp_path / "source"), [kind], 3)
        else:
            kinds.append(kind)
    if kinds:
        check_rotated(tmp_path / "source", name, kinds, (1e-4, 0.2))


def test_drafts_are_the_sources_under_a_final_norm_of_one_gain(tmp_path):
    config = tiny_models.CONFIGS["glm4_moe"]
    tensors = tiny_models.random_tensors(config)
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 1.5)
    make_model.write_dense(tmp_path / "source", config, tensors)
    check_rotated(tmp_path / "source", "glm4_moe", ["residual"], (1e-4, 1e-4))


@pytest.mark.parametrize("width", [9, 64, 576])
def test_a_rotation_is_orthogonal_and_spreads_a_channel_over_all(width):
    matrix = Rotation(width, 5)(torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64))
    assert (matrix != 0).all()


def test_the_output_is_a_plain_checkpoint_whose_head_is_its_own(tmp_path):
    """Of a model whose head is its embedding, in int8: what is rounded is within 0.05, and what is
    rotated is in the manifest."""
    source = make_model.write_dense(tmp_path / "source", TIED, tied_tensors())
    ids = torch.arange(8, 40)
    recipe = Recipe(scheme="w8a16", methods=(), rotation=("residual", "values"))
    quantized(source, tmp_path / "out", recipe)
    assert Checkpoint.open(tmp_path / "out").config["tie_word_embeddings"] is False
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    entry = manifest["tensors"]["model.embed_tokens.weight"]
    assert entry["became"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert entry["reason"] == "rotated"
    found = []
    for path in (source, tmp_path / "out"):
        model = load_model(path, device="cpu", dtype="float32", backend="reference").model
        with torch.inference_mode():
            found.append(model.logits(model(ids, CausalContext([len(ids)]))))
    theirs, ours = found
    assert 0 < (ours - theirs).norm() < 0.05 * theirs.norm()
    assert quantized(source, tmp_path / "out", recipe).done_already
    with refused("pruned, or whose grids are chosen, is not rotated"):
        quantized(source, tmp_path / "no", recipe.with_given(prune=0.5))


def test_a_check_takes_gains_that_were_folded_for_no_fault(tmp_path):
    """Gains of one layer are small, and an MTP layer's head has a norm of its own."""
    config = make_model.tiny_config(num_hidden_layers=3)
    tensors = make_model.random_tensors(config)
    for name, gain in (("0.input_layernorm", 0.02), ("3.shared_head.norm", 2.0)):
        tensors[f"model.layers.{name}.weight"].fill_(gain)
    for copy, own in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"model.layers.3.{copy}.weight"] = tensors[f"{own}.weight"].clone()
    make_model.write_dense(tmp_path / "source", config, tensors)
    recipe = Recipe(scheme="w8a16", methods=(), rotation=("residual",))
    quantized(tmp_path / "source", tmp_path / "out", recipe)
    found = diagnose(str(tmp_path / "out"), depth="tensors").findings
    assert not found.has("scales-absurd", "copies-differ"), found.to_json()


@pytest.mark.parametrize("kinds", [("residual", "values"), ("residual", "down"), ("down",)])
def test_a_check_compares_with_the_source_rotated_alike(tmp_path, kinds):
    """Of a model whose head is its embedding; what is not the source's is still found."""
    source = make_model.write_dense(tmp_path / "source", TIED, tied_tensors())
    other = tied_tensors()
    spoiled = "model.layers.1.mlp.up_proj"
    other[f"{spoiled}.weight"] = torch.randn_like(other[f"{spoiled}.weight"].float()).bfloat16()
    make_model.write_dense(tmp_path / "other", TIED, other)
    recipe = Recipe(scheme="int8-a8w8c16", methods=(), rotation=kinds, seed=5)
    quantized(source, tmp_path / "out", recipe)

    def errors(against, depth="tensors"):
        found = diagnose(str(tmp_path / "out"), source=str(against), depth=depth)
        return [(one.name, one.where) for one in found.findings.found if one.severity == "error"]

    assert errors(source, "behaviour") == []
    assert errors(tmp_path / "other") == [("error-large", spoiled)]
    report = json.loads((tmp_path / "out/report.json").read_text())
    report["recipe"]["seed"] = 6
    (tmp_path / "out/report.json").write_text(json.dumps(report))
    assert [name for name, _ in errors(source)] == (
        ["unlike-source"] if "residual" in kinds else []
    )
    report["recipe"]["rotation"] = ["sideways"]
    (tmp_path / "out/report.json").write_text(json.dumps(report))
    with refused("report.json"):
        errors(source)


def test_inputs_of_down_are_rotated_as_the_model_runs(tmp_path):
    """In int8: config.json says so as vLLM reads it, and what would leave it out is refused."""
    source = make_model.write_dense(tmp_path / "source", TIED, tied_tensors())
    out, ids = tmp_path / "out", torch.arange(8, 40)
    recipe = Recipe(scheme="int8-a8w8c16", methods=(), rotation=("down",))
    asked = PlanOptions(recipe=recipe, engine="vllm", layout="one-box", devices="2x80GiB")
    assert "rotated" in plan(source, recipe.scheme, asked).layout.problems["server"]
    quantized(source, out, recipe)
    checkpoint = Checkpoint.open(out)
    down = "model.layers.1.mlp.down_proj"
    assert checkpoint.input_rotation(down) == 128
    assert checkpoint.input_rotation("model.layers.1.mlp.up_proj") == 0
    said = checkpoint.config["quantization_config"]["transform_config"]["config_groups"]
    assert [(one["type"], one["head_dim"]) for one in said.values()] == [("hadamard", 128)]
    found = []
    for path in (source, out):
        model = load_model(path, device="cpu", dtype="float32", backend="reference").model
        with torch.inference_mode():
            found.append(model.logits(model(ids, CausalContext([len(ids)]))))
    theirs, ours = found
    assert 0 < (ours - theirs).norm() < 0.15 * theirs.norm()
    with refused("rotated as the model runs"):
        convert(out, tmp_path / "dense", dtype="bf16")
    rows = (model := read_model(checkpoint)).rows
    assert any("does not rotate" in one.problem for one in check_checkpoint("sglang", checkpoint))
    assert not check_split(checkpoint, model, ParallelSizes(1))
    assert "rotated" in check_split(checkpoint, model, ParallelSizes(2))[0].problem
    with refused("blocks of 128, and a rank has 192"):
        where = {"device": torch.device("cpu"), "dtype": torch.float32}
        ExecutorWeights(checkpoint, rows, **where, parallel=Parallel(0, 2)).input_rotation(down)
    with refused("are not rotated for w8a16"):
        quantized(source, tmp_path / "no", recipe.with_given(scheme="w8a16"))
    with refused("sglang does not rotate"):
        quantized(source, tmp_path / "no", recipe, engine="sglang")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["transform_config"]["config_groups"]["R4"]["type"] = "random"
    (out / "config.json").write_text(json.dumps(config))
    with refused("R4 is random"):
        Checkpoint.open(out)


@pytest.mark.parametrize(("scheme", "close"), [("int8-a8w8c16", 0.15), ("int4-w4a8-groups", 0.5)])
def test_inputs_inside_routed_experts_are_rotated(source, text, tmp_path, scheme, close):
    """Calibrated; the executor computes nearly what the source does, and no engine is said to."""
    out, ids = tmp_path / "out", torch.arange(8, 40)
    recipe = Recipe(scheme=scheme, calibration=str(text), rotation=("down",), **SMALL)
    quantized(source, out, recipe)
    checkpoint, down = Checkpoint.open(out), "model.layers.1.mlp.experts.3.down_proj"
    assert checkpoint.input_rotation(down) == 128
    found = []
    for path, backend in ((source, "reference"), (out, "reference"), (out, "auto")):
        model = load_model(path, device="cpu", dtype="float32", backend=backend).model
        with torch.inference_mode():
            found.append(model.logits(model(ids, CausalContext([len(ids)]))))
    for ours in found[1:]:
        assert 0 < (ours - found[0]).norm() < close * found[0].norm()
    problems = [one.problem for one in check_checkpoint("vllm", checkpoint)]
    assert any("does not rotate" in one and ".experts." in one for one in problems)
    config = json.loads((out / "config.json").read_text())
    group = config["quantization_config"]["transform_config"]["config_groups"]["R4"]
    group["apply"] = [one | {"ignore": [down]} for one in group["apply"]]
    (out / "config.json").write_text(json.dumps(config))
    with refused("experts alike"):
        load_model(out, device="cpu", dtype="float32")
