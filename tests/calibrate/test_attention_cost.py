"""What an error inside attention is said to cost is, up to one factor for each linear, what it does
cost in the residual stream."""

import make_model
import pytest
import quantize_job
import torch
from letters import write_letters
from packed_model import GROUPED, write_random

from quantkit.calibrate import walk
from quantkit.calibrate.hidden_states import no_experts
from quantkit.calibrate.scales import FoldedTensors
from quantkit.calibrate.sublayer import LayerWeights
from quantkit.calibrate.sublayer_solver import attention_costs, solve_sublayer
from quantkit.quant.gptq import Curvature

DIRECTIONS = 12
LLAMA = GROUPED | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def squares(curvature):
    """U U^T with rows as they lie in memory, [P, n, n]."""
    root = torch.empty_like(curvature.factor).scatter_(
        -2, curvature.order.unsqueeze(-1).expand_as(curvature.factor), curvature.factor
    )
    return root @ root.mT


def measured(scaled, folded, states, module, error):
    """What it costs in the stream that the outputs of a linear have `error` [N], times a random
    number for each token."""
    sublayer = scaled.sublayer
    tensors = {row.name: folded[row.name] for row in sublayer.needed}
    length = states.quantized.lengths[0]
    hidden = states.quantized.hidden[:length]

    def run(tensors):
        return sublayer.run(sublayer.build(LayerWeights(tensors, no_experts)), hidden, [length])

    before = run(tensors)
    w = tensors[f"{module}.weight"]
    random = torch.randn(4, w.shape[1], generator=torch.Generator().manual_seed(0))
    cost, outputs = 0.0, sublayer.outputs
    batched = (one[None] for one in (outputs.factor, outputs.energy, outputs.order))
    stream = squares(Curvature(*batched))[0]
    for row in random:
        change = 1e-3 * float(w.norm()) / float(row.norm()) * torch.outer(error, row)
        lost = run(tensors | {f"{module}.weight": w + change}) - before
        cost += float(((lost @ stream) * lost).sum())
    return cost


def compared(scaled, source, states):
    """projection -> told and measured costs [2, DIRECTIONS] of errors in one head, from the
    cheapest direction to the dearest."""
    folded, found = FoldedTensors(scaled.sublayer, source, scaled.folding), {}
    projections = {row.module: row.projection for row in scaled.sublayer.rows}
    for module, curvature in attention_costs(scaled, folded).items():
        costs = squares(curvature)
        values, vectors = torch.linalg.eigh(costs[0])
        chosen = torch.linspace(0, len(values) - 1, DIRECTIONS).long()
        errors = torch.cat(
            [vectors[:, chosen].t(), vectors.new_zeros(DIRECTIONS, (len(costs) - 1) * len(values))],
            dim=1,
        )
        told = [measured(scaled, folded, states, module, error) for error in errors]
        found[str(projections[module])] = torch.stack([values[chosen], torch.tensor(told)])
    return found


def latent(path):
    """A small DeepSeek-V3."""
    config = make_model.tiny_config(num_hidden_layers=2, **make_model.FEW_EXPERTS)
    return make_model.write_fp8(path, config, make_model.random_tensors(config))


def grouped(path):
    """A small Llama whose heads share values in pairs."""
    return write_random(path, LLAMA)


@pytest.mark.parametrize(
    ("kind", "projections"), [("latent", {"q_a", "q_b", "kv_a"}), ("grouped", {"v"})]
)
def test_told_costs_are_those_that_are_measured(kind, projections, tmp_path, monkeypatch):
    found = []

    def solve(scaled, source, states, ranks, original=None):
        if (
            scaled.sublayer.name.endswith("attend") and scaled.sublayer.outputs is not None
        ):  # of an MTP layer nothing is known
            found.append(compared(scaled, source, states))
        return solve_sublayer(scaled, source, states, ranks, original)

    monkeypatch.setattr(walk, "solve_sublayer", solve)
    monkeypatch.setitem(quantize_job.SMALL, "output_damping", 0.05)  # it is added to both costs
    source = latent(tmp_path / "source") if kind == "latent" else grouped(tmp_path / "source")
    quantize_job.run(source, write_letters(tmp_path / "calibration.txt"), tmp_path / "out")
    assert len(found) == 2
    for layer in found:
        assert layer.keys() == projections
        for projection, costs in layer.items():
            assert torch.corrcoef(costs.log())[0, 1] > 0.85, (projection, costs)
            assert costs[1, -3:].min() > 2 * costs[1, :3].max(), (projection, costs)
