"""Models whose head is their embedding: what quantize and convert write of them loads in
transformers and computes what was stored."""

import json

import make_model
import pytest
import torch
from quantized import quantized
from refused import refused
from tied_model import TIED, tied_tensors

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.quantization.convert import convert
from quantkit.quantization.run import quantize

TOKENS = torch.randint(8, 320, (24,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_model.write_dense(tmp_path_factory.mktemp("tied") / "source", TIED, tied_tensors())


@torch.inference_mode()
def difference(path, dtype):
    """Relative difference of transformers' logits, in `dtype`, from those of the dequantized
    weights in float32."""
    from transformers import AutoModelForCausalLM

    loaded = load_model(path, device="cpu", dtype="float32", backend="reference")
    ours = loaded.model.logits(loaded.model(TOKENS, CausalContext([len(TOKENS)])))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)(TOKENS[None]).logits[0].float()
    return float((theirs - ours).norm() / ours.norm())


@pytest.mark.parametrize(
    ("scheme", "dtype", "tolerance"),
    # compressed-tensors divides int8 activations by amax / 127.5 and quantkit by amax / 127; NVFP4
    # is decoded to BF16.
    [
        ("rtn-w4a16", torch.float32, 1e-5),
        ("int8-a8w8c16", torch.float32, 0.1),
        ("fp4-w4a16", torch.bfloat16, 0.05),
    ],
)
def test_what_quantize_writes_computes_in_transformers(source, tmp_path, scheme, dtype, tolerance):
    out = tmp_path / "out"
    recipe = Recipe(scheme=scheme, methods=[])
    quantized(source, out, recipe, "compressed-tensors", engine="transformers")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == [
        "lm_head"
    ]
    assert check_checkpoint("transformers", Checkpoint.open(out)) == []
    assert difference(out, dtype) < tolerance


def with_head(path, head):
    return make_model.write_dense(path, TIED, {**tied_tensors(), "lm_head.weight": head})


def test_a_head_that_is_stored_although_tied_is_dropped(source, tmp_path):
    stored = with_head(tmp_path / "stored", tied_tensors()["model.embed_tokens.weight"])
    recipe = Recipe(scheme="rtn-w4a16", methods=[])
    for path, out in ((source, "plain"), (stored, "again")):
        quantized(path, tmp_path / out, recipe, "awq")
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
    scheme = find_scheme("rtn-w4a16")
    with refused(r"set \"tie_word_embeddings\": false"):
        quantize(
            path,
            tmp_path / "out",
            scheme,
            "awq",
            Recipe(scheme=scheme.name, methods=[]),
            device="cpu",
        )
    assert not (tmp_path / "out").exists()


def test_convert_lists_the_head_of_a_source_that_does_not(source, tmp_path):
    """ModelOpt's list names no tied head where the producer left it out; compressed-tensors must
    have it."""
    quantized(source, tmp_path / "modelopt", Recipe(scheme="fp4-w4a16", methods=[]), "modelopt")
    for name in ("config.json", "hf_quant_config.json"):
        path = tmp_path / "modelopt" / name
        path.write_text(path.read_text().replace('"lm_head"', ""))
    convert(tmp_path / "modelopt", tmp_path / "out", format="compressed-tensors")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
        "ignore"
    ] == ["lm_head"]
    assert difference(tmp_path / "out", torch.bfloat16) < 0.05
