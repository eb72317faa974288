"""Rotary frequencies and scales against transformers, over descriptions of every kind; what is not
computed is refused by name."""

import itertools

import pytest
import torch
from refused import refused
from tiny_models import CASES
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3RotaryEmbedding,
    yarn_apply_mscale,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantkit.models.rope import Rope, _cached_frequencies

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}


def combinations(base, choices):
    """`base` with every combination of the choices; a choice of "-" leaves the key as it is in
    `base`."""
    for values in itertools.product(*choices.values()):
        yield {**base, **{key: value for key, value in zip(choices, values) if value != "-"}}


DESCRIPTIONS = [
    {"rope_type": "default"},
    *combinations({"rope_type": "linear"}, {"factor": (1.0, 2, 4.5)}),
    *combinations(
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {
            "factor": (1.0, 8.0),
            "original_max_position_embeddings": (64, 1024, "-"),
            "high_freq_factor": (2, "-"),
        },
    ),
    *combinations(
        YARN, {"beta_fast": (None, 16), "beta_slow": (None, 0), "truncate": ("-", False)}
    ),
    *combinations(YARN, {"mscale": ("-", 0, 0.7), "mscale_all_dim": ("-", 0, 1.0)}),
    *combinations(YARN, {"factor": (1.0, None, 40), "attention_factor": ("-", None, 1.3)}),
    *combinations(
        YARN, {"original_max_position_embeddings": (4096, 16), "truncate": (False, True)}
    ),
    *combinations({"rope_type": "yarn"}, {"factor": (2.0, 32), "beta_fast": ("-", 1)}),
]
HEADS = (16, 64, 80, 96, 112, 128)


def config_of(description, dim, theta, spelling):
    """config.json in one of the spellings that are about: the newer one, the older, its older name
    of the kind, and outside the object."""
    described, config = dict(description), {"max_position_embeddings": 4096, "head_dim": dim}
    if spelling == "rope_parameters":
        return {
            **config,
            "rope_parameters": described if theta is None else {**described, "rope_theta": theta},
        }
    if spelling == "type":
        described["type"] = described.pop("rope_type")
    if spelling == "outside" and described.get("original_max_position_embeddings"):
        config["original_max_position_embeddings"] = described.pop(
            "original_max_position_embeddings"
        )
    return (
        {**config, "rope_scaling": described}
        if theta is None
        else {**config, "rope_scaling": described, "rope_theta": theta}
    )


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type", "outside"])
def test_frequencies_and_scale_equal_transformers(spelling):
    thetas = (None, 10000.0, 500000, 1e6)
    for number, description in enumerate(DESCRIPTIONS):
        dim, theta = HEADS[number % len(HEADS)], thetas[number % len(thetas)]
        config = config_of(description, dim, theta, spelling)
        peer = LlamaRotaryEmbedding(
            LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, **config)
        )
        # What transformers saves of it is read too.
        for read in (config, peer.config.to_dict()):
            rope = Rope.from_dict(read, dim, interleaved=False)
            torch.testing.assert_close(
                rope.inverse_frequencies(), peer.inv_freq, rtol=2e-6, atol=0, msg=f"{read}"
            )
            assert rope.cos_sin_factor == pytest.approx(peer.attention_scaling, rel=1e-6), read
        cos, sin = peer(torch.zeros(1), torch.arange(5)[None])
        ours = rope.cos_sin(torch.arange(5))
        torch.testing.assert_close(ours[0], cos[0, :, : dim // 2], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours[1], sin[0, :, : dim // 2], rtol=1e-4, atol=1e-5)


def test_deepseek_scales_its_softmax_as_transformers_does():
    for description in DESCRIPTIONS:
        if description.get("factor", 1.0) is None:  # transformers fails there
            continue
        peer = DeepseekV3RotaryEmbedding(
            DeepseekV3Config(max_position_embeddings=4096, rope_parameters=dict(description))
        )
        rope = Rope.from_dict(
            {"max_position_embeddings": 4096, "rope_parameters": description}, 64, interleaved=True
        )
        torch.testing.assert_close(rope.inverse_frequencies(), peer.inv_freq, rtol=2e-6, atol=0)
        assert rope.cos_sin_factor == pytest.approx(peer.attention_scaling, rel=1e-6)
        assert rope.softmax_factor == pytest.approx(
            yarn_apply_mscale(peer.config.rope_parameters, 1.0), rel=1e-6
        ), description


@pytest.mark.parametrize(("description", "told"), CASES["rope_refused"])
def test_what_is_not_computed_is_refused_by_name(description, told):
    for spelling in ("rope_parameters", "rope_scaling"):
        with refused(told.replace("rope_parameters", spelling)):
            Rope.from_dict(
                {"max_position_embeddings": 4096, spelling: description}, 64, interleaved=False
            )


def test_partial_rotation_and_odd_heads_are_refused():
    with refused(r"partial_rotary_factor = 0\.25"):
        Rope.from_dict({"partial_rotary_factor": 0.25}, 64, interleaved=False)
    assert Rope.from_dict({"partial_rotary_factor": 1.0}, 64, interleaved=False).theta == 10000.0
    with refused("65 channels"):
        Rope.from_dict({}, 65, interleaved=False)


def test_frequencies_that_are_kept_are_computed_once(monkeypatch):
    rope, computed = Rope(64, 54321.0, interleaved=True), []
    compute = Rope.inverse_frequencies
    monkeypatch.setattr(
        Rope,
        "inverse_frequencies",
        lambda self, device="cpu": computed.append(device) or compute(self, device),
    )
    with torch.inference_mode():
        first = _cached_frequencies(rope, torch.device("cpu"))
    assert _cached_frequencies(rope, torch.device("cpu")) is first
    assert len(computed) == 1
    assert not first.is_inference()
    assert torch.equal(first, compute(rope))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_frequencies_of_a_captured_step_are_those_that_are_kept():
    rope, positions = Rope(64, 12345.0, interleaved=True), torch.arange(5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rope.cos_sin(positions)
    rope.cos_sin(positions)  # these are kept
    positions += 3
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(captured, rope.cos_sin(positions), strict=True))
