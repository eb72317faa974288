"""Head and embedding: tied, they are stored once and load in transformers; rounded where an override
names them, they are calibrated, stored for engines to find and computed as stored."""

import json

import make_model
import pytest
import small_recipe
import torch
from quantized import quantized, stop_when
from refused import refused
from tied_model import TIED, tied_tensors

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid
from quantkit.models.context import CausalContext
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture, read_overrides

TOKENS = torch.randint(8, 320, (24,), generator=torch.Generator().manual_seed(1))
INT8, FOUR = IntGrid(8, None, symmetric=True), IntGrid(4, 32, symmetric=True)
HEAD8 = "lm_head bits=8"
TABLE4 = "model.embed_tokens bits=4 group_size=32"


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    config = {**TIED, "tie_word_embeddings": False}
    return make_model.write_dense(
        tmp_path_factory.mktemp("untied") / "source", config, tied_tensors(config)
    )


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model.write_dense(tmp_path_factory.mktemp("tied") / "source", TIED, tied_tensors())


def rounded(source, out, *overrides, scheme="rtn-w4a16", format="compressed-tensors", **options):
    """options: of the recipe, or `engine` and `on_event` of the run. Its findings."""
    run = {name: options.pop(name) for name in ("engine", "on_event") if name in options}
    recipe = Recipe(scheme=scheme, **{"methods": [], **options})
    mixture = Mixture(override=read_overrides(overrides))
    return quantized(source, out, recipe, format, mixture=mixture, **run).findings


def block(out):
    return json.loads((out / "config.json").read_text())["quantization_config"]


@torch.inference_mode()
def logits(path):
    loaded = load_model(path, device="cpu", dtype="float32", backend="reference")
    return loaded.model.logits(loaded.model(TOKENS, CausalContext([len(TOKENS)])))


def test_a_calibrated_head_loses_less_than_a_rounded_one(untied, text, tmp_path):
    """The KL of the run is that of the head in its four bits, and so is plain rounding's."""
    recipe = small_recipe.SMALL | {"calibration": str(text), "methods": ["gptq", "descent"]}
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
    recipe = small_recipe.SMALL | {"calibration": str(text), "methods": ["gptq"]}
    asked = {"scheme": "w8a16", **recipe}
    whole = rounded(untied, tmp_path / "whole", HEAD8, TABLE4, **asked)

    stop = stop_when(lambda event: getattr(event, "phase", "") == "judging")
    with pytest.raises(KeyboardInterrupt):
        rounded(untied, tmp_path / "again", HEAD8, TABLE4, on_event=stop, **asked)
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


@torch.inference_mode()
def difference(path, dtype):
    """Relative difference of transformers' logits, in `dtype`, from those of the dequantized
    weights in float32."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(TOKENS[None]).logits[0].float()
    ours = logits(path)
    return float((theirs - ours).norm() / ours.norm())


@pytest.mark.parametrize(
    ("scheme", "own", "dtype", "most"),
    # compressed-tensors divides int8 activations by amax / 127.5 and quantkit by amax / 127; NVFP4
    # is decoded to BF16.
    [
        ("rtn-w4a16", (), torch.float32, 1e-5),
        ("int8-a8w8c16", (), torch.float32, 0.1),
        ("fp4-w4a16", (), torch.bfloat16, 0.05),
        ("rtn-w4a16", ("lm_head bits=4",), torch.float32, 1e-5),
    ],
)
def test_transformers_computes_what_is_stored(tied, untied, tmp_path, scheme, own, dtype, most):
    out = tmp_path / "out"
    rounded(untied if own else tied, out, *own, scheme=scheme, engine="transformers")
    assert own or block(out)["ignore"] == ["lm_head"]
    assert check_checkpoint("transformers", Checkpoint.open(out)) == []
    assert difference(out, dtype) < most


def with_head(path, head):
    return make_model.write_dense(path, TIED, {**tied_tensors(), "lm_head.weight": head})


def test_a_head_that_is_stored_although_tied_is_dropped(tied, tmp_path):
    stored = with_head(tmp_path / "stored", tied_tensors()["model.embed_tokens.weight"])
    for path, out in ((tied, "plain"), (stored, "again")):
        rounded(path, tmp_path / out, format="awq")
    plain, again = (Checkpoint.open(tmp_path / out) for out in ("plain", "again"))
    assert plain.tensors.keys() == again.tensors.keys()
    entry = json.loads((tmp_path / "again/manifest.json").read_text())["tensors"]["lm_head.weight"]
    assert (entry["status"], "ties" in entry["reason"]) == ("dropped", True)
    load_model(stored, device="cpu")


def test_a_stored_head_that_is_not_the_embedding_is_refused(tmp_path):
    head = tied_tensors()["model.embed_tokens.weight"].clone()
    head[17, 3] += 1
    path = with_head(tmp_path / "model", head)
    with refused(r"lm_head\.weight .* differs from model\.embed_tokens\.weight"):
        load_model(path, device="cpu")
    with refused(r"set \"tie_word_embeddings\": false"):
        rounded(path, tmp_path / "out", format="awq")
    assert not (tmp_path / "out").exists()


def test_convert_lists_the_head_of_a_source_that_does_not(tied, tmp_path):
    """ModelOpt's list names no tied head where the producer left it out; compressed-tensors must
    have it."""
    rounded(tied, tmp_path / "modelopt", scheme="fp4-w4a16", format="modelopt")
    for name in ("config.json", "hf_quant_config.json"):
        path = tmp_path / "modelopt" / name
        path.write_text(path.read_text().replace('"lm_head"', ""))
    convert(tmp_path / "modelopt", tmp_path / "out", format="compressed-tensors")
    assert block(tmp_path / "out")["ignore"] == ["lm_head"]
    assert difference(tmp_path / "out", torch.bfloat16) < 0.05


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


@pytest.mark.parametrize("scheme", ["rtn-w4a16", "fp8-w8a8"])
def test_a_head_of_any_vocabulary_is_in_groups(scheme, tmp_path):
    """Zero points are packed along the outputs, eight to a word."""
    config = {**TIED, "tie_word_embeddings": False, "vocab_size": 321}
    source = make_model.write_dense(tmp_path / "source", config, tied_tensors(config))
    rounded(source, tmp_path / "out", "lm_head bits=4 group_size=32", scheme=scheme)
    assert Checkpoint.open(tmp_path / "out").linears["lm_head"].grid == FOUR


@pytest.mark.parametrize(
    ("overrides", "asked", "told"),
    [
        (["lm_head bits=8 group_size=48"], {}, "give group_size=128, which divides its 256"),
        ([HEAD8], {"engine": "vllm-ascend", "scheme": "int8-a8w8c16"}, "lm_head .* cannot be int8"),
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


def test_a_size_of_the_output_has_the_head_chosen(untied, text, tmp_path):
    recipe = Recipe(scheme="awq-w4a16", calibration=str(text), **small_recipe.SMALL)
    heads, kl = {}, {}
    whole = sum(info.nbytes for info in Checkpoint.open(untied).tensors.values())
    for name, mixture in (
        ("small", Mixture(size=int(0.33 * whole))),
        ("large", Mixture(size=int(0.95 * whole))),
        ("kept", Mixture(size=int(0.6 * whole), ignore=("lm_head",))),
    ):
        out = tmp_path / name
        made = quantized(untied, out, recipe, mixture=mixture)
        written = Checkpoint.open(out)
        heads[name] = written.linears["lm_head"].grid if "lm_head" in written.linears else None
        kl[name] = json.loads((out / "sensitivities.json").read_text())["kl"]
        assert sum(info.nbytes for info in written.tensors.values()) <= mixture.size
        assert ("lm_head" in made.allocation["grids"]) == (name in ("small", "large"))
    assert heads["small"].bits == 4
    assert heads["large"] in (None, IntGrid(8, 128, symmetric=True))
    assert heads["kept"] is None
    assert 0 < kl["small"]["lm_head"]["int8-g128"] < kl["small"]["lm_head"]["nvfp4"]
