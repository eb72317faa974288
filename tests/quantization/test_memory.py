"""The memory a run will need: what it depends on, and the refusal of a run that will not fit."""

import subprocess
import sys

import make_model
import published_shapes
import pytest
import quantize_job
from letters import write_letters
from output_files import files
from quantized import quantized, stop_when
from refused import refused
from tiny_models import CONFIGS, random_tensors

from quantkit.calibrate import hidden_states
from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.grids.schemes import find_scheme
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan


def planned(tiny_checkpoint, scheme, **changes):
    return plan(tiny_checkpoint, find_scheme(scheme), PlanOptions(**changes)).host_peak_bytes


def test_it_grows_with_tokens_and_not_with_layers(tiny_checkpoint, tmp_path):
    deeper = make_model.random_fp8(tmp_path / "deeper", num_hidden_layers=5)
    assert planned(deeper, "awq-w4a16") == planned(tiny_checkpoint, "awq-w4a16")
    assert planned(tiny_checkpoint, "awq-w4a16", samples=64) < planned(
        tiny_checkpoint, "awq-w4a16", samples=128
    )
    assert (
        planned(tiny_checkpoint, "rtn-w4a16", samples=64)
        == planned(tiny_checkpoint, "rtn-w4a16", samples=128)
        < planned(tiny_checkpoint, "awq-w4a16")
    )


def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(tiny_checkpoint, tmp_path):
    recipe = load_recipe("rtn-w4a16")
    with refused(r"--memory is 0\.1 GiB; give --memory 0\.\dGiB or more"):
        quantized(tiny_checkpoint, tmp_path / "out", recipe, memory=100 * 2**20)
    assert list(tmp_path.iterdir()) == []
    report = quantized(tiny_checkpoint, tmp_path / "out", recipe, memory=2**30)
    assert report.planned_memory < 2**30


def test_a_refusal_names_the_most_texts_that_fit(tiny_checkpoint, tmp_path):
    recipe = load_recipe("awq-w4a16")
    few, fewer = (
        plan(tiny_checkpoint, find_scheme("awq-w4a16"), PlanOptions(samples=count)).host_least_bytes
        for count in (41, 42)
    )
    with refused("--samples 41, which fits"):
        quantized(tiny_checkpoint, tmp_path / "out", recipe, memory=(few + fewer) // 2)


def test_states_are_kept_once_more_where_something_is_behind_the_experts(tmp_path):
    """In the channels that they add to."""
    config, tokens = CONFIGS["openpangu_v2"], (128 + 8 + 2 * 8) * 512
    path = make_model.write_dense(tmp_path / "model", config, random_tensors(config))
    options = PlanOptions(recipe=load_recipe("awq-w4a16-quick"))
    peak = plan(path, find_scheme("awq-w4a16"), options).host_peak
    assert peak.hidden_states == 4 * tokens * (4 * config["hidden_size"] + 1)
    assert peak.where == "layers.1.experts"
    assert peak.work > 4 * tokens * config["hidden_size"]


def test_a_table_that_is_rotated_is_in_memory_in_float32_twice(tmp_path):
    config = CONFIGS["llama"] | {"vocab_size": 65536}
    path = make_model.write_dense(tmp_path / "model", config, random_tensors(config))
    sizes = {"scheme": "w8a16", "samples": 1, "held_out": 1, "seq_len": 16}
    peaks = [
        plan(path, find_scheme("w8a16"), PlanOptions(recipe=recipe)).host_peak
        for recipe in (Recipe(**sizes), Recipe(**sizes, rotation=("residual",)))
    ]
    assert peaks[1].where == "model.embed_tokens"
    assert peaks[1].work - peaks[0].work >= 6 * 65536 * config["hidden_size"]


def test_states_that_do_not_fit_into_memory_lie_in_a_file(
    source, text, tmp_path, monkeypatch, one_thread
):
    """Of the same bytes, as in memory, also if a run is stopped and goes on, there or here."""
    recipe = Recipe(scheme="awq-w4a16", **quantize_job.SMALL)
    fits = plan(source, find_scheme("awq-w4a16"), PlanOptions(recipe=recipe)).host_peak_bytes
    make, made = hidden_states.scratch_tensor, []
    stop = stop_when(lambda event: getattr(event, "unit", "") == "layers.1.experts.1")

    def counted(*asked):
        made.append(asked)
        return make(*asked)

    monkeypatch.setattr(hidden_states, "scratch_tensor", counted)
    quantize_job.run(source, text, tmp_path / "memory", memory=fits)
    assert not made
    for again in (fits - 1, fits):
        out = tmp_path / str(again)
        with pytest.raises(KeyboardInterrupt):
            quantize_job.run(source, text, out, memory=fits - 1, also=stop)
        begun = len(made)
        quantize_job.run(source, text, out, memory=again)
        assert files(out) == files(tmp_path / "memory")
        assert (len(made) > begun > 0) == (again < fits)


WIDE = {"Qwen2.5-72B": {}, "DeepSeek-V4.1-Flash": {}, "Hy4-preview": {}, "GLM-5.3-Flash": {}}
WIDE["Kimi-K3"] = {"num_hidden_layers": 93, "num_experts": 32}


@pytest.mark.parametrize("name", WIDE)
def test_published_sizes_are_quantized_in_16_gib(name, tmp_path):
    """Kimi-K3 has a stream for every twelve layers, and 33,792 inputs of a linear."""
    made = published_shapes.config(name)
    if own := WIDE[name]:
        linear = {
            "kda_layers": [n for n in range(1, 94) if n % 4],
            "full_attn_layers": [*range(4, 94, 4)],
        }
        net = made["text_config"]["linear_attn_config"] | linear
        made["text_config"] |= own | {"linear_attn_config": net}
    found = plan(
        published_shapes.write_headers(tmp_path / "source", made), find_scheme("awq-w4a16")
    )
    assert found.host_peak_bytes <= 16 * 2**30
    assert found.disk_bytes >= found.output_bytes + 3 * found.host_peak.in_file
    assert found.host_peak.in_file > 4e9 or found.host_peak.hidden_states


def test_a_calibrated_run_keeps_under_the_least_it_may_be_given(tiny_checkpoint, tmp_path):
    """As the operating system counts, in a process of its own. A byte less is refused."""
    text = write_letters(tmp_path / "calibration.txt", 4000)
    recipe = Recipe(scheme="awq-w4a16", **quantize_job.SMALL)
    about = plan(
        tiny_checkpoint, find_scheme("awq-w4a16"), PlanOptions(samples=6, seq_len=32, recipe=recipe)
    )
    least = about.host_least_bytes
    assert least < about.host_peak_bytes
    arguments = [str(tiny_checkpoint), str(text), str(tmp_path / "out"), "once"]
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
