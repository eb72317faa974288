"""--bits and --size from end to end: what is measured foretells what rounding costs, and the output
holds what was chosen."""

import itertools
import json
import shutil
from dataclasses import replace

import make_model
import pytest
import small_recipe
from commands import command
from letters import write_letters
from output_files import files
from refused import refused

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


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(write_letters(tmp_path_factory.mktemp("text") / "calibration.txt", 3000))


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
    recipe = Recipe(scheme=SCHEME.name, calibration=text, **SMALL)
    return quantize(source, out, SCHEME, "auto", recipe, mixture=mixture, device="cpu", **options)


@pytest.fixture(scope="module")
def chosen(source, text, tmp_path_factory):
    """At 5 bits, stopped while it measures and again while it quantizes."""

    class Stopped(Exception):
        pass

    out, told = tmp_path_factory.mktemp("out") / "mixed", []
    for phase, unit in (("measuring", "layers.1.feed_forward"), ("done", "layers.0.feed_forward")):

        def stop(event, phase=phase, unit=unit):
            told.append(event)
            if isinstance(event, Progress) and (event.phase, event.unit) == (phase, unit):
                raise Stopped

        with pytest.raises(Stopped):
            run(source, out, text, Mixture(bits=5.0), on_event=stop)
    return run(source, out, text, Mixture(bits=5.0), on_event=told.append), told


def test_the_output_is_what_was_chosen(source, chosen):
    report, written = chosen[0], Checkpoint.open(chosen[0].out)
    told = json.loads((report.out / "report.json").read_text())["allocation"]
    assert 4.5 < told["bits"] <= 5.0
    assert told["size"] == report.output_bytes
    rows = {row.module: row for row in read_model(written).rows}
    grids = {linear.grid for linear in written.linears.values()}
    assert len(grids) > 1
    assert grids <= {
        W4,
        IntGrid(4, 32, symmetric=False),
        Nvfp4Grid(),
        IntGrid(8, None, symmetric=True),
        Fp8BlockGrid(),
    }
    for module, linear in written.linears.items():
        siblings = [
            other for other, row in rows.items() if row.fused and row.fused == rows[module].fused
        ]
        assert {written.linears[other].grid for other in siblings} <= {linear.grid}, (
            "fused linears share a grid"
        )
    for layer in (1, 2):
        assert (
            len(
                {
                    written.linears[module].grid
                    for module, row in rows.items()
                    if row.layer == layer and row.block == "expert"
                }
            )
            == 1
        )
    assert [
        problem
        for problem in check_checkpoint("vllm", written, device="cuda")
        if problem.severity == "error"
    ] == []
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
        (["--bits", "-1"], "--bits -1 is not a number of bits per weight"),
        (["--bits", "nan"], "is not a number of bits per weight"),
        (["--bits", "4.5", "--size", "9MB"], "give one of them"),
        (["--size", "9 parrots"], "is not a size"),
        (["--bits", "4.5", "--format", "awq"], "format awq does not support mixed precision"),
        (
            ["--bits", "4.5", "--scheme", "rtn-w4a16"],
            "has no calibration, which is needed to choose grids",
        ),
        (["--bits", "4.5", "--engine", "chitu"], "chitu loads one grid per checkpoint, no mixture"),
        (
            ["--bits", "4.5", "--engine", "sglang"],
            "sglang loads one grid per checkpoint, no mixture",
        ),
        (["--bits", "4.5", "--read-weight", "2"], "--read-weight 2 is not between 0 and 1"),
        (
            ["--scheme", "awq-w4a16", "--read-weight", "0.5"],
            "--read-weight is for grids that are chosen; give --bits or --size",
        ),
        (
            ["--scheme", "awq-w4a16", "--sensitivities", "nowhere.json"],
            "sensitivities are for grids that are chosen; give --bits or",
        ),
        (
            ["--bits", "4.5", "--sensitivities", "nowhere.json"],
            "cannot read sensitivities nowhere.json",
        ),
        (["--bits", "4.5", "--preset", "experts-only"], "already defines what is kept"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(source, asked, told):
    answer = command("plan", str(source), *asked)
    assert answer.code == 1
    assert told in answer.error
    assert answer.errors == 1


def test_the_smallest_that_is_named_can_be_had(source):
    for option, too_small in (("--bits", "1"), ("--size", "0.1MB")):
        least = (
            command("plan", str(source), option, too_small)
            .error.removesuffix(" or more")
            .split()[-1]
        )
        answer = command("plan", str(source), option, least, "--json")
        assert answer.code == 0, answer.err
        assert {"bits", "bytes", "devices", "read_bytes", "kl"} == set(answer.json["sizes"][0])
        assert answer.json["sizes"][0]["kl"] is None


@pytest.mark.parametrize(
    "damage",
    ["{}", "[]", "{", '{"kl": {"a": {"int8": NaN}}, "asked": {}, "tokens": 3, "source": "x"}'],
)
def test_a_damaged_file_of_sensitivities_is_named(source, tmp_path, damage):
    (tmp_path / "s.json").write_text(damage)
    assert (
        "s.json"
        in command(
            "plan", str(source), "--bits", "5", "--sensitivities", str(tmp_path / "s.json")
        ).error
    )


def test_sensitivities_of_another_model_are_refused(source, text, chosen, tmp_path):
    shutil.copytree(source, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(
        json.dumps({**CONFIG, **json.loads((source / "config.json").read_text()), "x": 1})
    )
    with refused("measured on another source"):
        run(
            tmp_path / "other",
            tmp_path / "o",
            text,
            Mixture(bits=5.0, sensitivities=chosen[0].out / "sensitivities.json"),
        )
    with refused("give --bits or --size"):
        Mixture(sensitivities=chosen[0].out / "sensitivities.json")
    assert not sensitivities_path(tmp_path / "o").exists()


def test_kept_kinds_are_not_chosen_for(source):
    request = read_request(
        SCHEME, "auto", None, Recipe(scheme=SCHEME.name), Mixture(keep=("attention",), bits=5.0)
    )
    options = GridOptions(open_job(request, Checkpoint.open(source)))
    assert not any(row.block == "attention" for choice in options.grids for row in choice.rows)
    assert {grid for module, grid in options.job.grids.items() if "self_attn" in module} == {
        Fp8BlockGrid()
    }
    assert replace(request, mixture=Mixture(bits=5.0)).mixture.chooses
    assert list(itertools.islice(options.grids, 1))
