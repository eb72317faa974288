"""`quantize --prune`: which experts go, that what is left is the smaller model written by hand, and
that no interruption shows."""

import json

import make_model
import pytest
import torch
from commands import command
from output_files import files
from quantized import quantized
from small_recipe import SMALL, sequences_of

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import Progress, ignore_event
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext
from quantkit.quantization.pruning import experts_to_keep

CONFIG = {
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_model.random_dense(tmp_path_factory.mktemp("models") / "source", **CONFIG)


def run(source, text, out, scheme="awq-w4a16", prune=0.5, listen=ignore_event):
    recipe = Recipe(scheme=scheme, calibration=str(text), prune=prune, **SMALL)
    quantized(source, out, recipe, on_event=listen)
    return out


@pytest.fixture(scope="module")
def pruned(source, text, tmp_path_factory):
    """Half of the experts, in awq-w4a16."""
    return run(source, text, tmp_path_factory.mktemp("pruned") / "out")


def kept_in(out):
    return {
        int(layer): about["kept"]
        for layer, about in json.loads((out / "pruning.json").read_text())["layers"].items()
    }


def by_hand(source, kept, folder):
    """The source with these experts alone, numbered anew, its routers cut, and config.json as that
    has to be."""
    checkpoint = Checkpoint.open(source)
    tensors = {}
    for name in checkpoint.tensors:
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else -1
        if layer in kept and ".mlp.gate." in name:
            tensors[name] = checkpoint.read(name)[kept[layer]]
        elif layer in kept and ".mlp.experts." in name:
            if int(parts[5]) in kept[layer]:
                parts[5] = str(kept[layer].index(int(parts[5])))
                tensors[".".join(parts)] = checkpoint.read(name)
        else:
            tensors[name] = checkpoint.read(name)
    config = {**checkpoint.config, "n_routed_experts": len(next(iter(kept.values())))}
    return make_model.write_dense(folder, config, tensors)


def test_what_is_left_is_the_smaller_model_quantized(source, text, pruned, tmp_path):
    """To the byte, MTP layer included: the same codes, scales and names as of the smaller model
    written by hand."""
    hand = by_hand(source, kept_in(pruned), tmp_path / "hand")
    expected = run(hand, text, tmp_path / "expected", prune=0.0)
    ours, theirs = (
        {
            name: one
            for name, one in files(out).items()
            if name.endswith((".safetensors", "config.json"))
        }
        for out in (pruned, expected)
    )
    assert ours == theirs


def test_groups_stay_whole(source, pruned):
    kept = kept_in(pruned)
    assert sorted(kept) == [1, 2]  # layer 0 is dense, layer 2 is the MTP layer
    for experts in kept.values():
        assert [expert // 4 for expert in experts] == [0, 0, 1, 1]
        assert experts == sorted(experts)
    config = json.loads((pruned / "config.json").read_text())
    del config["quantization_config"]
    assert config == Checkpoint.open(source).config | {"n_routed_experts": 4}


@torch.inference_mode()
def test_saliency_is_the_mean_of_weight_times_norm(source, text, pruned):
    """Of layer 1, computed here from the whole model's own forward."""
    loaded, seen = load_model(source, device="cpu", dtype="float32"), []
    mlp = loaded.model.layers[1].mlp
    experts = mlp.experts

    def watched(*inputs):
        seen.extend(one.clone() for one in inputs)
        return experts(*inputs)

    mlp.experts = watched
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), **SMALL)
    sequences = sequences_of(recipe, source).calibration
    loaded.model(torch.cat(sequences), CausalContext([len(s) for s in sequences], loaded.device))
    x, topk_ids, topk_weights = seen
    checkpoint, expected = Checkpoint.open(source), []
    for expert in range(8):
        gate, up, down = (
            checkpoint.read(f"model.layers.1.mlp.experts.{expert}.{p}_proj.weight").float()
            for p in ("gate", "up", "down")
        )
        tokens, slots = (topk_ids[:, :2] == expert).nonzero(as_tuple=True)
        own = x[tokens].float()
        out = (torch.nn.functional.silu(own @ gate.T) * (own @ up.T)) @ down.T
        products = topk_weights[tokens, slots] * out.norm(dim=1)
        expected.append(float(products.mean()) if len(tokens) else 0.0)
    found = json.loads((pruned / "pruning.json").read_text())["layers"]["1"]["saliency"]
    assert found == pytest.approx(expected, rel=1e-3)
    assert experts_to_keep({1: found}, 2, 2)[1] == kept_in(pruned)[1]


def test_a_run_stopped_while_it_chooses_goes_on(source, text, pruned, tmp_path):
    told, out = [], tmp_path / "out"

    def stop(event):
        if isinstance(event, Progress):
            told.append(event.unit)
            if event.unit == "layers.1" and told.count("layers.1") == 1:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        run(source, text, out, listen=stop)
    stopped = len(told)
    run(source, text, out, listen=stop)
    assert told[stopped : stopped + 2] == ["layers.1", "layers.2"], "the first is not done again"
    same = {name for name in files(pruned) if not name.startswith("report")}
    assert {name: files(out)[name] for name in same} == {name: files(pruned)[name] for name in same}
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), prune=0.5, **SMALL)
    assert quantized(source, out, recipe).done_already


def test_every_tensor_of_the_source_is_accounted_for(source, pruned):
    manifest, kept = json.loads((pruned / "manifest.json").read_text())["tensors"], kept_in(pruned)
    assert manifest.keys() == Checkpoint.open(source).tensors.keys()
    gone = (
        f"model.layers.1.mlp.experts.{next(e for e in range(8) if e not in kept[1])}.up_proj.weight"
    )
    assert manifest[gone] == {
        "became": [],
        "reason": "a routed expert that was pruned",
        "status": "dropped",
    }
    last = manifest[f"model.layers.1.mlp.experts.{kept[1][3]}.up_proj.weight"]
    assert all(name.startswith("model.layers.1.mlp.experts.3.up_proj.") for name in last["became"])


@pytest.mark.parametrize(
    ("share", "told"),
    [
        ("5%", "give --prune 25% or more"),
        ("90%", "give --prune 50% or less"),
        ("100%", "is not a share"),
        ("x", "is not a share"),
    ],
)
def test_what_cannot_be_pruned_is_told(source, text, tmp_path, share, told):
    asked = f"--scheme rtn-w4a16 --calibration {text} --out {tmp_path}/out --prune {share}"
    answer = command("quantize", str(source), *asked.split())
    assert (answer.code, answer.errors) == (1, 1)
    assert told in answer.error
    assert not list(tmp_path.iterdir())
