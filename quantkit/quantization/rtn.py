"""Round-to-nearest without calibration: unit by unit, limited by the disk."""

import math

import psutil
import torch

from quantkit.calibrate.hidden_states import trim_heap
from quantkit.calibrate.linear_solver import LinearSolution, SolverTable
from quantkit.calibrate.output import Findings, Output
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.source_model import ParameterReader
from quantkit.common.progress import OnEvent, Progress
from quantkit.models.table import Parameter


@torch.inference_mode()
def round_units(
    source: ParameterReader,
    output: Output,
    solvers: SolverTable,
    on_event: OnEvent,
    ranks: Ranks,
    begun: float = 0.0,
) -> Findings:
    """Round every unfinished unit of this rank, and wait for the others.

    begun: share of the run's time that is already over. Errors are those of the weights: there are
    no inputs to weight them by.
    """
    output.sync(ranks)
    trim_heap()  # after calibration
    findings = Findings()
    total = sum(source.stored_bytes(row) for row in output.rows.values())
    done, process = 0, psutil.Process()
    for number, (unit, rows) in enumerate(output.units.items()):
        found = output.done(unit)
        if ranks.owns(number) and not found:
            _round_unit(unit, rows, source, output, solvers, findings)
        done += sum(source.stored_bytes(row) for row in rows)
        on_event(
            Progress(
                "rounding",
                unit,
                done,
                total,
                findings.mean_error,
                process.memory_info().rss,
                begun + (1 - begun) * done / total,
                found,
            )
        )
    output.sync(ranks)
    return _collected(output)


def _collected(output: Output) -> Findings:
    """The facts of all units, in their order."""
    findings = Findings()
    for unit in output.units:
        findings.merge(output.facts(unit))
    return findings


def _round_unit(
    unit: str,
    rows: list[Parameter],
    source: ParameterReader,
    output: Output,
    solvers: SolverTable,
    findings: Findings,
) -> None:
    weights = {row.module: source.dequantized(row) for row in rows if output.rounds(row)}
    fused = {row.module: row.fused for row in rows if row.fused}
    solved: dict[str, LinearSolution] = {}
    for solver, modules in solvers.by_solver(weights).items():
        solved |= solver.solve_rtn({module: weights[module] for module in modules}, fused)
    facts = findings.facts({module: one.result for module, one in solved.items()}, {})
    assert all(not math.isnan(one.error) for one in solved.values()), unit
    output.write(unit, {module: one.weight for module, one in solved.items()}, {}, facts)
