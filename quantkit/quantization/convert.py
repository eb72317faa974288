"""convert(): decode format A and encode format B unit by unit, without calibration, or to plain
BF16.

Codes and zero points do not change; MXFP4 becomes NVFP4 with the same values if its powers of two
allow it (grids/nvfp4.py). The dtype of scales may change, and values that become unquantized; for
every part of the model the largest relative error is measured and written into manifest.json. Zero
means bit-exact.

Memory is one unit, UNIT_BYTES of output or the largest single tensor, a few copies of it in
float32, and what waits to be written (`checkpoint.writer.WAITING`).
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from quantkit.checkpoint.output_dir import complete_manifest
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.source_guard import SourceGuard
from quantkit.checkpoint.writer import CheckpointWriter, prepare
from quantkit.common.devices import dtype_name, parse_dtype
from quantkit.common.progress import Note, OnEvent, Progress, ignore_event, peak_memory
from quantkit.common.result import Result
from quantkit.common.sizes import format_bytes, format_duration
from quantkit.quantization.conversion_plan import (
    Change,
    ConversionPlan,
    Item,
    activation_bits,
    target_name,
)
from quantkit.quantization.model_card import NAME as CARD
from quantkit.quantization.model_card import model_card


@dataclass(frozen=True, repr=False)
class ConversionReport(Result):
    """Result of a conversion. Bytes are of tensors; peak_memory is this process's largest resident
    set, in bytes.

    changes: by kind and part, such as "awq to compressed-tensors: experts" or "copied".
    activation_bits: of the inputs of quantized linears, in the source and in the output.
    """

    out: Path
    source_format: str
    format: str
    source_bytes: int
    output_bytes: int
    seconds: float
    peak_memory: int
    changes: dict[str, Change]
    activation_bits: tuple[int, int]
    done_already: bool = False
    """`out` was already complete, from the same source and settings."""

    @property
    def exact(self) -> bool:
        return all(change.max_relative_error == 0 for change in self.changes.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "exact": self.exact}

    @property
    def heading(self) -> str:
        return "converted"

    def facts(self) -> list[tuple[str, str]]:
        line = "{:,} weights, largest relative difference {:.1e}"
        return [
            ("written to", f"{self.out} ({self.format}, from {self.source_format})"),
            ("size", f"{format_bytes(self.output_bytes)}, from {format_bytes(self.source_bytes)}"),
            ("time", format_duration(self.seconds)),
            ("peak memory", format_bytes(self.peak_memory)),
            ("exact", "yes, every value" if self.exact else "no"),
            *(
                [("activations", "{1} bits, {0} in the source".format(*self.activation_bits))]
                if len(set(self.activation_bits)) == 2
                else []
            ),
            *(
                (f"  {what}", line.format(one.weights, one.max_relative_error))
                for what, one in self.changes.items()
            ),
        ]


def convert(
    source: Path,
    out: Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    on_event: OnEvent = ignore_event,
) -> ConversionReport:
    """Write the checkpoint `source` to the directory `out` in another format, or unquantized in
    `dtype` (bfloat16 or bf16, and so on).

    Raises QuantkitError before any work if the format cannot hold the weights: rounding them is
    what `quantkit quantize` does. A stopped conversion resumes when it is called again with the
    same arguments; a complete one returns its report.
    """
    start = time.perf_counter()
    prepare(out, [source])
    plan = ConversionPlan(
        Checkpoint.open(source),
        target_name(format, dtype),
        None if dtype is None else parse_dtype(dtype),
    )
    units = {f"{number:05d} {unit[0].name}": unit for number, unit in enumerate(plan.units())}
    guard = SourceGuard(
        plan.checkpoint,
        {
            name: [part for item in unit for part in plan.parts(item)]
            for name, unit in units.items()
        },
    )
    if not overwrite and (manifest := complete_manifest(out, plan.fingerprint())):
        guard.verify_output(out, manifest)
        return _report(
            plan,
            out,
            start,
            {key: Change(**change) for key, change in manifest["changes"].items()},
            done_already=True,
        )
    if plan.note:
        on_event(Note(plan.note))
    writer = CheckpointWriter(
        out,
        plan.specs(),
        fingerprint=plan.fingerprint(),
        overwrite=overwrite,
        inputs=[source],
        guard=guard,
    )
    with writer, writer.report_interrupt(units):
        writer.check_source()
        if resumed := writer.progress(units):
            on_event(Note(f"resuming {out}: {resumed}"))
        changes = _write(plan, units, writer, on_event)
        writer.finish(
            plan.config(), plan.files() | {CARD: _card(plan, changes)}, plan.manifest(changes)
        )
    return _report(plan, out, start, changes)


def _card(plan: ConversionPlan, changes: dict[str, Change]) -> bytes:
    name = plan.target.name
    option = "format" if plan.cast_to is None else "dtype"
    wanted = name if plan.cast_to is None else dtype_name(plan.cast_to)
    largest = max((change.max_relative_error for change in changes.values()), default=0.0)
    facts = [
        ("format", f"{name}, from {plan.checkpoint.format.name}"),
        ("largest relative difference of a weight", f"{largest:.1e}"),
    ]
    command = f"quantkit convert {plan.checkpoint.path} --{option} {wanted}"
    grids = [plan.grid] if plan.grid is not None else []
    return model_card(plan.checkpoint, wanted, name, grids, facts, command)


def _write(
    plan: ConversionPlan, units: dict[str, list[Item]], writer: CheckpointWriter, on_event: OnEvent
) -> dict[str, Change]:
    """Write unfinished units; returns the changes in all of them."""
    changes: dict[str, Change] = {}
    done = 0
    for name, unit in units.items():
        found = writer.is_done(name)
        if found:
            noted = writer.facts(name)["changes"]
        else:
            tensors, facts = plan.convert(unit)
            noted = {key: asdict(change) for key, change in facts.items()}
            writer.write(name, tensors, {"changes": noted})
        for key, change in noted.items():
            changes[key] = changes.get(key, Change()) + Change(**change)
        done += sum(plan.source_bytes(item) for item in unit)
        worst = max((change.max_relative_error for change in changes.values()), default=0.0)
        on_event(
            Progress(
                "converting",
                unit[0].name,
                done,
                plan.total_bytes,
                worst,
                psutil.Process().memory_info().rss,
                done / plan.total_bytes,
                found,
            )
        )
    return changes


def _report(
    plan: ConversionPlan,
    out: Path,
    start: float,
    changes: dict[str, Change],
    *,
    done_already: bool = False,
) -> ConversionReport:
    return ConversionReport(
        out=out,
        source_format=plan.checkpoint.format.name,
        format=plan.target.name,
        source_bytes=plan.total_bytes,
        output_bytes=sum(spec.nbytes for spec in plan.specs()),
        seconds=time.perf_counter() - start,
        peak_memory=peak_memory(),
        changes=changes,
        activation_bits=(
            activation_bits(plan.checkpoint),
            16 if plan.grid is None else plan.target.activation_bits_of(plan.grid),
        ),
        done_already=done_already,
    )
