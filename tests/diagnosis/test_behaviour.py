"""Both models compute a text: the first sublayer that differs is named, and rounding alone is not a
finding."""

from pathlib import Path

import faulty
import good_checkpoints
import make_model
import pytest
from refused import refused

from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis import Findings
from quantkit.diagnosis.behaviour import compare_behaviour
from quantkit.diagnosis.diagnose import diagnose

CONFIG = make_model.tiny_config(num_hidden_layers=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A source, and int4 of it."""
    folder = tmp_path_factory.mktemp("models")
    source, made = good_checkpoints.packed(folder, CONFIG, ["ct-int4"])
    return source, made["ct-int4"]


def test_rounding_is_no_finding(models):
    source, packed = models
    found = diagnose(str(packed), source=str(source), depth="behaviour")
    assert found.findings.found == []
    assert [error.name for error in found.sublayers[:2]] == [
        "model.layers.0 attention",
        "model.layers.0 feed-forward",
    ]
    assert all(0 < error.own < 0.4 for error in found.sublayers)
    assert all(error.chosen is None or error.chosen > 0.95 for error in found.sublayers)


def test_the_sublayer_and_its_linear_are_named(models, tmp_path):
    contents = faulty.Contents.of(models[1])
    contents.swap("model.layers.1.self_attn.o_proj", "model.layers.2.self_attn.o_proj")
    found = diagnose(
        str(contents.write(tmp_path / "bad")), source=str(models[0]), depth="behaviour"
    ).findings
    finding = next(finding for finding in found.ordered if finding.name == "sublayer-off")
    assert finding.where.startswith("model.layers.1 attention")
    assert "begins at model.layers.1.self_attn.o_proj" in finding.evidence


def test_a_router_that_was_left_unscaled_is_named(models, tmp_path):
    bad = faulty.damaged(models[0], "the_router_was_not_scaled", tmp_path)
    found = diagnose(bad, source=str(models[0]), depth="behaviour").findings
    assert [finding.where for finding in found.found if finding.name == "router-strays"] == [
        "model.layers.2 feed-forward"
    ]


@pytest.mark.parametrize(
    "changes", [{"intermediate_size": 2 * CONFIG["intermediate_size"]}, {"num_hidden_layers": 2}]
)
def test_a_source_of_other_sizes_is_not_compared(changes, models, tmp_path):
    """Linears and layers that do not go together: the check ended with an error of torch."""
    config = CONFIG | changes
    weights = good_checkpoints.random_weights(config)
    other = make_model.write_dense(tmp_path / "other", config, weights)
    with refused(r"is .* in .* and .* in .*: their behaviour is not compared; give the source"):
        compare_behaviour(Checkpoint.open(models[0]), Checkpoint.open(other), [], Findings())
    found = diagnose(str(models[1]), source=str(other), depth="behaviour").findings
    assert found.verdict == "bad"


def test_an_unreadable_text_is_reported_first_and_is_not_a_fault_of_the_checkpoint(
    models,
):
    told, asked = [], {"depth": "behaviour", "text": Path("nowhere.txt")}
    with refused(r"text nowhere\.txt cannot be read"):
        diagnose(str(models[1]), source=str(models[0]), notify=told.append, **asked)
    assert not told
