"""Decode steps of every kind of layer where they are captured as graphs, padded in rows and tables:
they take no number from the host, do not have it wait for one, and change no token."""

import make_model
import pytest
import torch
from engines import capture, load, tokens
from tiny_models import CONFIGS, PROMPTS, random_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit import SamplingParams

FAMILIES = [
    "gpt_oss",
    "minimax_m2",
    "qwen3_next",
    "glm_moe_dsa",
    "deepseek_v4",
    "deepseek_v41",
    "openpangu_v2",
    "qwen4_exp",
]
"""Between them every kind of attention, state, table and expert that is computed in plain torch."""
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "lift_fresh")
"""lift_fresh: a tensor made of Python's numbers."""


class HostTraffic(TorchDispatchMode):
    """Notes what a capture on CUDA would refuse."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        number = (
            bool(indices) and name != "index" and args[2].dim() == 0
        )  # PyTorch makes it on the host
        if (
            name in WAITS
            or number
            or any(one is not None and one.dtype == torch.bool for one in indices)
        ):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_has_no_traffic_with_the_host(name, tmp_path):
    config, traffic, steps = CONFIGS[name], HostTraffic(), [0]

    def watched(step, lengths):
        def run():
            steps[0] += 1
            with traffic:
                return step()

        return run

    path = make_model.write_dense(tmp_path / name, config, random_tensors(config))
    drafts = config.get("num_nextn_predict_layers", 0)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    eager = tokens(load(path, max_batch=3, max_model_len=128), PROMPTS, params)
    engine = load(path, max_batch=3, max_model_len=128, draft_length=drafts)
    capture(engine, watched, drafts).runner.prefill_runner._capture = None
    assert tokens(engine, PROMPTS, params) == eager
    assert engine.runner.why_eager == ""
    assert steps[0] > 0
    assert traffic.found == set()
