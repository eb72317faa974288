"""The memory a run will need: what it depends on, and the refusal of a run that will not fit."""

import subprocess
import sys

import make_model
import pytest
import quantize_job
from letters import write_letters
from quantized import quantized
from refused import refused

from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.common.sizes import parse_bytes
from quantkit.grids.schemes import find_scheme
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan


def planned(source, scheme, **changes):
    return plan(source, find_scheme(scheme), PlanOptions(**changes)).host_peak_bytes


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = make_model.tiny_config()
    return make_model.write_fp8(
        tmp_path_factory.mktemp("models") / "source", config, make_model.random_tensors(config)
    )


def test_it_grows_with_tokens_and_not_with_layers(source, tmp_path):
    config = make_model.tiny_config(num_hidden_layers=5)
    deeper = make_model.write_fp8(tmp_path / "deeper", config, make_model.random_tensors(config))
    assert planned(deeper, "awq-w4a16") == planned(source, "awq-w4a16")
    assert planned(source, "awq-w4a16", samples=64) < planned(source, "awq-w4a16", samples=128)
    assert (
        planned(source, "rtn-w4a16", samples=64)
        == planned(source, "rtn-w4a16", samples=128)
        < planned(source, "awq-w4a16")
    )


def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(source, tmp_path):
    recipe = load_recipe("rtn-w4a16")
    with refused(
        r"needs 0\.4 GiB of memory at .* and --memory is 0\.1 GiB; give --memory 0.5GiB or "
        r"more",
    ):
        quantized(source, tmp_path / "out", recipe, memory=parse_bytes("100MiB"))
    assert list(tmp_path.iterdir()) == []
    report = quantized(source, tmp_path / "out", recipe, memory=parse_bytes("1GiB"))
    assert report.planned_memory < 2**30


def test_a_refusal_names_the_most_texts_that_fit(source, tmp_path):
    recipe = load_recipe("awq-w4a16")
    few, fewer = (
        plan(source, find_scheme("awq-w4a16"), PlanOptions(samples=count)).host_least_bytes
        for count in (41, 42)
    )
    with refused("--samples 41, which fits"):
        quantized(source, tmp_path / "out", recipe, memory=(few + fewer) // 2)


def test_states_are_kept_once_more_where_something_is_behind_the_experts_in_the_channels_they_add_to(
    tmp_path,
):
    from tiny_models import CONFIGS, random_tensors

    config, tokens = CONFIGS["openpangu_v2"], (128 + 16 + 2 * 16) * 512
    path = make_model.write_dense(tmp_path / "model", config, random_tensors(config))
    streams = 4 * config["hidden_size"] + 1
    quick = load_recipe("awq-w4a16-quick")
    peak = plan(path, find_scheme("awq-w4a16"), PlanOptions(recipe=quick)).host_peak
    assert peak.hidden_states == 4 * tokens * streams
    assert peak.where == "layers.1.experts"
    assert peak.work > 4 * tokens * config["hidden_size"]


def test_a_calibrated_run_keeps_under_the_least_it_may_be_given(source, tmp_path):
    """As the operating system counts, in a process of its own. A byte less is refused."""
    text = write_letters(tmp_path / "calibration.txt", 4000)
    recipe = Recipe(scheme="awq-w4a16", **quantize_job.SMALL)
    about = plan(
        source, find_scheme("awq-w4a16"), PlanOptions(samples=6, seq_len=32, recipe=recipe)
    )
    least = about.host_least_bytes
    assert least < about.host_peak_bytes
    arguments = [str(source), str(text), str(tmp_path / "out"), "once"]
    refused, done = (
        subprocess.run(
            [sys.executable, quantize_job.__file__, *arguments, str(memory)],
            capture_output=True,
            text=True,
        )
        for memory in (least - 1, least)
    )
    assert refused.returncode != 0
    assert "--memory is" in refused.stderr, refused.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0.2 * least < int(done.stdout) <= least


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 2**34),
        ("64GB", 64 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512MiB", 2**29),
        ("500kB", 500_000),
        ("16gb", 16 * 10**9),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["16", "GiB", "-1GiB", "0GB", "16 gigabytes", ""])
def test_no_sizes(text):
    with refused("is not a size"):
        parse_bytes(text)
