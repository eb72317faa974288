"""Sensitivities for a run: from the given file, from one that an earlier run left, or measured now.

OUT.sensitivities.json           the measurement; part of OUT as sensitivities.json when it is complete
OUT.sensitivities.safetensors    the paths of a stopped pass, at the input of a layer
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.data import Sequences
from quantkit.calibrate.linear_solver import SolverTable
from quantkit.calibrate.sensitivity import PassState, Sensitivities, SensitivityPass, pieces
from quantkit.calibrate.source_model import ParameterReader, SourceModel
from quantkit.common.atomic_write import write_atomic
from quantkit.common.progress import Note, OnEvent
from quantkit.quantization.bit_allocation import (
    GridOptions,
    read_sensitivities,
    rounded_labels,
    sensitivities_file,
)

NAME = "sensitivities.json"


def sensitivities_path(out: Path) -> Path:
    """Where they are stored until the output is complete."""
    return out.with_name(f"{out.name}.{NAME}")


def find_sensitivities(
    options: GridOptions,
    sequences: Sequences,
    out: Path,
    given: Path | None,
    device: torch.device,
    on_event: OnEvent,
) -> Sensitivities:
    """given: a file to read them from. Raises QuantkitError if it is of another source."""
    source = options.job.checkpoint.fingerprint
    if given is not None:
        return read_sensitivities(given, source)
    taken = _taken(options, sequences)
    text = hashlib.sha256(b"|".join(one.numpy().tobytes() for one in taken)).hexdigest()
    key = {"source": source, "text": text, "grids": rounded_labels(options.sensed())}
    for path in (sensitivities_path(out), out / NAME):
        if path.is_file() and _is_of(path, key):
            on_event(Note(f"sensitivities as measured before, from {path}"))
            return read_sensitivities(path, source)
    total = sum(tensor.nbytes for tensor in options.job.checkpoint.tensors.values())
    out.parent.mkdir(parents=True, exist_ok=True)
    state = PassState(
        out.with_name(f"{out.name}.sensitivities.safetensors"),
        json.dumps(key, sort_keys=True),
        total,
        on_event,
    )
    job = options.cheapest()
    solvers = SolverTable(job.target, job.grids.__getitem__, job.request.recipe, ())
    quantized = {row.module for row in job.linears}
    reader = ParameterReader(job.checkpoint, device)
    model = SourceModel(
        reader,
        job.inventory.architecture,
        job.inventory.config,
        job.rows,
        quantized,
        job.grids.keys() - quantized,
    )
    on_event(Note(f"measuring sensitivities on {sum(map(len, taken)):,} tokens of each path"))
    found = SensitivityPass(
        model, solvers, options.sensed(), state, job.inventory.embed_and_head(reader)
    ).run(taken)
    write_atomic(sensitivities_path(out), sensitivities_file(found, key))
    state.path.unlink(missing_ok=True)
    return found


def _taken(options: GridOptions, sequences: Sequences) -> list[Tensor]:
    """As many tokens as keep all paths, of which three copies are alive, within the memory of the
    calibrated run's hidden states."""
    layers = {row.layer for row in options.job.rows if row.layer is not None and not row.mtp}
    most = sum(len(one) for one in (*sequences.calibration, *sequences.held_out))
    return pieces(sequences.calibration, len(layers), most // 3)


def _is_of(path: Path, key: Mapping[str, str]) -> bool:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and all(facts.get(name) == value for name, value in key.items())
