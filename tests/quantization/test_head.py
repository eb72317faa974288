"""Head and embedding rounded where an override names them: calibrated, stored for engines to find,
computed as stored; apart from each other where the source ties them."""

import json

import make_model
import pytest
import small_recipe
import torch
from letters import write_letters
from refused import refused
from tied_model import TIED, tied_tensors

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture, read_overrides

TOKENS = torch.randint(8, 320, (24,), generator=torch.Generator().manual_seed(1))
INT8, FOUR = IntGrid(8, None, symmetric=True), IntGrid(4, 32, symmetric=True)
HEAD8 = "lm_head bits=8"
TABLE4 = "model.embed_tokens bits=4 group_size=32"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return str(write_letters(tmp_path_factory.mktemp("text") / "calibration.txt", 2000))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    config = {**TIED, "tie_word_embeddings": False}
    return make_model.write_dense(
        tmp_path_factory.mktemp("untied") / "source", config, tied_tensors(config)
    )


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model.write_dense(tmp_path_factory.mktemp("tied") / "source", TIED, tied_tensors())


def rounded(
    source,
    out,
    *overrides,
    scheme="rtn-w4a16",
    format="compressed-tensors",
    engine=None,
    **recipe,
):
    made = quantize(
        source,
        out,
        find_scheme(scheme),
        format,
        Recipe(scheme=scheme, **{"methods": [], **recipe}),
        mixture=Mixture(override=read_overrides(overrides)),
        engine=engine,
        device="cpu",
    )
    return made.findings


def block(out):
    return json.loads((out / "config.json").read_text())["quantization_config"]


@torch.inference_mode()
def logits(path):
    loaded = load_model(path, device="cpu", dtype="float32", backend="reference")
    return loaded.model.logits(loaded.model(TOKENS, CausalContext([len(TOKENS)])))


def test_a_calibrated_head_loses_less_than_a_rounded_one(untied, text, tmp_path):
    """The KL of the run is that of the head in its four bits, and so is plain rounding's."""
    recipe = small_recipe.SMALL | {"calibration": text, "methods": ["gptq", "descent"]}
    recipe |= {"samples": 32, "held_out": 8, "seq_len": 48}
    found = rounded(
        untied, tmp_path / "out", "lm_head bits=4 group_size=32", scheme="w8a16", **recipe
    )
    without = rounded(untied, tmp_path / "without", scheme="w8a16", **recipe)
    kl, plain = found.next_token["kl"], found.next_token["plain_kl"]
    assert 3 * without.next_token["kl"] < kl < plain
    assert found.methods["lm_head"] == "gptq+descent"
    written = Checkpoint.open(tmp_path / "out")
    assert written.linears["lm_head"].grid.group_size == 32
    original = Checkpoint.open(untied).read("lm_head.weight").float()
    error = (dequantize(written.weight("lm_head")) - original).norm() / original.norm()
    assert 0.02 < float(error) < 0.2


def test_a_run_that_stops_after_the_head_goes_on_from_there(untied, text, tmp_path):
    recipe = small_recipe.SMALL | {"calibration": text, "methods": ["gptq"]}
    asked = {"scheme": "w8a16", **recipe}
    whole = rounded(untied, tmp_path / "whole", HEAD8, TABLE4, **asked)

    class Stopped(Exception):
        pass

    def stop(event):
        if getattr(event, "phase", "") == "judging":
            raise Stopped

    scheme, mixture = find_scheme("w8a16"), Mixture(override=read_overrides((HEAD8, TABLE4)))
    with pytest.raises(Stopped):
        quantize(
            untied,
            tmp_path / "again",
            scheme,
            "compressed-tensors",
            Recipe(**asked),
            mixture=mixture,
            device="cpu",
            on_event=stop,
        )
    again = rounded(untied, tmp_path / "again", HEAD8, TABLE4, **asked)
    assert again.next_token == whole.next_token
    one, other = (Checkpoint.open(tmp_path / out) for out in ("whole", "again"))
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.read(name), other.read(name)) for name in one.tensors)


@pytest.mark.parametrize(
    ("scheme", "format", "said"),
    [
        ("rtn-w4a16", "awq", {"lm_head": True}),
        ("w8a16", "gptq", {"lm_head": True}),
        ("fp4-w4a16", "modelopt", {"ignore": []}),
        ("fp4-w4a16", "compressed-tensors", {"ignore": []}),
    ],
)
def test_engines_are_told_of_a_head_on_the_grid_of_all(untied, tmp_path, scheme, format, said):
    own = f"lm_head scheme={scheme}"
    rounded(untied, tmp_path / "out", own, scheme=scheme, format=format)
    written, told = Checkpoint.open(tmp_path / "out"), block(tmp_path / "out")
    assert "lm_head" in written.linears
    assert said.items() <= told.items()
    if format == "compressed-tensors":
        assert told["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    if format != "gptq":
        assert check_checkpoint("vllm", written, device="cuda") == []
    before = logits(untied)
    assert (logits(tmp_path / "out") - before).norm() < 0.7 * before.norm()


def test_a_tied_head_is_stored_apart_and_both_may_be_rounded(tied, tmp_path):
    out = tmp_path / "out"
    rounded(tied, out, HEAD8, TABLE4, engine="vllm")
    written = Checkpoint.open(out)
    assert written.config["tie_word_embeddings"] is False
    assert written.linears["lm_head"].grid == INT8
    assert written.linears["model.embed_tokens"].grid == FOUR
    targets = [group["targets"] for group in block(out)["config_groups"].values()]
    assert ["lm_head"] in targets
    assert ["model.embed_tokens", "Embedding"] in targets
    assert check_checkpoint("vllm", written, device="cuda") == []
    table = Checkpoint.open(tied).read("model.embed_tokens.weight").float()
    for module, most in (("lm_head", 0.01), ("model.embed_tokens", 0.12)):
        assert (dequantize(written.weight(module)) - table).norm() < most * table.norm()
    entry = json.loads((out / "manifest.json").read_text())["tensors"]["model.embed_tokens.weight"]
    assert {"lm_head.weight", "model.embed_tokens.weight_packed"} <= {*entry["became"]}
    rounded(tied, tmp_path / "layers")
    both, layers = logits(out), logits(tmp_path / "layers")
    assert 0.001 < (both - layers).norm() / layers.norm() < 0.6


@pytest.mark.parametrize(
    ("scheme", "most"),
    # compressed-tensors divides int8 activations by amax / 127.5 and quantkit by amax / 127.
    [("rtn-w4a16", 1e-5), ("int8-a8w8c16", 0.1)],
)
def test_transformers_computes_a_rounded_head(untied, tmp_path, scheme, most):
    from transformers import AutoModelForCausalLM

    own = "lm_head bits=4" if scheme == "rtn-w4a16" else HEAD8
    rounded(untied, tmp_path / "out", own, scheme=scheme, engine="transformers")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        difference = theirs(TOKENS[None]).logits[0] - logits(tmp_path / "out")
    assert difference.norm() < most * logits(tmp_path / "out").norm()


def test_a_pattern_that_matches_linears_leaves_the_head(tied, untied, tmp_path):
    for source in (tied, untied):
        out = tmp_path / source.parent.name
        rounded(source, out, "re:.* bits=8")
        written = Checkpoint.open(out)
        assert written.linears
        assert not {"lm_head", "model.embed_tokens"} & {*written.linears}
        assert written.config["tie_word_embeddings"] == (source is tied)


def test_convert_keeps_a_rounded_head(untied, tmp_path):
    rounded(untied, tmp_path / "awq", "lm_head bits=4", format="awq")
    convert(tmp_path / "awq", tmp_path / "out", format="compressed-tensors")
    before, after = (Checkpoint.open(tmp_path / name) for name in ("awq", "out"))
    assert torch.equal(dequantize(before.weight("lm_head")), dequantize(after.weight("lm_head")))
    assert "lm_head" in block(tmp_path / "out")["config_groups"]["group_0"]["targets"]


@pytest.mark.parametrize(
    ("overrides", "asked", "told"),
    [
        ([HEAD8], {"engine": "vllm-ascend", "scheme": "int8-a8w8c16"}, "lm_head .* cannot be int8"),
        ([HEAD8], {"format": "awq"}, "awq does not hold several grids"),
        (["lm_head scheme=fp8-block-w8a8"], {}, "lm_head .* cannot be fp8"),
        ([HEAD8, "model.embed_tokens bits=8"], {}, "embed_tokens .* cannot be int8 in"),
        ([HEAD8, TABLE4], {"engine": "transformers", "format": "auto"}, "several grids"),
        (["model.embed_tokens bits=4"], {}, "override lm_head, too"),
    ],
)
def test_what_no_engine_loads_is_refused(tied, tmp_path, overrides, asked, told):
    with refused(told):
        rounded(tied, tmp_path / "out", *overrides, **asked)
    assert not (tmp_path / "out").exists()


def test_the_memory_of_tables_that_are_rounded_is_planned(tmp_path):
    config = {**TIED, "tie_word_embeddings": False, "vocab_size": 60000}
    source = make_model.write_dense(tmp_path / "source", config, tied_tensors(config))

    def needs(*overrides):
        options = PlanOptions(mixture=Mixture(override=read_overrides(overrides)))
        return plan(source, find_scheme("w8a16"), options).host_peak_bytes

    assert needs() < needs(TABLE4) < needs(HEAD8)


def test_a_size_of_the_output_has_the_head_chosen(untied, text, tmp_path):
    """Bits are those of the layers' linears: the head keeps its own."""
    recipe = Recipe(scheme="awq-w4a16", calibration=text, **small_recipe.SMALL)
    scheme, heads, kl = find_scheme("awq-w4a16"), {}, {}
    whole = sum(info.nbytes for info in Checkpoint.open(untied).tensors.values())
    for name, mixture in (
        ("small", Mixture(size=int(0.33 * whole))),
        ("large", Mixture(size=int(0.95 * whole))),
        ("bits", Mixture(bits=4.5)),
        ("kept", Mixture(size=int(0.6 * whole), ignore=("lm_head",))),
    ):
        out = tmp_path / name
        made = quantize(untied, out, scheme, "auto", recipe, mixture=mixture, device="cpu")
        written = Checkpoint.open(out)
        heads[name] = written.linears["lm_head"].grid if "lm_head" in written.linears else None
        kl[name] = json.loads((out / "sensitivities.json").read_text())["kl"]
        if mixture.size is not None:
            assert sum(info.nbytes for info in written.tensors.values()) <= mixture.size
        assert ("lm_head" in made.allocation["grids"]) == (name in ("small", "large"))
    assert heads["small"].bits == 4
    assert heads["large"] in (None, IntGrid(8, 128, symmetric=True))
    assert heads["bits"] is heads["kept"] is None
    assert kl["bits"] == kl["small"]
    assert 0 < kl["small"]["lm_head"]["int8-g128"] < kl["small"]["lm_head"]["nvfp4"]
