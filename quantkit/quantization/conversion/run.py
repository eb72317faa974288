"""convert(): open, check everything, decode format A and encode format B unit by unit, write."""

import time
from dataclasses import asdict
from pathlib import Path

import psutil

from quantkit.checkpoint.manifest import made_for
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.source_guard import Watch
from quantkit.checkpoint.writer import CheckpointWriter, prepare
from quantkit.common.devices import parse_dtype
from quantkit.common.progress import Note, OnEvent, Progress, ignore_event
from quantkit.quantization.conversion.plan import ConversionPlan, Item
from quantkit.quantization.conversion.report import Change, ConversionReport, joined
from quantkit.quantization.conversion.target import target_name


def convert(
    source: Path,
    out: Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    on_event: OnEvent = ignore_event,
) -> ConversionReport:
    """Write the checkpoint `source` to the directory `out` in another format, or plain in `dtype`
    (bfloat16 or bf16, and so on).

    Raises QuantkitError before any work where the format cannot hold the weights: rounding them is
    what `quantkit quantize` does. A conversion that was stopped goes on when it is called again
    with the same arguments; of one that is complete the report is told again.
    """
    start = time.perf_counter()
    prepare(out, [source])
    plan = ConversionPlan(
        Checkpoint.open(source),
        target_name(format, dtype),
        None if dtype is None else parse_dtype(dtype),
    )
    units = {f"{number:05d} {unit[0].name}": unit for number, unit in enumerate(plan.units())}
    watch = Watch(
        plan.checkpoint,
        {
            name: [part for item in unit for part in plan.parts(item)]
            for name, unit in units.items()
        },
    )
    if not overwrite and (manifest := made_for(out, plan.fingerprint())):
        watch.compare_with(out, manifest)
        return plan.report(
            out,
            start,
            {key: Change(**change) for key, change in manifest["changes"].items()},
            done_already=True,
        )
    if plan.told:
        on_event(Note(plan.told))
    writer = CheckpointWriter(
        out,
        plan.specs(),
        fingerprint=plan.fingerprint(),
        overwrite=overwrite,
        inputs=[source],
        watch=watch,
    )
    with writer, writer.keeping(units):
        writer.check_source()
        if resumed := writer.finished(units):
            on_event(Note(f"resuming {out}: {resumed}"))
        changes = _write(plan, units, writer, on_event)
        writer.finish(plan.config(), plan.files(), plan.manifest(changes))
    return plan.report(out, start, changes)


def _write(
    plan: ConversionPlan, units: dict[str, list[Item]], writer: CheckpointWriter, on_event: OnEvent
) -> dict[str, Change]:
    """Units that are not written yet, and what changed in all of them."""
    changes: dict[str, Change] = {}
    done = 0
    for name, unit in units.items():
        found = writer.done(name)
        if found:
            noted = writer.note(name)["changes"]
        else:
            tensors, facts = plan.convert(unit)
            noted = {key: asdict(change) for key, change in facts.items()}
            writer.write(name, tensors, {"changes": noted})
        for key, change in noted.items():
            changes[key] = joined(changes.get(key), Change(**change))
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
