"""What the judges of tests/judges start and measure, without the engines that they judge. Whether
they tell right from wrong they show themselves, by controls that must fail."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "judges"))

import checkpoints
import middle_models
import vllm_tokens
from make_model import write_dense
from vllm_topologies import CASES, TOPOLOGIES, deployments


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = middle_models.MIDDLE["deepseek_v3-middle"] | {
        "hidden_size": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 64,
        "intermediate_size": 128,
        "q_lora_rank": 64,
        "num_nextn_predict_layers": 1,
    }
    return write_dense(tmp_path_factory.mktemp("model"), config, middle_models.weights(config))


def test_cases_have_writers():
    cases = [case for device in ("cpu", "cuda") for case in CASES[device]]
    assert {topology for _, _, topology in cases} <= TOPOLOGIES.keys()
    cases += vllm_tokens.cases("cpu", vllm_tokens.MODELS["cpu"], [])
    known = {checkpoints.SOURCE, checkpoints.PLAIN, checkpoints.SHIFTED, *checkpoints.FORMATS}
    known |= {format for _, format in checkpoints.CONVERTED}
    for model, format, *_ in cases:
        assert model in checkpoints.MODELS or model == "tiny-r1"
        assert format in known


@pytest.mark.parametrize(
    "case",
    ["tensor 4 1 1 1", "pipeline 2 2 1 2", "experts-over-boxes 1 1 4 2", "apart-twice 1 1 1 4"],
)
def test_commands_take_four_cards(model, case):
    topology, *sizes = case.split()
    *ways, boxes = map(int, sizes)
    launches = [
        launch
        for made in deployments(model, topology, 4)
        for launch in made.launches
        if launch.role != "router"
    ]
    assert len({launch.box for launch in launches}) == len(launches) == boxes
    for launch in launches:
        ((_, words),) = launch.commands
        named = [f"--{way}-parallel-size" for way in ("tensor", "pipeline", "data")]
        found = [int(words[words.index(name) + 1]) if name in words else 1 for name in named]
        assert found == ways
