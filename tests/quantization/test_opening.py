"""quantize() and plan() open a model by the same steps: both accept what is asked for, or both
refuse it in the same words."""

import make_model
import pytest
import torch
from small_recipe import SMALL
from tied_model import TIED, tied_tensors

from quantkit import QuantkitError
from quantkit.calibrate.recipe import Recipe
from quantkit.grids.schemes import find_scheme
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import run

HEAD = "lm_head.weight"


class Begun(Exception):
    """quantize() has accepted everything and is about to read the first weight."""


@pytest.fixture(autouse=True)
def stopped_before_work(monkeypatch):
    def begin(*_):
        raise Begun

    monkeypatch.setattr(run, "_round", begin)


def outcome(act):
    """ "accepted", or the line of the refusal."""
    try:
        act()
    except Begun:
        return "accepted"
    except QuantkitError as fault:
        return f"{fault.problem}; {fault.remedy}"
    return "accepted"


# Models: each writes one into a folder.


def dense(change=lambda t, c: None, **sizes):
    def write(path):
        config = make_model.tiny_config(**sizes)
        tensors = make_model.random_tensors(config)
        change(tensors, config)
        return make_model.write_dense(path, config, tensors, shards=2)

    return write


def tied(path, *, same):
    tensors = tied_tensors()
    head = tensors["model.embed_tokens.weight"].clone()
    make_model.write_dense(path, TIED, tensors | {HEAD: head if same else head + 1})


def then(write, damage):
    def both(path):
        write(path)
        damage(path)

    return both


def cut(path):
    shard = sorted(path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-7])


fp8 = make_model.random_fp8
UNKNOWN = dense(lambda t, c: c.update(model_type="mamba"))
ROUNDED = {"methods": ()}

ACCEPTED = {
    # model, scheme, and arguments and recipe where there are any
    "fp8": (fp8, "awq-w4a16"),
    "dense": (dense(), "fp4-w4a16"),
    "int4 experts": (fp8, "int4-w4a8"),
    "sglang": (fp8, "fp4-w4a16", {"engine": "sglang", "format": "modelopt"}),
    "group size 16": (fp8, "awq-w4a16", {}, {"group_size": 16}),
    "rounded only": (fp8, "int8-a8w8c16", {"format": "modelslim"}, ROUNDED),
    "unknown architecture, rounded": (UNKNOWN, "rtn-w4a16"),
    "no tokenizer, rounded": (
        then(fp8, lambda path: (path / "tokenizer.json").unlink()),
        "rtn-w4a16",
    ),
    "tied head, stored": (lambda path: tied(path, same=True), "awq-w4a16"),
}
REFUSED = {
    "group size 16 of an engine": (fp8, "awq-w4a16", {"engine": "vllm"}, {"group_size": 16}),
    "unknown architecture for vllm": (UNKNOWN, "rtn-w4a16", {"engine": "vllm"}),
    "tied head, another": (lambda path: tied(path, same=False), "awq-w4a16"),
    "no tokenizer": (then(fp8, lambda path: (path / "tokenizer.json").unlink()), "awq-w4a16"),
    "bad tokenizer": (
        then(fp8, lambda path: (path / "tokenizer.json").write_text("{}")),
        "rtn-w4a16",
    ),
    "unknown architecture": (UNKNOWN, "awq-w4a16"),
    "no such format": (fp8, "awq-w4a16", {"format": "gguf"}),
    "engine without the scheme": (fp8, "int4-w4a8", {"engine": "vllm"}),
    "engine without the format": (fp8, "int8-a8w8c16", {"engine": "vllm", "format": "modelslim"}),
    "group size of int8": (fp8, "int8-a8w8c16", {}, {"group_size": 64}),
    "descent without GPTQ": (fp8, "awq-w4a16", {}, {"methods": ("awq", "descent")}),
    "no experts": (dense(first_k_dense_replace=3, num_nextn_predict_layers=0), "int4-w4a8"),
    "tensor missing": (dense(lambda t, c: t.pop("model.norm.weight")), "rtn-w4a16"),
    "tensor unknown": (
        dense(lambda t, c: t.update({"model.extra.weight": torch.ones(4)})),
        "rtn-w4a16",
    ),
    "shape": (dense(lambda t, c: t.update({"model.norm.weight": torch.ones(8)})), "awq-w4a16"),
    "shard cut": (then(fp8, cut), "rtn-w4a16"),
    "no config.json": (then(fp8, lambda path: (path / "config.json").unlink()), "rtn-w4a16"),
}


@pytest.mark.parametrize("name", ACCEPTED | REFUSED)
def test_plan_says_what_quantize_says(name, text, tmp_path):
    write, scheme, *more = (ACCEPTED | REFUSED)[name]
    arguments, changes, *_ = *more, {}, {}
    source, chosen = tmp_path / "source", find_scheme(scheme)
    write(source)
    recipe = Recipe(scheme=scheme, calibration=str(text), **SMALL | changes)
    wanted = {"format": "auto", **arguments}
    planned = outcome(lambda: plan(source, chosen, PlanOptions(recipe=recipe, **wanted)))
    assert planned == outcome(
        lambda: run.quantize(
            source, tmp_path / "out", chosen, recipe=recipe, device="cpu", **wanted
        )
    )
    assert (planned == "accepted") == (name in ACCEPTED), planned
