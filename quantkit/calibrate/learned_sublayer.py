"""The dense MLP or the shared expert of a sublayer, its three linears with codes that are learned together, once all are rounded."""

from collections.abc import Sequence

import torch
from quantkit_kernels import Gating
from torch import Tensor

from quantkit.calibrate.hidden_states import HiddenStates
from quantkit.calibrate.layer_weights import LayerWeights
from quantkit.calibrate.learned_mlp import MlpLoss, MlpRows, cost_matrix, learn_mlp
from quantkit.calibrate.parameter_reader import ParameterReader
from quantkit.calibrate.routing import no_experts
from quantkit.calibrate.scale import FoldedTensors, Scaled
from quantkit.calibrate.solve import SolvedSublayer
from quantkit.calibrate.solver import Solved
from quantkit.models.reading import Reading
from quantkit.models.table import GatedMlp, Parameter
from quantkit.quant.weights import dequantize


def learn_sublayer(scaled: Scaled, solved: SolvedSublayer, source: ParameterReader, states: HiddenStates, gating: Gating) -> SolvedSublayer:
    """With what was learned, where the sublayer has such an MLP and a scale can move inside it. states: the quantized path's, before the
    sublayer. A gate that weighs a shared expert's output is not heeded: all tokens count alike."""
    linears = dict(solved.linears)
    for mlp in _mlps(scaled.sublayer.rows):
        if mlp.biases or not gating.is_linear_in_up or not linears.keys() >= set(mlp.modules):
            continue
        folded = FoldedTensors(scaled.sublayer, source, scaled.folding)
        sources = [folded[row.name] for row in mlp.rows]
        before = [Solved(one.weight, dequantize(one.weight), one.error, one.method) for one in (linears[name] for name in mlp.modules)]
        inner, between = (
            Reading.of(one.weight, scaled.sublayer.solvers.of(name).activation_bits)
            for one, name in ((before[0], mlp.modules[0]), (before[2], mlp.modules[2]))
        )
        x = _inputs(scaled, dict(folded), mlp.gate.module, states)
        target = torch.cat([_output(sources, part, gating) for part in x.split(states.batch_tokens)])
        rows = MlpRows(inner(x), target, torch.ones_like(x[:, 0]))
        loss = MlpLoss(gating, between, cost_matrix(scaled.sublayer.outputs))
        fitted, held_out = rows.some(slice(states.fitted)), rows.some(slice(states.fitted, None))
        learned = learn_mlp(sources, before, fitted, held_out, loss, scaled.sublayer.solvers.recipe)
        linears |= {name: one.rounded for name, one in zip(mlp.modules, learned)}
    return SolvedSublayer(linears, solved.plain)


def _mlps(rows: Sequence[Parameter]) -> list[GatedMlp]:
    by_block = [[row for row in rows if row.block == block and row.role in ("linear", "bias")] for block in ("mlp", "shared_expert")]
    return [GatedMlp.of(own) for own in by_block if own]


def _inputs(scaled: Scaled, tensors: dict[str, Tensor], module: str, states: HiddenStates) -> Tensor:
    """What `module` reads of every token, [T, K]; no linear is computed for it."""
    found: list[Tensor] = []

    def observer(name: str, x: Tensor) -> None:
        if name == module:
            found.append(x.reshape(-1, x.shape[-1]))

    sublayer = scaled.sublayer
    block = sublayer.build(LayerWeights(tensors, no_experts, observer, unread=frozenset(row.module for row in sublayer.rows)))
    for batch in states.batches():
        sublayer.run(block, states.hidden[batch.part], batch.lengths)
    return torch.cat(found)


def _output(sources: Sequence[Tensor], x: Tensor, gating: Gating) -> Tensor:
    gate, up, down = sources
    return gating(x @ gate.t(), x @ up.t()) @ down.t()
