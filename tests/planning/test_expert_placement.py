"""`quantkit place` and the counts it reads: from commands that count, to files read as each engine
reads them."""

import json

import numpy as np
import pytest
import torch
from commands import typed
from damage import VALUES

from quantkit import QuantkitError
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext
from quantkit.models.expert_counts import ExpertCounts
from quantkit.planning.expert_placement import place_layers
from quantkit.tokenizer.chat import ChatTokenizer

ENGINES = ("vllm", "sglang", "vllm-ascend", "omni-infer")


def counts_of(checkpoint, seed=0, **changes):
    """Counts as a text could leave them in the model of tiny_checkpoint: skewed, layer by layer
    otherwise."""
    config = Checkpoint.open(checkpoint).config
    generator = np.random.default_rng(seed)
    shares = 1 / np.arange(1, config["n_routed_experts"] + 1)
    layers = {
        layer: (1000 * generator.permutation(shares)).astype(int).tolist() for layer in (1, 2)
    }
    about = {
        "model_type": "deepseek_v3",
        "hidden_size": config["hidden_size"],
        "experts": len(shares),
        "tokens": 900,
        "layers": layers,
    }
    return ExpertCounts(**(about | changes))


@pytest.fixture
def counts(tiny_checkpoint, tmp_path):
    path = tmp_path / "counts.json"
    counts_of(tiny_checkpoint).write(path)
    return path


def placed_by(engine, file, devices):
    """Experts of each device of each layer with experts, read as the engine's own source reads them
    (see layouts.py)."""
    if engine == "omni-infer":
        pattern = np.load(file, allow_pickle=False).astype(np.int32)
        return [
            [set(np.flatnonzero(pattern[device, layer])) for device in range(devices)]
            for layer in range(pattern.shape[1])
        ]
    found = json.loads(file.read_text())
    if engine == "vllm-ascend":
        assert found["moe_layer_count"] == len(found["layer_list"])
        rows = [
            torch.tensor([one["device_expert"] for one in layer["device_list"]])
            for layer in found["layer_list"]
        ]
        return [[set(device.tolist()) for device in layer] for layer in rows]
    flat = (
        found if engine == "vllm" else found["physical_to_logical_map"][1:]
    )  # the first of three layers is dense
    return [
        [set(device) for device in np.array(layer).reshape(devices, -1).tolist()] for layer in flat
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_file_says_what_was_placed(tiny_checkpoint, counts, tmp_path, engine):
    out = tmp_path / "placement"
    asked = f"--devices 4 --redundant 4 --engine {engine} --out {out} --json"
    answer = typed(f"place {tiny_checkpoint} --counts {counts} --held-out {counts} {asked}")
    told = answer.json
    loads = {
        layer: np.array(row, float) for layer, row in counts_of(tiny_checkpoint).layers.items()
    }
    expected = place_layers(loads, 4, 4, uneven=engine == "omni-infer")
    assert placed_by(engine, out, 4) == [
        [set(row) for row in slots.tolist()] for slots in expected.values()
    ]
    assert told["balance"] == told["held_out_balance"] > told["in_order_balance"]
    assert sum(told["slots"]) == 6  # 8 experts and 4 copies on 4 devices, in two layers
    # gate, up and down of 128 x 256 in FP8 with a scale for each 128 x 128
    assert told["expert_bytes"] == 3 * (128 * 256 + 2 * 4)
    assert told["copies_bytes"] == 2 * told["expert_bytes"] == told["device_bytes"] // 3
    assert not list(tmp_path.glob("*.new"))


def test_layers_share_copies_where_the_engine_allows_it():
    flat, steep = np.full(16, 100.0), np.array([800.0, 800.0, *[1.0] * 14])
    slots = {
        layer: placed.shape[1]
        for layer, placed in place_layers({0: flat, 1: steep}, 4, 4, uneven=True).items()
    }
    assert slots == {0: 4, 1: 6}  # the two busy experts need three copies more each
    assert all(placed.shape[1] == 5 for placed in place_layers({0: flat, 1: steep}, 4, 4).values())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "qwen3_moe"}, "model_type qwen3_moe"),
        ({"hidden_size": 512}, "hidden_size 512"),
        ({"layers": {1: [1] * 8}}, "counts no layer 2"),
        ({"layers": {1: [1] * 8, 2: [1] * 8, 9: [1] * 8}}, "counts layer 9"),
        ({"layers": {1: [0] * 8, 2: [1] * 8}}, "nothing but zeros for layer 1"),
        ({"layers": {1: [1] * 7, 2: [1] * 8}}, "7 counts for layer 1"),
        ({"layers": {1: [-1] * 8, 2: [1] * 8}}, "layers.1.0: "),
    ],
)
def test_counts_of_another_model_are_refused(tiny_checkpoint, tmp_path, changes, told):
    counts_of(tiny_checkpoint, **changes).write(tmp_path / "counts.json")
    assert told in refused(f"{tiny_checkpoint} --devices 4 --engine vllm", tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        "--devices 3 -> give --redundant 1",
        "--devices 4 --redundant 6 -> give --redundant 4 or 8",
        "--devices 2 --redundant 10 -> more than 2 devices hold",
        "--devices 0 -> make no sense",
        "--devices 4x1MiB --redundant 4 -> do not fit",
        "--devices 4 --engine tgi -> 'tgi'",
        "--devices 4 --out /nowhere/file -> cannot write /nowhere/file",
    ],
)
@pytest.mark.usefixtures("counts")
def test_what_cannot_be_placed_is_refused(tiny_checkpoint, tmp_path, case):
    options, told = case.split(" -> ")
    assert told in refused(f"{tiny_checkpoint} --engine vllm {options}", tmp_path)


def refused(asked, folder):
    """The one line of `place` with FOLDER/counts.json, which writes nothing."""
    answer = typed(f"place --counts {folder}/counts.json --out {folder}/p {asked}")
    assert (answer.code, answer.errors) == (1, 1)
    assert not (folder / "p").exists()
    return answer.error


def chosen_by_hand(checkpoint, ids):
    """Counts from the model's own forward, with its routers called separately."""
    loaded = load_model(checkpoint, device="cpu")
    found = {}
    for number, layer in enumerate(loaded.model.layers):
        if hasattr(layer.mlp, "choose"):
            mlp, original = layer.mlp, layer.mlp.choose

            def choose(x, original=original, number=number, k=mlp.routing.num_experts_per_tok):
                topk_ids, weights = original(x)
                found[number] = torch.bincount(topk_ids[:, :k].flatten(), minlength=8).tolist()
                return topk_ids, weights

            mlp.choose = choose
    with torch.inference_mode():
        loaded.model(torch.tensor(ids), CausalContext([len(ids)], loaded.device))
    return found


def test_ppl_counts_what_the_routers_choose(tiny_checkpoint, tmp_path):
    text = "Experts are asked, and counted. " * 4
    (tmp_path / "text.txt").write_text(text)
    answer = typed(
        f"ppl {tiny_checkpoint} --text {tmp_path}/text.txt --count-experts {tmp_path}/c.json"
    )
    assert answer.code == 0, answer.err
    counts = ExpertCounts.read(tmp_path / "c.json")
    ids = ChatTokenizer(tiny_checkpoint).encode(text)
    assert counts.tokens == len(ids)
    assert dict(counts.layers) == chosen_by_hand(tiny_checkpoint, ids)


def test_run_counts_every_token_and_refuses_a_file_it_cannot_write(tiny_checkpoint, tmp_path):
    given = f"run {tiny_checkpoint} --prompt one --raw --max-new-tokens 5 --json --count-experts"
    told = typed(f"{given} {tmp_path}/c.json").json
    counts = ExpertCounts.read(tmp_path / "c.json")
    assert (
        counts.tokens == told["prompt_tokens"] + told["tokens"] - 1
    )  # the last one is not read any more
    assert all(sum(row) == 3 * counts.tokens for row in counts.layers.values())
    assert "no folder" in typed(f"{given} {tmp_path}/none/c.json").error


def test_the_experts_of_a_server_are_counted_where_it_runs(tmp_path):
    answer = typed(
        f"eval http://127.0.0.1:1 --tasks tiny-math --limit 1 --count-experts {tmp_path}/c.json"
    )
    assert answer.code == 1
    assert not (tmp_path / "c.json").exists()


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_hostile_counts_are_refused_in_one_line(tmp_path, value):
    """Each value in place of every field, and as the key of a layer."""
    path, read = tmp_path / "counts.json", 0
    good = {"quantkit": "expert counts", "model_type": "m", "hidden_size": 8, "experts": 2}
    good |= {"tokens": 4, "layers": {"1": [2, 2]}}
    spoilt = [{**good, name: value} for name in good]
    spoilt += [{**good, "layers": {"1": value}}, {**good, "layers": {"1": [value, 2]}}]
    spoilt += [{**good, "layers": {str(value) * 5000: [2, 2]}}, value]
    for content in spoilt:
        path.write_text(json.dumps(content))
        try:
            ExpertCounts.read(path)
            read += 1
        except QuantkitError as error:
            read += "\n" in str(error) or str(path) not in str(error)
    assert read <= 4  # a number is a size, and a text a type
