"""Linears that stay as the source has them: --keep and the preset experts-only, from the request to
what the executor computes."""

import json
import shutil

import make_model
import pytest
import small_recipe
import torch
from commands import command
from letters import write_letters
from quantized import quantized
from refused import refused
from safetensors import safe_open

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import read_model
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.job import open_job
from quantkit.quantization.mixed_precision import Mixture, kept_grids
from quantkit.quantization.request import read_request

SMALL = small_recipe.SMALL | {"samples": 4, "seq_len": 48, "min_expert_tokens": 32}
CONFIG = make_model.tiny_config(num_hidden_layers=2, **make_model.NARROW)
INT8 = IntGrid(8, None, symmetric=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(write_letters(tmp_path_factory.mktemp("text") / "calibration.txt", 2000))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    return make_model.write_fp8(
        tmp_path_factory.mktemp("models") / "fp8", CONFIG, make_model.random_tensors(CONFIG)
    )


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
    recipe = Recipe(scheme=scheme, calibration=text, **SMALL)
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
    before, written, after = (
        Checkpoint.open(fp8),
        Checkpoint.open(experts_only.out),
        raw(experts_only.out),
    )
    source = raw(fp8)
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
    assert before.config["hidden_size"] == written.config["hidden_size"]
    assert all(
        problem.severity == "warning"
        for problem in check_checkpoint("vllm", written, device="cuda")
    )
    assert (
        [p.severity for p in check_checkpoint("vllm-ascend", written)]
        == ["error"] * len(check_checkpoint("vllm-ascend", written))
        != []
    )


def test_the_doctor_finds_nothing_wrong(experts_only):
    answer = command("check", str(experts_only.out))
    assert answer.code == 0, answer.out


def test_the_plan_counts_the_bytes_that_are_written(fp8, experts_only):
    planned = plan(
        fp8, find_scheme("awq-w4a16"), PlanOptions(mixture=Mixture(preset="experts-only"))
    )
    assert (
        planned.output_bytes
        == experts_only.output_bytes
        == sum(t.nbytes for t in raw(experts_only.out).values())
    )
    assert planned.format == experts_only.format == "compressed-tensors"


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
    found = load_model(report.out, device="cpu", dtype="float32")
    with torch.inference_mode():
        assert bool(
            found.model.logits(found.model(torch.arange(8), CausalContext([8]))).isfinite().all()
        )


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
        (
            ["--keep", "attn"],
            "--keep 'attn' is not a kind of sublayer; kinds are attention, mlp, shared, experts, "
            "mtp",
        ),
        (["--keep", "mlp,"], "--keep '' is not a kind"),
        (
            ["--ignore", "model.layers.0.self_attn.o_prj"],
            "near are model.layers.N.self_attn.o_proj",
        ),
        (["--ignore", "re:.*("], "no regular expression"),
        (["--override", "re:.*o_proj$ bits=3"], "makes no sense; write 'PATTERN scheme=NAME'"),
        (["--override", "re:.*o_proj$ groups=3"], "{'groups': '3'}; write"),
        (["--override", "re:.*o_proj$ bits"], "'bits' in an override is no KEY=VALUE"),
        (["--override", "re:.*norm.* bits=8"], "matches no module"),
        (["--override", "model.embed_tokens bits=8"], "what it matches is not quantized"),
        (["--override", "re:.*gate_proj$ bits=8"], "are run as one operator"),
        (["--override", "re:.*o_proj$ bits=8", "--bits", "4.5"], "choose every grid"),
        (["--override", "re:.*o_proj$ bits=8", "--format", "awq"], "does not hold several grids"),
        (["--override", "re:.*o_proj$ scheme=int3"], "scheme 'int3' is not known"),
        (
            ["--preset", "attention-only"],
            "preset 'attention-only' is not known; choose one of experts-only, int8-attention",
        ),
        (["--preset", "experts-only", "--keep", "mlp"], "already defines what is kept"),
        (
            ["--scheme", "awq-w4a16", "--keep", "attention,mlp,shared,experts,mtp"],
            "leaves no linear of this model to quantize",
        ),
    ],
)
def test_what_cannot_be_meant_is_told_in_a_line(fp8, asked, told):
    answer = command("plan", str(fp8), *asked)
    assert answer.code == (2 if "is not known" in told else 1)
    assert told in answer.err
    assert len(answer.err.strip().splitlines()) == 1


def test_patterns_keep_linears_or_put_them_on_other_grids(fp8, tmp_path):
    """By the command line; the recipe of the same patterns is the same run."""
    patterns = {"re:.*o_proj$": {"bits": 8}, "re:.*shared_experts.*": {"group_size": 32}}
    given = ["--ignore", "re:.*\\.kv_b_proj$"]
    for pattern, values in patterns.items():
        given += ["--override", f"{pattern} {' '.join(f'{k}={v}' for k, v in values.items())}"]
    out = tmp_path / "out"
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
    command_line = json.loads((out / "report.json").read_text())["command"]
    assert "--override 're:.*o_proj$ bits=8'" in command_line
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(
            {"scheme": "rtn-w4a16", "fit_points": 1, "ignore": given[1:2], "override": patterns}
        )
    )
    again = command(
        "quantize", str(fp8), "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(out)
    )
    assert "done already" in again.err, again


def test_a_model_without_the_kind_says_what_it_has(tmp_path):
    config = make_model.tiny_config(
        num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0
    )
    path = make_model.write_dense(tmp_path / "m", config, make_model.random_tensors(config))
    with refused("it has attention, mlp"):
        plan(path, find_scheme("awq-w4a16"), PlanOptions(mixture=Mixture(keep=("experts",))))
    with refused("leaves no linear"):
        plan(path, find_scheme("awq-w4a16"), PlanOptions(mixture=Mixture(preset="experts-only")))


def test_fused_linears_on_several_grids_are_an_engines_fault(experts_only, tmp_path):
    """An int8 q_a beside an FP8 kv_a: engines make one linear of the two."""
    shutil.copytree(experts_only.out, tmp_path / "out")
    path = tmp_path / "out"
    module = "model.layers.0.self_attn.q_a_proj"
    tensors = raw(path)
    written = Checkpoint.open(path)
    rows, columns = written.shape(module)
    tensors[f"{module}.weight"] = torch.zeros(rows, columns, dtype=torch.int8)
    tensors[f"{module}.weight_scale"] = torch.ones(rows, 1)
    for shard in path.glob("*.safetensors*"):
        shard.unlink()
    from safetensors.torch import save_file

    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    quantized = {name: linear.grid for name, linear in written.linears.items()} | {module: INT8}
    specs = [
        tensor
        for name, tensor in written.tensors.items()
        if name.removesuffix(".weight") not in written.linears
    ]
    plain = [
        one
        for one in specs
        if not any(one.name.startswith(f"{linear}.") for linear in written.linears)
    ]
    config["quantization_config"] = written.format.config_block(None, quantized, plain)
    (path / "config.json").write_text(json.dumps(config))
    told = [
        problem.problem
        for problem in check_checkpoint("vllm", Checkpoint.open(path), device="cuda")
        if problem.severity == "error"
    ]
    assert len(told) == 1
    assert "fused by vllm, and on several grids" in told[0]


def test_int8_before_latent_attention(dense, tmp_path):
    """What Ascend's fused operator computes is int8, everything else of the scheme's grid; no
    calibration is needed for it."""
    recipe = Recipe(scheme="rtn-w4a16", methods=())
    report = quantized(dense, tmp_path / "out", recipe, mixture=Mixture(preset="int8-attention"))
    written = Checkpoint.open(report.out)
    grids = {
        row.projection: written.linears[row.module].grid
        for row in read_model(written).rows
        if row.module in written.linears
    }
    assert {name for name, grid in grids.items() if grid == INT8} == {"q_a", "q_b", "kv_a"}
    assert all(
        grid == IntGrid(4, 128, symmetric=False)
        for name, grid in grids.items()
        if name not in ("q_a", "q_b", "kv_a")
    )
    beside = plan(
        dense,
        find_scheme("awq-w4a16"),
        PlanOptions(engine="vllm-ascend", mixture=Mixture(preset="int8-attention")),
    )
    assert beside.format == "compressed-tensors"
    query = "model.layers.0.self_attn.q_a_proj"
    assert written.linears[query].format.member(query).activation_bits_of(INT8) == 8
    assert report.format == "compressed-tensors"


def test_int8_before_latent_attention_is_refused(fp8):
    """Where an engine takes one grid a checkpoint, and where attention is not latent."""
    mixture = Mixture(preset="int8-attention")
    with refused("one grid per checkpoint"):
        plan(fp8, find_scheme("fp4-w4a16"), PlanOptions(engine="sglang", mixture=mixture))
    checkpoint = Checkpoint.open(fp8)
    grouped = [row for row in read_model(checkpoint).rows if row.projection not in ("q_a", "kv_a")]
    with refused("no latent attention with q_a, q_b, kv_a"):
        kept_grids(mixture, grouped, {}, checkpoint, None, fp8=False)
