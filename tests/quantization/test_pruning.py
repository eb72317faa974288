"""`quantize --prune`: which experts go, that what is left is the smaller model written by hand, and
that no interruption shows."""

import json

import make_model
import pytest
import torch
from commands import command
from output_files import files
from quantized import quantized
from small_recipe import SMALL

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import Progress, ignore_event
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization.pruning import experts_to_keep
from quantkit.tokenizer.chat import ChatTokenizer

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
    config = make_model.tiny_config(**CONFIG)
    return make_model.write_dense(
        tmp_path_factory.mktemp("models") / "source", config, make_model.random_tensors(config)
    )


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


def weights_of(out):
    return {
        name: content
        for name, content in files(out).items()
        if name.endswith(".safetensors") or name == "config.json"
    }


def test_what_is_left_is_the_smaller_model_quantized(source, text, pruned, tmp_path):
    """To the byte, MTP layer included: the same codes, scales and names as of the smaller model
    written by hand."""
    hand = by_hand(source, kept_in(pruned), tmp_path / "hand")
    expected = run(hand, text, tmp_path / "expected", prune=0.0)
    assert weights_of(pruned) == weights_of(expected)


def test_groups_stay_whole(source, pruned):
    kept = kept_in(pruned)
    assert sorted(kept) == [1, 2]  # layer 0 is dense, layer 2 is the MTP layer
    for experts in kept.values():
        assert [expert // 4 for expert in experts] == [0, 0, 1, 1]
        assert experts == sorted(experts)
    config = json.loads((pruned / "config.json").read_text())
    assert config | {"quantization_config": None} == Checkpoint.open(source).config | {
        "n_routed_experts": 4,
        "quantization_config": None,
    }


def test_saliency_is_the_mean_of_weight_times_norm(source, text, pruned):
    """Of layer 1, computed here from the whole model's own forward."""
    loaded = load_model(source, device="cpu", dtype="float32")
    mlp = loaded.model.layers[1].mlp
    seen = []
    original = mlp.experts
    mlp.experts = lambda x, ids, w: (
        seen.extend((x.clone(), ids.clone(), w.clone())),
        original(x, ids, w),
    )[1]
    from quantkit.calibrate.data import load_sequences

    sequences = load_sequences(
        str(text), ChatTokenizer(source), samples=6, held_out=2, seq_len=32, seed=0
    ).calibration
    with torch.inference_mode():
        loaded.model(
            torch.cat(sequences), CausalContext([len(s) for s in sequences], loaded.device)
        )
    x, topk_ids, topk_weights = seen
    checkpoint, expected = Checkpoint.open(source), []
    for expert in range(8):
        gate, up, down = (
            checkpoint.read(f"model.layers.1.mlp.experts.{expert}.{p}_proj.weight").float()
            for p in ("gate", "up", "down")
        )
        tokens, slots = (topk_ids[:, :2] == expert).nonzero(as_tuple=True)
        out = (
            torch.nn.functional.silu(x[tokens].float() @ gate.T) * (x[tokens].float() @ up.T)
        ) @ down.T
        expected.append(
            float((topk_weights[tokens, slots] * out.norm(dim=1)).mean()) if len(tokens) else 0.0
        )
    found = json.loads((pruned / "pruning.json").read_text())["layers"]["1"]["saliency"]
    assert found == pytest.approx(expected, rel=1e-3)
    assert experts_to_keep({1: found}, 2, 2)[1] == kept_in(pruned)[1]


def test_a_run_stopped_while_it_chooses_goes_on(source, text, pruned, tmp_path):
    told = []

    def stop(event):
        if isinstance(event, Progress) and event.phase == "choosing experts":
            told.append(event.unit)
            if event.unit == "layers.1" and len(told) < 3:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        run(source, text, tmp_path / "out", listen=stop)
    again = []
    run(
        source,
        text,
        tmp_path / "out",
        listen=lambda event: again.append(event.unit) if isinstance(event, Progress) else None,
    )
    assert told == ["layers.0", "layers.1"]
    assert again[:2] == ["layers.1", "layers.2"]  # the first layer is not computed again
    same = {name for name in files(pruned) if not name.startswith("report")}
    assert {name: files(tmp_path / "out")[name] for name in same} == {
        name: files(pruned)[name] for name in same
    }
    assert quantize_again(source, text, tmp_path / "out")


def quantize_again(source, text, out):
    """Whether a finished run given again has nothing to do."""
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), prune=0.5, **SMALL)
    return quantized(source, out, recipe).done_already


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


def test_plan_tells_the_bytes(source, pruned):
    planned = plan(
        source, find_scheme("awq-w4a16"), PlanOptions(recipe=Recipe(scheme="awq-w4a16", prune=0.5))
    )
    assert planned.output_bytes == sum(
        tensor.nbytes for tensor in Checkpoint.open(pruned).tensors.values()
    )


@pytest.mark.parametrize(
    ("share", "told"),
    [
        ("5%", "give --prune 25% or more"),
        ("90%", "give --prune 50% or less"),
        ("100%", "is not a share"),
        ("-1", "is not a share"),
        ("x", "is not a share"),
    ],
)
def test_what_cannot_be_pruned_is_told(source, text, tmp_path, share, told):
    given = (
        "--scheme",
        "rtn-w4a16",
        "--calibration",
        str(text),
        "--out",
        str(tmp_path / "out"),
        "--prune",
        share,
    )
    answer = command("quantize", str(source), *given)
    assert (answer.code, answer.errors) == (1, 1)
    assert told in answer.error
    assert not list(tmp_path.iterdir())


def test_a_dense_model_has_nothing_to_prune(tmp_path, text):
    config = make_model.tiny_config(
        num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0
    )
    dense = make_model.write_dense(tmp_path / "dense", config, make_model.random_tensors(config))
    answer = command(
        "quantize",
        str(dense),
        "--scheme",
        "rtn-w4a16",
        "--prune",
        "25%",
        "--out",
        str(tmp_path / "out"),
    )
    assert "no routed experts to prune" in answer.error
