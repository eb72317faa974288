"""Linears that stay as the source has them: --keep and the preset experts-only, from the request to
what the executor computes."""

import json

import make_model
import pytest
import small_recipe
import torch
from commands import command
from quantized import quantized
from refused import refused
from safetensors import safe_open

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.engines.check import check_checkpoint
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import find_scheme
from quantkit.models.stored_parameters import read_model
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.job import open_job
from quantkit.quantization.mixed_precision import Mixture
from quantkit.quantization.request import read_request

SMALL = small_recipe.SMALL | {"samples": 4, "seq_len": 48, "min_expert_tokens": 32}
INT8 = IntGrid(8, None, symmetric=True)
KINDS = "attention,mlp,shared,experts,mtp"


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "fp8"
    return make_model.random_fp8(path, num_hidden_layers=2, **make_model.NARROW)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Channels of the norms differ, and rows have several groups, so that scales have something to
    do."""
    config = make_model.tiny_config(
        num_hidden_layers=2, **{**make_model.NARROW, "hidden_size": 256}
    )
    tensors, generator = make_model.random_tensors(config), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "layernorm" in name:
            tensors[name] = (
                tensor.float() * torch.randn(tensor.shape, generator=generator).exp()
            ).bfloat16()
    return make_model.write_dense(tmp_path_factory.mktemp("models") / "dense", config, tensors)


def run(source, out, text, mixture, scheme="awq-w4a16", **options):
    recipe = Recipe(scheme=scheme, calibration=str(text), **SMALL)
    return quantized(source, out, recipe, mixture=mixture, **options)


@pytest.fixture(scope="module")
def experts_only(fp8, text, tmp_path_factory):
    return run(
        fp8, tmp_path_factory.mktemp("out") / "experts-only", text, Mixture(preset="experts-only")
    )


def raw(path):
    found = {}
    for shard in path.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def test_experts_only_leaves_fp8_blocks_untouched(fp8, experts_only):
    written, source, after = Checkpoint.open(experts_only.out), raw(fp8), raw(experts_only.out)
    kept = 0
    for row in read_model(written).rows:
        if row.role != "linear":
            continue
        if row.block == "expert" and not row.mtp:
            assert written.linears[row.module].grid == IntGrid(4, 128, symmetric=False), row.module
        else:
            assert isinstance(written.linears[row.module].grid, Fp8BlockGrid), row.module
            assert torch.equal(
                after[row.name].view(torch.uint8), source[row.name].view(torch.uint8)
            )
            assert torch.equal(
                after[f"{row.module}.weight_scale"], source[f"{row.module}.weight_scale_inv"]
            )
            kept += 1
    assert kept > 20
    told = {
        engine: {one.severity for one in check_checkpoint(engine, written, device=device)}
        for engine, device in (("vllm", "cuda"), ("vllm-ascend", None))
    }
    assert told["vllm"] <= {"warning"}
    assert told["vllm-ascend"] == {"error"}
    assert diagnose(str(experts_only.out)).findings.exit_code == 0


def test_kept_experts_of_a_plain_model_are_the_sources_but_for_the_scale(dense, text, tmp_path):
    """Routed experts that are not rounded still read what the layer's scale was folded out of."""
    report = run(dense, tmp_path / "out", text, Mixture(keep=("experts", "mtp")))
    written = Checkpoint.open(report.out)
    rows = {row.module: row for row in read_model(written).rows}
    assert {rows[module].block for module in written.linears} == {
        "attention",
        "mlp",
        "shared_expert",
    }
    assert written.format.variant == "gemm"  # one grid is left: no mixture is needed
    before, after = raw(dense), raw(report.out)
    norm, expert = "model.layers.1.post_attention_layernorm.weight", "model.layers.1.mlp.experts.3"
    scale = before[norm].float() / after[norm].float()
    assert float((scale - 1).abs().max()) > 0.1, "a scale was folded"
    for side in ("gate", "up"):
        name = f"{expert}.{side}_proj.weight"
        torch.testing.assert_close(
            after[name].float(), before[name].float() * scale, rtol=2**-7, atol=0
        )
    assert torch.equal(after[f"{expert}.down_proj.weight"], before[f"{expert}.down_proj.weight"])


@pytest.mark.parametrize(
    ("scheme", "engine", "grids"),
    [
        ("awq-w4a16", "vllm", {IntGrid(4, 128, symmetric=False), Fp8BlockGrid()}),
        ("fp4-w4a16", "vllm", {Nvfp4Grid(), Fp8BlockGrid()}),
        ("awq-w4a16", "vllm-ascend", {IntGrid(4, 128, symmetric=True), INT8}),
        ("int4-w4a8", "vllm-ascend", {IntGrid(4, None, symmetric=True), INT8}),
        ("fp4-w4a16", "chitu", {Nvfp4Grid()}),
    ],
)
def test_the_rest_of_experts_only_is_what_the_engine_takes(fp8, scheme, engine, grids):
    request = read_request(
        find_scheme(scheme), "auto", engine, Recipe(scheme=scheme), Mixture(preset="experts-only")
    )
    job = open_job(request, Checkpoint.open(fp8))
    assert set(job.grids.values()) == grids
    assert {row.block for row in job.linears if job.grids[row.module] == request.scheme.weight} == {
        "expert"
    }


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--keep", "attn"], "--keep 'attn' is not a kind of sublayer; kinds are attention, mlp"),
        (["--ignore", "model.layers.0.self_attn.o_prj"], "near are model.layers.N.self_attn."),
        (["--ignore", "re:.*("], "no regular expression"),
        (["--override", "re:.*o_proj$ bits=3"], "makes no sense; write 'PATTERN scheme=NAME'"),
        (["--override", "re:.*o_proj$ bits"], "'bits' in an override is no KEY=VALUE"),
        (["--override", "re:.*norm.* bits=8"], "matches no module"),
        (["--override", "model.embed_tokens bits=8"], "what it matches is not quantized"),
        (["--override", "re:.*gate_proj$ bits=8"], "are run as one operator"),
        (["--override", "re:.*o_proj$ bits=8", "--bits", "4.5"], "choose every grid"),
        (["--preset", "attention-only"], "preset 'attention-only' is not known"),
        (["--scheme", "awq-w4a16", "--keep", KINDS], "leaves no linear of this model to quantize"),
    ],
)
def test_what_cannot_be_meant_is_told_in_a_line(fp8, asked, told):
    answer = command("plan", str(fp8), *asked)
    assert (answer.code, answer.errors) == (2 if "is not known" in told else 1, 1)
    assert told in answer.error


def test_patterns_keep_linears_or_put_them_on_other_grids(fp8, tmp_path):
    """By the command line; the recipe of the same patterns is the same run."""
    patterns = {"re:.*o_proj$": {"bits": 8}, "re:.*shared_experts.*": {"group_size": 32}}
    given = ["--ignore", "re:.*\\.kv_b_proj$"]
    for pattern, values in patterns.items():
        given += ["--override", f"{pattern} {' '.join(f'{k}={v}' for k, v in values.items())}"]
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    answer = command("quantize", str(fp8), "--scheme", "rtn-w4a16", "--out", str(out), *given)
    assert answer.code == 0, answer
    written = Checkpoint.open(out)
    for row in read_model(written).rows:
        if row.role == "linear":
            linear = written.linears.get(row.module)
            if row.module.endswith("kv_b_proj"):
                assert linear is None
            elif row.module.endswith("o_proj"):
                assert linear.grid == INT8
            else:
                assert linear.grid.bits == 4, row.module
                assert (linear.grid.group_size == 32) == (row.block == "shared_expert"), row.module
    settings = {"scheme": "rtn-w4a16", "fit_points": 1, "ignore": given[1:2], "override": patterns}
    recipe.write_text(json.dumps(settings))
    again = command("quantize", str(fp8), "--recipe", str(recipe), "--out", str(out))
    assert "done already" in again.err, again


def test_a_model_without_the_kind_says_what_it_has(tmp_path):
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    path = make_model.random_dense(tmp_path / "m", **changes)
    with refused("it has attention, mlp"):
        plan(path, find_scheme("awq-w4a16"), PlanOptions(mixture=Mixture(keep=("experts",))))


def test_fused_linears_on_several_grids_are_an_engines_fault(experts_only, tmp_path):
    """An int8 q_a beside an FP8 kv_a: engines make one linear of the two."""
    module, written = "model.layers.0.self_attn.q_a_proj", Checkpoint.open(experts_only.out)
    rows, columns = written.shape(module)
    tensors = raw(experts_only.out) | {
        f"{module}.weight": torch.zeros(rows, columns, dtype=torch.int8),
        f"{module}.weight_scale": torch.ones(rows, 1),
    }
    grids = {name: linear.grid for name, linear in written.linears.items()} | {module: INT8}
    plain = [
        one
        for one in written.tensors.values()
        if not any(one.name.startswith(f"{linear}.") for linear in written.linears)
    ]
    block = {"quantization_config": written.format.config_block(None, grids, plain)}
    path = make_model.write_dense(tmp_path / "out", written.config | block, tensors)
    found = check_checkpoint("vllm", Checkpoint.open(path), device="cuda")
    (told,) = (one.problem for one in found if one.severity == "error")
    assert "fused by vllm, and on several grids" in told


def test_int8_before_latent_attention(dense, tmp_path):
    """What Ascend's fused operator computes is int8, everything else of the scheme's grid; no
    calibration is needed for it."""
    recipe, mixture = Recipe(scheme="rtn-w4a16", methods=()), Mixture(preset="int8-attention")
    report = quantized(dense, tmp_path / "out", recipe, mixture=mixture)
    written = Checkpoint.open(report.out)
    grids = {
        row.projection: written.linears[row.module].grid
        for row in read_model(written).rows
        if row.module in written.linears
    }
    assert {name for name, grid in grids.items() if grid == INT8} == {"q_a", "q_b", "kv_a"}
    assert {*grids.values()} == {INT8, IntGrid(4, 128, symmetric=False)}
    query = written.linears["model.layers.0.self_attn.q_a_proj"]
    assert query.format.member("model.layers.0.self_attn.q_a_proj").activation_bits_of(INT8) == 8
    options = PlanOptions(engine="vllm-ascend", mixture=mixture)
    beside = plan(dense, find_scheme("awq-w4a16"), options)
    assert beside.format == report.format == "compressed-tensors"


def test_int8_before_latent_attention_is_refused(fp8):
    """Where an engine takes one grid a checkpoint."""
    mixture = Mixture(preset="int8-attention")
    with refused("one grid per checkpoint"):
        plan(fp8, find_scheme("fp4-w4a16"), PlanOptions(engine="sglang", mixture=mixture))
