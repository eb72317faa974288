"""--bits and --size from end to end: what is measured foretells what rounding costs, and the output
holds what was chosen."""

import json
import shutil

import make_model
import pytest
import small_recipe
from commands import command
from edited import edited
from output_files import files
from refused import refused
from tiny_models import write

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import Note, Progress
from quantkit.engines.check import check_checkpoint
from quantkit.grids.fp8_block import Fp8BlockGrid
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.grids.schemes import find_scheme
from quantkit.models.stored_parameters import read_model
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize
from quantkit.quantization.bit_allocation import GridOptions
from quantkit.quantization.job import open_job
from quantkit.quantization.mixed_precision import Mixture
from quantkit.quantization.request import read_request
from quantkit.quantization.sensitivity_run import sensitivities_path

SMALL = small_recipe.SMALL | {"held_out": 1, "seq_len": 64, "scale_points": 2}
CONFIG = make_model.tiny_config(num_hidden_layers=2, **make_model.NARROW)
SCHEME = find_scheme("awq-w4a16")
W4 = IntGrid(4, 128, symmetric=False)
STREAMS = (
    "deepseek_v4",
    "deepseek_v41",
    "glm5_next",
    "hy_v4",
    "kimi_k3",
    "openpangu_v2",
    "qwen4_exp",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Layers and halves of them differ in what they add to the residual stream."""
    tensors = make_model.random_tensors(CONFIG)
    for name, tensor in tensors.items():
        louder = 3.0 if ".layers.0." in name else 0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = (louder * tensor.float()).bfloat16()
    return make_model.write_fp8(tmp_path_factory.mktemp("models") / "fp8", CONFIG, tensors)


def run(source, out, text, mixture, **options):
    recipe = Recipe(scheme=SCHEME.name, calibration=str(text), **SMALL)
    return quantize(source, out, SCHEME, "auto", recipe, mixture=mixture, device="cpu", **options)


@pytest.fixture(scope="module")
def chosen(source, text, tmp_path_factory):
    """At 5 bits, stopped while it measures and again while it quantizes."""
    out, told = tmp_path_factory.mktemp("out") / "mixed", []
    for phase, unit in (("measuring", "layers.1.feed_forward"), ("done", "layers.0.feed_forward")):

        def stop(event, phase=phase, unit=unit):
            told.append(event)
            if isinstance(event, Progress) and (event.phase, event.unit) == (phase, unit):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(source, out, text, Mixture(bits=5.0), on_event=stop)
    return run(source, out, text, Mixture(bits=5.0), on_event=told.append), told


def test_the_output_is_what_was_chosen(source, chosen):
    """Fused linears, and experts of a layer, share a grid."""
    report, written = chosen[0], Checkpoint.open(chosen[0].out)
    told = json.loads((report.out / "report.json").read_text())["allocation"]
    assert 4.5 < told["bits"] <= 5.0
    assert told["size"] == report.output_bytes
    grids = {linear.grid for linear in written.linears.values()}
    own = {Nvfp4Grid(), IntGrid(8, None, symmetric=True), Fp8BlockGrid()}
    assert grids <= {W4, IntGrid(4, 32, symmetric=False)} | own
    assert len(grids) > 1
    together = {}
    for row in read_model(written).rows:
        if row.module in written.linears and (row.fused or row.block == "expert"):
            unit = (row.layer, "expert") if row.block == "expert" else row.fused
            together.setdefault(unit, set()).add(written.linears[row.module].grid)
    assert len(together) > 3
    assert all(len(grids) == 1 for grids in together.values()), together
    found = check_checkpoint("vllm", written, device="cuda")
    assert [one for one in found if one.severity == "error"] == []
    assert "Chosen grids" in (report.out / "report.html").read_text()


def test_a_stopped_run_measures_no_layer_twice_and_nothing_is_left_beside(chosen):
    measured = [
        event.unit
        for event in chosen[1]
        if isinstance(event, Progress) and event.phase == "measuring" and "layers" in event.unit
    ]
    assert measured.count("layers.0.attend") == 1
    assert any(
        isinstance(event, Note) and "as measured before" in event.text for event in chosen[1]
    )
    assert sorted(path.name for path in chosen[0].out.parent.iterdir()) == [chosen[0].out.name]


def test_it_writes_the_same_bytes_from_a_file_of_sensitivities(source, text, chosen, tmp_path):
    shutil.copy(chosen[0].out / "sensitivities.json", tmp_path / "s.json")
    again = run(
        source, tmp_path / "out", text, Mixture(bits=5.0, sensitivities=tmp_path / "s.json")
    )
    assert files(again.out) == files(chosen[0].out)
    planned = plan(
        source, SCHEME, PlanOptions(mixture=Mixture(bits=5.0), sensitivities=tmp_path / "s.json")
    )
    assert planned.output_bytes == again.output_bytes
    kls = [one.kl for one in planned.sizes]
    assert kls == sorted(kls, reverse=True)
    assert planned.sizes[0].kl > planned.sizes[-1].kl


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--bits", "3"], "--bits 3 cannot be reached: the smallest is 4."),
        (["--size", "0.1MB"], "cannot be reached: the smallest output is"),
        (["--bits", "nan"], "is not a number of bits per weight"),
        (["--bits", "4.5", "--size", "9MB"], "give one of them"),
        (["--size", "9 parrots"], "is not a size"),
        (["--bits", "4.5", "--format", "awq"], "format awq does not support mixed precision"),
        (["--bits", "4.5", "--scheme", "rtn-w4a16"], "has no calibration, which is needed"),
        (["--bits", "4.5", "--engine", "chitu"], "chitu loads one grid per checkpoint, no mixture"),
        (["--bits", "4.5", "--read-weight", "2"], "--read-weight 2 is not between 0 and 1"),
        (["--scheme", "awq-w4a16", "--read-weight", "0.5"], "give --bits or --size"),
        (["--scheme", "awq-w4a16", "--sensitivities", "nowhere"], "give --bits or"),
        (["--bits", "4.5", "--sensitivities", "nowhere"], "cannot read sensitivities nowhere"),
        (["--bits", "4.5", "--preset", "experts-only"], "already defines what is kept"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(source, asked, told):
    answer = command("plan", str(source), *asked)
    assert (answer.code, answer.errors) == (1, 1)
    assert told in answer.error


@pytest.mark.parametrize(
    "damage",
    ["[]", "{", '{"kl": {"a": {"int8": NaN}}, "asked": {}, "tokens": 3, "source": "x"}'],
)
def test_a_damaged_file_of_sensitivities_is_named(source, tmp_path, damage):
    file = tmp_path / "s.json"
    file.write_text(damage)
    answer = command("plan", str(source), "--bits", "5", "--sensitivities", str(file))
    assert "s.json" in answer.error


def test_sensitivities_of_another_model_are_refused(source, text, chosen, tmp_path):
    other, out = shutil.copytree(source, tmp_path / "other"), tmp_path / "out"
    with edited(other / "config.json") as config:
        config["x"] = 1
    given = Mixture(bits=5.0, sensitivities=chosen[0].out / "sensitivities.json")
    with refused("measured on another source"):
        run(other, out, text, given)
    assert not sensitivities_path(out).exists()


@pytest.mark.parametrize("name", STREAMS)
def test_sizes_of_models_of_several_streams_are_met(name, text, tmp_path):
    """What every one of them is asked for, and with the same sensitivities as bytes of the
    whole."""
    source, out = write(tmp_path / name, name), tmp_path / "out"
    report = run(source, out, text, Mixture(bits=6.0))
    told = json.loads((out / "report.json").read_text())["allocation"]
    assert 5.0 < told["bits"] <= 6.0
    assert told["size"] == report.output_bytes
    assert len(set(told["grids"].values())) > 1
    size = report.output_bytes - report.output_bytes // 20
    measured = {"sensitivities": out / "sensitivities.json"}
    planned = plan(source, SCHEME, PlanOptions(mixture=Mixture(size=size), seq_len=64, **measured))
    assert 0.97 * size < planned.output_bytes <= size


def test_kept_kinds_are_not_chosen_for(source):
    kept = Mixture(keep=("attention",), bits=5.0)
    request = read_request(SCHEME, "auto", None, Recipe(scheme=SCHEME.name), kept)
    options = GridOptions(open_job(request, Checkpoint.open(source)))
    assert options.grids
    assert not any(row.block == "attention" for choice in options.grids for row in choice.rows)
    grids = options.job.grids.items()
    assert {grid for module, grid in grids if "self_attn" in module} == {Fp8BlockGrid()}
