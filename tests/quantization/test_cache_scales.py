"""int8-a8w8c8, from a source to tokens: steps of an int8 cache are found, written as ModelSlim has
them, told, and used."""

import json
import shutil

import make_model
import pytest
import small_recipe
import torch
from compressed_tensors.quantization import QuantizationConfig
from edited import edited_tensor
from greedy import greedy
from packed_model import GROUPED, write_random
from paged_pass import PROMPTS, causal_pass, paged_pass
from quantized import quantized
from quantkit_kernels import KeySteps
from refused import refused

from quantkit.calibrate import cache_scales
from quantkit.calibrate.cache_scales import best_scale, best_scales
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.progress import ignore_event
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.inspect import describe
from quantkit.engines.check import check_checkpoint
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import find_scheme
from quantkit.models.cache_scales import power_of_two_ratios
from quantkit.quantization import quantize
from quantkit.quantization.convert import convert
from quantkit.quantization.options import QuantizeOptions
from quantkit.quantization.request import read_scheme

SMALL = small_recipe.SMALL | {"samples": 10, "held_out": 4, "seq_len": 48, "min_expert_tokens": 32}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Latents and keys whose channels differ by more than a code has room for."""
    folder, config = tmp_path_factory.mktemp("models"), make_model.tiny_config(num_hidden_layers=2)
    tensors, generator = make_model.random_tensors(config), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "layernorm" in name:
            tensors[name] = (
                tensor.float() * (1.5 * torch.randn(tensor.shape, generator=generator)).exp()
            ).bfloat16()
    return {
        "latents": make_model.write_fp8(folder / "latents", config, tensors),
        "keys": write_random(folder / "keys", GROUPED),
    }


def run(source, out, text, scheme="int8-a8w8c8", on_event=ignore_event):
    recipe = Recipe(scheme=scheme, calibration=str(text), output_curvature=False, **SMALL)
    return quantized(source, out, recipe, "modelslim", on_event=on_event).out


@pytest.fixture(scope="module")
def outputs(sources, text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    return {kind: run(source, folder / kind, text) for kind, source in sources.items()}


@pytest.fixture(params=["latents", "keys"])
def kind(request):
    return str(request.param)


def loaded(path, cache="int8"):
    return load_model(path, device="cpu", dtype="float32", cache=cache)


def test_steps_are_stored_and_told_as_modelslim_has_them(outputs, kind):
    written = Checkpoint.open(outputs[kind])
    told = json.loads((outputs[kind] / "quant_model_description.json").read_text())
    names = {
        "latents": {
            f"model.layers.{layer}.self_attn.fa_k.{part}"
            for layer in (0, 1, 2)
            for part in ("scale", "offset")
        },
        "keys": {
            f"model.layers.{n}.self_attn.{side}_proj.kv_cache_{part}"
            for n in (0, 1)
            for side in "kv"
            for part in ("scale", "offset")
        },
    }[kind]
    assert {name for name in written.tensors if "fa_" in name or "kv_cache" in name} == names
    for name in names:
        tensor = written.read(name)
        assert tensor.shape == ((1, 1) if kind == "latents" else (64,))
        assert tensor.dtype == (torch.int8 if name.endswith("fa_k.offset") else torch.bfloat16)
        assert bool((tensor > 0).all()) == name.endswith("scale")
        assert told[name] == {"latents": "FAQuant", "keys": "C8"}[kind]
    key, said = {"latents": ("fa_quant_type", "FAKQuant"), "keys": ("kv_cache_type", "C8")}[kind]
    assert told[key] == said
    assert written.scheme.name == "int8-a8w8c8"
    assert not diagnose(outputs[kind]).findings.found


@torch.inference_mode()
def test_the_cache_holds_codes_of_known_steps_and_is_read_by_them(outputs, kind):
    """Prompts in chunks, then a token a row, as one causal pass over what the cache holds."""
    model = loaded(outputs[kind])
    found, paged, slots = paged_pass(model)
    exact, by_token = (
        causal_pass(model, torch.int8, **own) for own in ({"steps": model.steps}, {})
    )
    apart = (causal_pass(model, None) - exact).norm()
    assert (found - exact).norm() < 0.05 * apart
    assert (by_token - exact).norm() > 0.2 * apart, "a step a token has other codes"
    for layer, kept in enumerate(paged.layers):
        steps = model.steps[layer]
        if isinstance(steps, KeySteps):
            assert all(bool((scales.view(-1)[2 * slots] == 1).all()) for scales in kept[2:])
        else:
            assert bool((kept[2].view(-1)[slots] == steps).all())


def test_the_kl_that_is_told_is_that_of_the_int8_cache(
    sources, outputs, text, tmp_path, monkeypatch
):
    """Steps 64 times as wide leave next to nothing of a latent, and weights alone lose what they
    lost."""
    monkeypatch.setattr(cache_scales, "best_scale", lambda x, counts: best_scale(x, counts) * 64)
    coarse = run(sources["latents"], tmp_path / "coarse", text)
    told = [
        json.loads((path / "report.json").read_text())["held_out"]["kl"]
        for path in (outputs["latents"], coarse)
    ]
    assert told[1] > 1.5 * told[0]


def test_fp8_scales_go_with_any_scheme_of_compressed_tensors(sources, text, tmp_path, monkeypatch):
    """Described as llm-compressor does, and used in the KL that is told: values beyond them are cut
    off."""
    options = QuantizeOptions(kv_cache="fp8")

    def made(name, source="keys"):
        scheme, _, _ = read_scheme("w8a16", options)
        recipe = Recipe(scheme="w8a16", calibration=str(text), methods=("gptq",), **SMALL)
        out = tmp_path / name
        quantize(sources[source], out, scheme, "auto", recipe, device="cpu")
        kl = json.loads((out / "report.json").read_text())["held_out"]["kl"]
        return Checkpoint.open(out), kl

    checkpoint, kl = made("out")
    scales = [
        checkpoint.read(f"model.layers.{n}.self_attn.{s}_scale") for n in (0, 1) for s in "kv"
    ]
    assert all(scale.shape == (1,) for scale in scales)
    said = QuantizationConfig.model_validate(checkpoint.config["quantization_config"])
    cache = said.kv_cache_scheme
    assert (cache.num_bits, cache.type, cache.strategy) == (8, "float", "tensor")
    assert describe(checkpoint).cache == "FP8, 4 stored scales, one for each tensor"
    assert check_checkpoint("vllm", checkpoint) == []
    monkeypatch.setattr(cache_scales, "_FLOAT_SHARES", (2.0**-6,))
    small, coarse = made("coarse")
    assert small.read("model.layers.0.self_attn.k_scale") < scales[0] / 32
    assert coarse > 1.5 * kl
    with refused("this model keeps another"):
        made("latents", "latents")


@pytest.mark.parametrize(
    ("kind", "options"), [("keys", {"tp": 2}), ("latents", {"draft_length": 1})]
)
def test_ranks_and_drafts_change_no_token(outputs, kind, options):
    alone, found = (
        greedy(outputs[kind], PROMPTS, 8, cache="int8", **more) for more in ({}, options)
    )
    assert alone == found


def test_it_is_inspected_checked_and_converted_like_any_other(sources, outputs, kind, tmp_path):
    """What the steps are is known; other formats leave them out."""
    about = describe(Checkpoint.open(outputs[kind]))
    assert (about.scheme, about.missing, about.unknown) == ("int8-a8w8c8", [], [])
    found = diagnose(str(outputs[kind]), source=str(sources[kind]), depth="tensors").findings
    assert not found.has("error-large"), found.to_json()
    for options in ({"format": "compressed-tensors"}, {"dtype": "bf16"}):
        convert(outputs[kind], out := tmp_path / "-".join(options.values()), **options)
        names = Checkpoint.open(out).tensors
        assert not [name for name in names if "fa_k" in name or "kv_cache" in name]
        assert load_model(out, device="cpu", cache="int8").codes == torch.int8
    assert not loaded(outputs[kind], None).steps
    assert not loaded(outputs[kind], "fp8").steps, "steps are of int8"


def test_a_cache_with_an_offset_is_refused_in_int8_alone(outputs, tmp_path):
    """As some publish it; engines' decoding leaves the offset out."""
    shifted = shutil.copytree(outputs["keys"], tmp_path / "shifted")
    with edited_tensor(shifted, "model.layers.1.self_attn.v_proj.kv_cache_offset") as offset:
        offset[3] = 7
    with refused(r"layers\.1\.self_attn\.v_proj\.kv_cache_offset of .* is not zero"):
        loaded(shifted)
    assert loaded(shifted, "fp8").codes == torch.float8_e4m3fn


def test_best_steps_cut_what_is_rare_and_far_away():
    """Of 65,536 numbers of unit size and one of 10, where 0.8 of the step loses 21.6 + 4.0, and all
    of it 33.9."""
    x = torch.randn(65536, 3, generator=torch.Generator().manual_seed(0))
    whole = best_scales(x)
    x[0, 1] = 10.0
    found, largest = best_scales(x), 10 / 127
    assert torch.equal(found, found.bfloat16().float())
    assert found[[0, 2]].equal(whole[[0, 2]])
    assert 0.7 * largest < found[1] < 0.81 * largest
    assert best_scale(x, torch.tensor([1.0, 0.0, 1.0])) < found[1], "a channel that counts nothing"
    assert power_of_two_ratios(torch.tensor([0.0, 1.0, 2.9, 0.3])).equal(
        torch.tensor([1.0, 4.0, 8.0, 1.0])
    )


def test_who_cannot_have_it_is_told_so(sources, outputs, tmp_path):
    scheme = find_scheme("int8-a8w8c8")
    llama = GROUPED | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    for source, methods, engine, said in (
        (sources["keys"], (), None, "cache scales, which calibration determines"),
        (sources["keys"], None, "sglang", "sglang does not load int8-a8w8c8: it reads no scales"),
        (
            write_random(tmp_path / "llama", llama),
            None,
            "vllm-ascend",
            "vllm-ascend reads no scales of an int8 cache of llama",
        ),
    ):
        recipe = Recipe(scheme=scheme.name, methods=methods)
        with refused(said):
            quantize(source, tmp_path / "a", scheme, "auto", recipe, engine=engine, device="cpu")
    for engine, severities in (("vllm-ascend", set()), ("sglang", {"error"})):
        found = check_checkpoint(engine, Checkpoint.open(outputs["latents"]))
        assert {one.severity for one in found if "cache" in one.problem} == severities, found
