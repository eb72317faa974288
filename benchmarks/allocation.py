"""Do sensitivities foretell? What `quantize --bits` predicts of each choice of linears, beside what
rounding it alone costs.

    python benchmarks/allocation.py MODEL SENSITIVITIES.json TEXT.jsonl [--documents 16] [--tokens
    128]

Each choice is rounded to nearest on the smallest grid, the whole model is run in float32 on
documents of TEXT, and KL to the source is taken over all their tokens. Prints both figures and
Spearman's rank correlation over the choices.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.linear_solver import SolverTable
from quantkit.calibrate.output_cost import compare_paths
from quantkit.calibrate.recipe import load_recipe
from quantkit.checkpoint.hub import find_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.executor.weights.weights import ExecutorWeights
from quantkit.grids.base import Weight, dequantize, grid_label
from quantkit.grids.schemes import find_scheme
from quantkit.models.context import CausalContext
from quantkit.models.stored_parameters import Model, read_model
from quantkit.quantization.bit_allocation import GridOptions, read_sensitivities
from quantkit.quantization.job import open_job, read_request
from quantkit.quantization.mixed_precision import Mixture
from quantkit.tokenizer.chat import ChatTokenizer

CPU = torch.device("cpu")


class RoundedSource(Checkpoint):
    """A source with the linears of `values` in what they are rounded to."""

    values: dict[str, Tensor]

    def weight(self, module: str, device: torch.device = CPU) -> Weight:
        return self.values.get(module, dequantize(super().weight(module)))


@torch.inference_mode()
def hidden_states(source: RoundedSource, model: Model, ids: Tensor, lengths: list[int]) -> Tensor:
    weights = ExecutorWeights(
        source, model.rows, device=CPU, dtype=torch.float32, backend="reference"
    )
    return model.architecture.Model(model.config, weights)(ids, CausalContext(lengths))


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, of values without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(*ranks)) / (len(a) * (len(a) ** 2 - 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("sensitivities", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    source = RoundedSource.open(find_model(asked.model))
    source.values = {}
    scheme = find_scheme("awq-w4a16")
    recipe = load_recipe(scheme.name)
    options = GridOptions(
        open_job(read_request(scheme, "auto", None, recipe, Mixture(bits=16)), source)
    )
    tokenizer, records = (
        ChatTokenizer(source.path),
        asked.text.read_text().splitlines()[: asked.documents],
    )
    documents = [
        torch.tensor(tokenizer.encode(json.loads(record)["text"])[: asked.tokens])
        for record in records
    ]
    ids, lengths, model = torch.cat(documents), [len(one) for one in documents], read_model(source)
    original, predicted, measured = hidden_states(source, model, ids, lengths), [], []
    outer = [row for row in model.rows if row.layer is None and row.role in ("head", "embedding")]
    head = min(outer, key=lambda row: row.role != "head")  # or tied
    rows, known = dequantize(source.weight(head.module)), read_sensitivities(asked.sensitivities)
    solvers = SolverTable(
        options.job.request.target, options.cheapest().grids.__getitem__, recipe, ()
    )
    for choice in options.sensed():
        grid = options.cheapest().grids[choice.modules[0]]
        plain = {row.module: dequantize(source.weight(row.module)) for row in choice.rows}
        solved = solvers.on(grid).solve_rtn(
            plain, {row.module: row.fused for row in choice.rows if row.fused}
        )
        source.values = {module: one.values for module, one in solved.items()}
        kl = compare_paths(original, [hidden_states(source, model, ids, lengths)], [rows])[0].kl
        predicted.append(known.kl[choice.name][grid_label(grid)])
        measured.append(kl)
        print(
            f"{choice.name:60} {grid_label(grid):24} predicted {predicted[-1]:.2e} measured "
            f"{kl:.2e}",
            flush=True,
        )
    print(
        f"{len(measured)} choices, {len(ids)} tokens: rank correlation "
        f"{rank_correlation(predicted, measured):.3f}"
    )


if __name__ == "__main__":
    main()
