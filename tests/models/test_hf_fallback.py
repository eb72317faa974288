"""Models whose gate, rotary embedding, biases or tied head the architecture's file does not
compute: transformers does, whole."""

import pytest
import torch
import transformers
from letters import write_letters
from make_model import write_dense
from quantized import quantized
from refused import refused
from tiny_models import CASES as TABLES
from transformers_peers import checkpoint_tensors

from quantkit import SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.hf_engine import open_engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.worker import lead_or_follow
from quantkit.models import is_known
from quantkit.models.hf_traced.full_model import TransformersModel

SIZES = TABLES["fallback"]
CASES = TABLES["fallback_cases"]


def peer_of(case):
    model_type, extra = CASES[case]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**{**SIZES, "model_type": model_type, **extra}),
        dtype=torch.float32,
    ).eval()
    for parameter in model.parameters():
        drawn = torch.randn_like(parameter)
        parameter.data = (
            (0.5 + drawn * 0.3 if parameter.dim() == 1 else drawn * parameter.shape[-1] ** -0.5)
            .bfloat16()
            .float()
        )
    return model


def written(model, path):
    return write_dense(
        path,
        model.config.to_dict(),
        {name: one.bfloat16() for name, one in checkpoint_tensors(model).items()},
    )


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_transformers(case, tmp_path):
    """Of a text beyond the length that frequencies change at, and of a short one after it: a text
    does not depend on those before."""
    model, texts = peer_of(case), [list(range(5, 45)), [9, 8, 7], list(range(50, 70))]
    source = written(model, tmp_path / case)
    engine = open_engine(EngineOptions(source, device="cpu"))
    whole = TransformersModel(Checkpoint.open(source), torch.device("cpu"), torch.float32)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for text, done in zip(texts, engine.generate(texts, params), strict=True):
        fresh, ids = peer_of(case), torch.tensor([text])
        fresh.generation_config.eos_token_id = None
        expected = fresh.generate(ids, max_new_tokens=8, do_sample=False)[0, len(text) :].tolist()
        assert done.token_ids == expected, text
        with torch.inference_mode():
            logits = peer_of(case)(ids).logits[0]
        torch.testing.assert_close(
            whole.logits(whole.forward(ids[0]).final), logits, rtol=1e-4, atol=1e-4
        )


def test_scales_of_a_cache_need_a_table(tmp_path):
    source = written(peer_of("tanh"), tmp_path / "source")
    with refused("int8 cache, whose scales need an architecture with a table"):
        quantized(source, tmp_path / "out", Recipe(scheme="int8-a8w8c8"))


@pytest.mark.parametrize("case", ["dynamic", "tanh", "latent-tied", "latent-biases"])
def test_they_are_calibrated(case, tmp_path):
    source = written(peer_of(case), tmp_path / case)
    text = write_letters(tmp_path / "calibration.txt", 600)
    recipe = Recipe(
        scheme="awq-w4a16",
        calibration=str(text),
        samples=6,
        held_out=2,
        seq_len=48,
        scale_points=3,
        sweeps=2,
        group_size=32,
    )
    report = quantized(source, tmp_path / "out", recipe)
    assert 0 < report.findings.next_token["kl"] < 0.5
    (done,) = open_engine(EngineOptions(tmp_path / "out", device="cpu")).generate(
        [[5, 6, 7]], SamplingParams(max_new_tokens=4)
    )
    assert done.fault is None


@pytest.mark.parametrize("case", CASES)
def test_the_server_says_what_it_does_not_compute(case, tmp_path):
    config = peer_of(case).config.to_dict()
    assert not is_known(config)
    with refused(
        r"config.json has ((hidden_act|rope scaling) '\w+'|\w+ true), and quantkit's file of"
    ) as fault:
        lead_or_follow(EngineOptions(written(peer_of(case), tmp_path / case), device="cpu"))
    assert "run, eval and ppl compute it by transformers" in fault.value.remedy
