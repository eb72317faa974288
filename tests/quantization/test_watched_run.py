"""Architectures that quantkit has no file for, calibrated: what is written, what the report says of
it, and going on after a stop."""

import json
import re

import pytest
import torch
import transformers
from letters import write_letters
from make_model import CONFIGS, write_dense
from quantized import quantized
from refused import refused
from sample_sizes import sized
from small_recipe import SMALL, sequences_of
from torch.nn import functional as F
from transformers.core_model_loading import revert_weight_conversion
from transformers_peers import checkpoint_tensors

from quantkit import SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
from quantkit.executor.hf_engine import open_engine
from quantkit.executor.options import EngineOptions
from quantkit.grids.base import dequantize
from quantkit.models import ARCHITECTURES
from quantkit.models.hf_traced.architecture import TracedArchitecture
from quantkit.quantization.convert import convert
from quantkit.quantization.mixed_precision import Mixture

TRACED = CONFIGS["traced"]
SIZES, EXPERTS = TRACED["all"], TRACED["experts"]
CALIBRATED = TRACED["calibrated"][:: sized(2, 1)]


def peer(model_type, **extra):
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(**{**SIZES, "model_type": model_type, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        drawn = torch.randn_like(parameter)
        value = 0.5 + drawn * 0.3 if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5
        parameter.data = value.bfloat16().float()
    return model


def without_file(monkeypatch, model_type):
    """As if quantkit had no file of the architecture, where it has one."""
    others = tuple(one for one in ARCHITECTURES if one != model_type)
    monkeypatch.setattr("quantkit.models.ARCHITECTURES", others)


def written(model, path):
    as_it_is = model.config.model_type in (*STACKED, "longcat_flash")
    tensors = (
        revert_weight_conversion(model, model.state_dict())
        if as_it_is
        else checkpoint_tensors(model)
    )
    return write_dense(
        path,
        model.config.to_dict(),
        {name: one.bfloat16().clone() for name, one in tensors.items()},
    )


def run(source, out, scheme, told=None):
    lines = [] if told is None else told
    return quantized(
        source, out, recipe_of(source, scheme), on_event=lambda event: lines.append(str(event))
    )


def is_rounded_alone(source, told):
    """Rounded to nearest and measured; calibration refuses it and says `told`."""
    run(source, source.parent / "out", "rtn-w4a16")
    found = measure(
        str(source.parent / "out"),
        [torch.arange(5, 40)],
        PerplexityOptions(baseline=str(source), device="cpu"),
    )
    assert 0 < found.kl < 0.5
    with refused(re.escape(told)):
        run(source, source.parent / "calibrated", "awq-w4a16")


def recipe_of(source, scheme):
    """With a text of its own, beside the source."""
    text = write_letters(source.parent / "calibration.txt", 600)
    return Recipe(scheme=scheme, calibration=str(text), **SMALL | {"seq_len": 48})


def stored(path):
    """What a checkpoint's tensors stand for."""
    checkpoint = Checkpoint.open(path)
    packed = {name for module in checkpoint.linears for name in checkpoint.parts(module)}
    linears = {
        f"{module}.weight": dequantize(checkpoint.weight(module)) for module in checkpoint.linears
    }
    return linears | {
        name: checkpoint.read(name).float() for name in checkpoint.tensors if name not in packed
    }


STACKED = ("llama4_text", "gemma4_text")
"""Published so, and not as gpt-oss is."""


def stacked(tensors, model):
    """By transformers' names, with the experts as it has them."""
    architecture = TracedArchitecture(model.config.to_dict())
    for found in architecture.experts.values():
        inner, outer = sorted(found.parameters, key=lambda name: "down" in name)
        each = [[tensors.pop(name) for name in dict.fromkeys(triple)] for triple in found.names]
        tensors[inner] = torch.stack([torch.cat(first) for *first, _ in each])
        tensors[outer] = torch.stack([down for *_, down in each])
        if model.config.model_type == "llama4_text":
            tensors |= {name: tensors[name].mT for name in (inner, outer)}
    names = {disk: name for name, disk in architecture.skeleton.published.items()}
    return {names.get(name, name): one for name, one in tensors.items()}


@pytest.mark.parametrize(
    ("model_type", "scheme", "extra"),
    CALIBRATED,
    ids=[case[0] for case in CALIBRATED],
)
def test_the_report_says_of_the_output_what_transformers_says(
    model_type, scheme, extra, tmp_path, monkeypatch
):
    """KL on the held-out text, computed once more by transformers' whole model over what was
    written."""
    without_file(monkeypatch, model_type)
    model, told = peer(model_type, **extra), []
    source = written(model, tmp_path / model_type)
    report = run(source, tmp_path / "out", scheme, told)
    found = report.findings.next_token
    # What decays a state and mixes streams keeps 16 bits.
    assert report.coverage.share > (0.9 if model_type == "qwen4_exp_text" else 0.98)
    assert any(
        "computed by transformers' modules: " in line and "scale groups proven" in line
        for line in told
    )
    assert len(report.findings.scales) >= (0 if model_type in ("flex_olmo", "minimax") else 2)
    sequences = sequences_of(recipe_of(source, scheme), source)
    with torch.inference_mode():
        before = torch.cat(
            [model(input_ids=ids[None]).logits[0] for ids in sequences.held_out]
        ).log_softmax(-1)
        unknown = model.load_state_dict(
            stacked(stored(tmp_path / "out"), model), strict=False
        ).unexpected_keys
        assert set(unknown) <= {"embed_out.weight"}  # which is not quantized
        after = torch.cat(
            [model(input_ids=ids[None]).logits[0] for ids in sequences.held_out]
        ).log_softmax(-1)
    assert found["kl"] == pytest.approx(
        float(F.kl_div(after, before, log_target=True, reduction="batchmean")), rel=5e-3
    )
    assert found["kl"] < found["plain_kl"]
    if model_type in STACKED:  # plain again, and as transformers saved it: nothing is missing
        again = convert(tmp_path / "out", tmp_path / "plain", dtype="fp32").out
        kind = transformers.AutoModelForCausalLM
        loaded, facts = kind.from_pretrained(again, output_loading_info=True)
        assert not any(
            facts[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        assert all(
            torch.equal(one, model.state_dict()[name]) for name, one in loaded.state_dict().items()
        )


@pytest.mark.parametrize("model_type", ["qwen4_exp_text", "gemma4_text"])
def test_grids_are_chosen_where_more_follows_the_experts(model_type, tmp_path, monkeypatch):
    """Mixing of streams, and a norm of what experts and linears next to them made."""
    without_file(monkeypatch, model_type)
    extra = next(own for name, _, own in TRACED["calibrated"] if name == model_type)
    source = written(peer(model_type, **extra), tmp_path / model_type)
    recipe = recipe_of(source, "awq-w4a16")
    report = quantized(source, tmp_path / "out", recipe, mixture=Mixture(bits=7.0))
    told = json.loads((tmp_path / "out/report.json").read_text())["allocation"]
    assert 6.0 < told["bits"] <= 7.0
    assert told["size"] == report.output_bytes


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("gemma2", "awq-w4a16"), ("granitemoe", "int8-a8w8c16"), ("granitemoe", "nvfp4-w4a4")],
)
def test_ppl_tells_the_kl_that_the_report_tells(model_type, scheme, tmp_path):
    """Which counts the last tokens, too."""
    source = written(peer(model_type, **EXPERTS), tmp_path / model_type)
    report = run(source, tmp_path / "out", scheme)
    held_out = sequences_of(recipe_of(source, scheme), source).held_out
    beside = PerplexityOptions(baseline=str(source), device="cpu")
    found = measure(str(tmp_path / "out"), held_out, beside)
    assert found.kl == pytest.approx(report.findings.next_token["kl"], rel=0.1)
    assert found.tokens == sum(len(one) - 1 for one in held_out)


@pytest.mark.parametrize(
    ("model_type", "extra", "refused"), TRACED["run"], ids=[case[0] for case in TRACED["run"]]
)
def test_what_is_not_calibrated_runs_as_transformers_computes_it(
    model_type, extra, refused, tmp_path, monkeypatch
):
    without_file(monkeypatch, model_type)
    model = peer(model_type, **extra)
    source = written(model, tmp_path / model_type)
    (done,) = open_engine(EngineOptions(source, device="cpu")).generate(
        [[5, 6, 7]], SamplingParams(max_new_tokens=6, ignore_eos=True)
    )
    assert done.fault is None
    text = [5, 6, 7]
    with torch.inference_mode():
        for _ in range(6):
            logits = model(input_ids=torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
    assert done.token_ids == text[3:]
    if refused:
        is_rounded_alone(source, refused)


def test_sizes_that_do_not_go_together_are_told_in_a_line(tmp_path):
    """Transformers builds rotary_dim 64 on heads of 32, and fails in its forward."""
    source = written(peer("gptj", rotary_dim=16), tmp_path / "gptj")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "rotary_dim": 64}))
    wrong = open_engine(EngineOptions(source, device="cpu"))
    (done,) = wrong.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    with refused("transformers fails to compute it") as fault:
        raise done.fault or AssertionError("it answers")
    assert "config.json" in fault.value.remedy


@pytest.mark.parametrize("turned", [False, True])
def test_experts_that_are_stacked_either_way(turned, tmp_path):
    """Qwen3-VL-MoE is published with its experts turned, and transformers 5 saves them as it
    computes with them."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    text = {
        **SIZES,
        **EXPERTS,
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 256,
        "rope_parameters": rope,
    }
    vision = dict.fromkeys(("hidden_size", "intermediate_size"), 32) | {"depth": 1, "num_heads": 2}
    vision |= {"out_hidden_size": 128, "deepstack_visual_indexes": [0]}
    vision |= {"num_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(
        "qwen3_vl_moe", text_config=text, vision_config=vision
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    tensors = {
        name: one.mT.contiguous() if turned and ".experts." in name else one.clone()
        for name, one in model.state_dict().items()
    }
    source = write_dense(
        tmp_path / "source", {**model.config.to_dict(), "vocab_size": SIZES["vocab_size"]}, tensors
    )
    ids = torch.arange(5, 25)
    with torch.inference_mode():
        expected = F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:]).exp()
    found = measure(str(source), [ids], PerplexityOptions(device="cpu"))
    assert found.ppl == pytest.approx(float(expected), rel=1e-4)
    report = run(source, tmp_path / "out", "awq-w4a16")
    assert report.coverage.share > 0.75  # beside a vision tower
    beside = PerplexityOptions(baseline=str(source), device="cpu")
    assert 0 < measure(str(report.out), [ids], beside).kl < 0.01
