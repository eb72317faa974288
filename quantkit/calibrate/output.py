"""The output: work units written in one format, the fate of every tensor of the source, and the
progress of the run that writes it.

A unit is packed by the format, written and journaled in one step, with what the run found of it;
hidden states are stored next to the journal until the output is complete. Findings are restored
after a restart, and reported to the listener.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors import safe_open
from torch import Tensor

from quantkit.calibrate.hidden_states import stored_states, trim_heap
from quantkit.calibrate.linear_solver import LinearResult
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.source_model import ParameterReader
from quantkit.checkpoint.aux_files import read_aux_files
from quantkit.checkpoint.formats.base import Format, output_config
from quantkit.checkpoint.formats.compressed import rotated_inputs
from quantkit.checkpoint.header import TensorSpec, save_tensors
from quantkit.checkpoint.shards import host_memory
from quantkit.checkpoint.source_guard import SourceGuard
from quantkit.checkpoint.writer import CheckpointWriter, Content
from quantkit.common.progress import Note, OnEvent, Progress
from quantkit.common.result import JsonObject
from quantkit.common.scratch import give_back
from quantkit.grids.base import Grid, Weight, grid_label
from quantkit.models.table import Parameter


class HostCopies:
    """Reused host copies of device tensors with recurring names: allocating several GB anew, page
    by page, takes longer than the copy. Page-locked with a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies; those of the previous call are overwritten, or released if shape or
        dtype differs."""
        self._kept = {
            name: self._room(name, tensor).copy_(tensor.detach())
            for name, tensor in tensors.items()
        }
        return dict(self._kept)

    def _room(self, name: str, like: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == like.shape and kept.dtype == like.dtype:
            return kept
        return host_memory(like.shape, like.dtype, like.device)


@dataclass
class Output:
    """Writes units of parameters in one format. grids: of modules it holds packed. dropped: tensors
    of the source left out, with the reason. described: its config.json, apart from its
    quantization. extra_specs: tensors added to a parameter, by its name, such as cache scales."""

    source: ParameterReader
    format: Format
    grids: Mapping[str, Grid]
    units: dict[str, list[Parameter]]
    dropped: dict[str, str]
    described: Mapping[str, Any]
    extra_specs: Mapping[str, tuple[TensorSpec, ...]] = field(default_factory=dict)
    _writer: CheckpointWriter | None = None

    def __post_init__(self) -> None:
        self.rows = {row.name: row for rows in self.units.values() for row in rows}
        self._run, self._copies, self._saving = "", HostCopies(), False

    def specs(self, row: Parameter) -> list[TensorSpec]:
        """The tensors of one parameter, extra ones included."""
        return [*self._own_specs(row), *self.extra_specs.get(row.name, ())]

    def _own_specs(self, row: Parameter) -> list[TensorSpec]:
        if row.module in self.grids:
            return self.format.specs(
                row.module, (row.shape[0], row.shape[1]), self.grids[row.module]
            )
        return [TensorSpec(row.name, self.source.dtype(row), row.shape)]

    def all_specs(self) -> list[TensorSpec]:
        return [spec for row in self.rows.values() for spec in self.specs(row)]

    def source_guard(self) -> SourceGuard:
        """A guard of the source tensors of each unit. Calibration reads the embedding and the head
        before their units are written."""
        return SourceGuard(
            self.source.checkpoint,
            self._made_from(),
            early_units=[
                unit
                for unit, rows in self.units.items()
                if rows[0].layer is None and rows[0].role != "ngram_table"
            ],
        )

    def _made_from(self) -> dict[str, list[str]]:
        return {
            unit: [name for row in rows for name in self.source.parts(row)]
            for unit, rows in self.units.items()
        }

    def source_chosen(self) -> None:
        """Update the guarded source tensors after it is known which experts the units are made
        from."""
        self._guard.set_units(self.source.checkpoint, self._made_from())

    def open(
        self,
        out: Path,
        fingerprint: dict[str, str],
        *,
        overwrite: bool,
        rank: int = 0,
        inputs: Iterable[Path] = (),
    ) -> CheckpointWriter:
        """Create or resume OUT.partial. Raises QuantkitError if that is not allowed."""
        self._guard = self.source_guard()
        self._writer = CheckpointWriter(
            out,
            self.all_specs(),
            fingerprint=fingerprint,
            overwrite=overwrite,
            rank=rank,
            inputs=inputs,
            guard=self._guard,
        )
        self._run = json.dumps(fingerprint, sort_keys=True)
        return self._writer

    @property
    def writer(self) -> CheckpointWriter:
        assert self._writer is not None, "output is not open"
        return self._writer

    def rounds(self, row: Parameter) -> bool:
        """Whether the parameter is quantized, not copied packed from the source."""
        on = self.grids.get(row.module)
        return on is not None and not self.source.checkpoint.is_on(row.module, on)

    def done(self, unit: str) -> bool:
        """Whether the unit is written, by this run or the one it resumes."""
        return self.writer.is_done(unit)

    def write(
        self,
        unit: str,
        quantized: dict[str, Weight],
        unquantized: dict[str, Tensor],
        facts: JsonObject,
    ) -> None:
        """Write a unit in the background. quantized: by module. unquantized: by tensor name; absent
        tensors of the unit are copied from the source."""
        tensors: dict[str, Content] = {}
        for row in self.units[unit]:
            if row.module in quantized:
                format = self.format.of_grid(self.grids[row.module])
                tensors |= format.pack(row.module, quantized[row.module])
            elif row.role == "ngram_table":
                tensors[row.name] = self.source.checkpoint.in_parts(row.name)
            elif row.module in self.grids and not self.rounds(row):
                tensors |= self.format.pack(row.module, self.source.checkpoint.weight(row.module))
            else:
                tensors[row.name] = (
                    unquantized[row.name]
                    if row.name in unquantized
                    else self.source.unquantized(row)
                )
            tensors |= {
                spec.name: unquantized[spec.name] for spec in self.extra_specs.get(row.name, ())
            }
        self.writer.write(unit, tensors, {**facts, "changed": sorted(unquantized)})

    def sync(self, ranks: Ranks) -> None:
        """Wait until every rank has written its units, and load what the others have written."""
        self.writer.wait()
        ranks.barrier()
        self.writer.refresh()

    def facts(self, unit: str) -> JsonObject:
        """The facts stored with a finished unit."""
        return self.writer.facts(unit)

    def load(self, unit: str) -> tuple[dict[str, Weight], dict[str, Tensor], JsonObject]:
        """A finished unit: its weights on the device, its unquantized tensors, and its facts."""
        tensors, facts = self.writer.read(unit), self.writer.facts(unit)
        weights, unquantized = {}, {}
        for row in self.units[unit]:
            if self.rounds(row):
                # Packed bytes are transferred, and unpacked on the device.
                parts = {
                    spec.name: tensors[spec.name].to(self.source.device)
                    for spec in self._own_specs(row)
                }
                weights[row.module] = self.format.unpack(row.module, parts)
            elif row.module not in self.grids:
                unquantized[row.name] = tensors[row.name]
            unquantized |= {
                spec.name: tensors[spec.name] for spec in self.extra_specs.get(row.name, ())
            }
        return weights, unquantized, facts

    def save_state(
        self, layer: int, tensors: dict[str, Tensor], facts: JsonObject, *, fit: bool = True
    ) -> None:
        """Save the hidden states at the input of a layer and the findings so far for a restart,
        replacing those saved before. fit: into the host's memory, so that those of an accelerator
        are copied there and written while it goes on."""
        metadata = {"run": self._run, "layer": str(layer), "facts": json.dumps(facts)}
        waits = self.source.device.type == "cpu" or not fit
        if self._saving:  # the previous layer's copies may still be being written
            self.writer.wait()
        hidden = (
            {name: tensor.contiguous() for name, tensor in tensors.items()}
            if waits
            else self._copies.of(tensors)
        )
        self._saving = True

        def save() -> None:
            save_tensors(self.writer.state_dir / "hidden.safetensors", hidden, metadata)
            self._saving = False

        self.writer.run_after(save)  # after the units before it
        if waits:  # not copies, and they change next
            self.writer.wait()

    def load_state(
        self, scratch: Path | None = None
    ) -> tuple[int, dict[str, Tensor], JsonObject] | None:
        """The layer whose input was saved last, with the saved states and facts. scratch: as of
        `HiddenStates`."""
        path = self.writer.state_dir / "hidden.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            if metadata["run"] != self._run:  # of an unfinished output that was replaced
                return None
            names = [*file.keys()]
        tensors = {name: stored_states(path, name, scratch) for name in names}
        return int(metadata["layer"]), tensors, json.loads(metadata["facts"])

    def finish(self, grid: Grid, more: dict[str, bytes]) -> None:
        """Write config, manifest, auxiliary files, and `more`; OUT exists when this returns. grid:
        the scheme's, for formats that state one."""
        quantized: dict[str, Grid | None] = {
            row.module: self.grids[row.module]
            for row in self.rows.values()
            if row.module in self.grids
        }
        unquantized = [
            spec
            for row in self.rows.values()
            if row.module not in self.grids
            for spec in self._own_specs(row)
        ]
        unquantized += [
            spec for row in self.rows.values() for spec in self.extra_specs.get(row.name, ())
        ]
        files = read_aux_files(self.source.checkpoint.path)
        files |= self.format.extra_files(grid, quantized, unquantized)
        files |= more
        rotation = self.source.checkpoint.input_rotation
        rotated = {row.module: size for row in self.rows.values() if (size := rotation(row.module))}
        block = self.format.config_block(grid, quantized, unquantized) | rotated_inputs(rotated)
        self.writer.finish(
            output_config(self.described, block), files, {"tensors": self.manifest()}
        )

    def bytes_by_part(self) -> tuple[dict[str, int], dict[str, int]]:
        """Of the source, without dropped tensors, and of the output; the largest part of the output
        first."""
        before, after = Counter[str](), Counter[str]()
        for row in self.rows.values():
            before[row.part] += self.source.stored_bytes(row)
            after[row.part] += sum(spec.nbytes for spec in self.specs(row))
        return dict(before), dict(after.most_common())

    def manifest(self) -> dict[str, JsonObject]:
        """Every tensor of the source: quantized, copied, transformed or dropped, what it became,
        and why."""
        changed = {name for unit in self.units for name in self.writer.facts(unit)["changed"]}
        entries: dict[str, JsonObject] = {}
        for row in self.rows.values():
            became = [spec.name for spec in self.specs(row)]
            for part in self.source.parts(row):
                for info in self.source.checkpoint.stored(part):
                    fate = {"became": list[str](), **self._fate(row, changed)}
                    entries.setdefault(info.name, fate)["became"].extend(became)
        dropped = self.dropped | dict.fromkeys(
            self.source.checkpoint.pruned, "a routed expert that was pruned"
        )
        entries |= {
            name: {"status": "dropped", "reason": reason, "became": []}
            for name, reason in dropped.items()
        }
        return dict(sorted(entries.items()))

    def _fate(self, row: Parameter, changed: set[str]) -> dict[str, str]:
        if self.rounds(row):
            fate = {"status": "quantized", "grid": grid_label(self.grids[row.module])}
            block = self.source.checkpoint.input_rotation(row.module)
            return fate | ({"inputs": f"rotated in blocks of {block}"} if block else {})
        if row.module in self.grids:
            return {"status": "copied", "reason": "packed as the source has it"}
        if self.source.checkpoint.is_rotated(row.name):
            return {"status": "transformed", "reason": "rotated"}
        if row.name in changed:
            return {"status": "transformed", "reason": "scales folded in"}
        if self.source.parts(row) != (row.name,):
            return {
                "status": "transformed",
                "reason": f"decoded to {str(self.source.dtype(row)).removeprefix('torch.')}",
            }
        return {"status": "copied"}


@dataclass
class Findings:
    """What a calibrated run measured, the content of its report. Grows as units finish; after a
    restart it is restored from the facts stored with finished units."""

    errors: dict[str, float] = field(default_factory=dict)
    """module -> squared output error over squared output, on held-out inputs"""
    methods: dict[str, str] = field(default_factory=dict)
    """module -> method that quantized it"""
    scales: dict[str, list[float]] = field(default_factory=dict)
    """group -> smallest, median and largest s"""
    expert_tokens: dict[str, list[int]] = field(default_factory=dict)
    """layer -> calibration tokens of every expert"""
    expert_agreement: dict[str, float] = field(default_factory=dict)
    """layer -> share of (token, slot) choices that the quantized and the original path have in
    common"""
    hidden_error: dict[str, float] = field(default_factory=dict)
    """layer -> squared distance of the two paths over the squared norm of the original"""

    next_token: dict[str, float] = field(default_factory=dict)
    """fields of `NextTokenKl` on held-out tokens, and plain_kl, the KL of round-to-nearest; empty
    without held-out tokens"""

    def facts(
        self, linears: Mapping[str, LinearResult], scales: Mapping[str, Tensor]
    ) -> JsonObject:
        """Facts to store with a unit so that a resumed run reports the same; also merged here."""
        facts = {
            "errors": {
                module: None if math.isnan(one.error) else one.error
                for module, one in linears.items()
            },
            "methods": {module: one.method for module, one in linears.items()},
            "scales": {
                name: [float(s.min()), float(s.median()), float(s.max())]
                for name, s in scales.items()
            },
        }
        self.merge(facts)
        return facts

    def merge(self, facts: JsonObject) -> None:
        self.errors |= {
            module: math.nan if error is None else error
            for module, error in facts["errors"].items()
        }
        self.methods |= facts["methods"]
        self.scales |= facts["scales"]

    @property
    def mean_error(self) -> float:
        known = [error for error in self.errors.values() if not math.isnan(error)]
        return math.fsum(known) / len(known) if known else 0.0

    def to_dict(self) -> JsonObject:
        return asdict(self)


class ProgressLog:
    """Of one run. units: all units; source: gives their bytes; shares: of the run's expected time,
    by unit. findings: of the units finished so far."""

    def __init__(
        self,
        units: Mapping[str, Sequence[Parameter]],
        source: ParameterReader,
        store: Output,
        on_event: OnEvent,
        shares: Mapping[str, float],
    ) -> None:
        self.store, self.on_event, self._shares, self._share = store, on_event, shares, 0.0
        self.findings = Findings()
        self._bytes = {
            unit: sum(source.stored_bytes(row) for row in rows) for unit, rows in units.items()
        }
        self._total, self._done = sum(self._bytes.values()), 0
        self._found: set[str] = set()
        self._process = psutil.Process()

    def write(
        self,
        unit: str,
        linears: Mapping[str, LinearResult],
        unquantized: dict[str, Tensor],
        scales: Mapping[str, Tensor],
        *,
        owned: bool,
    ) -> None:
        """Merge the unit's facts, and write it if this rank owns it. scales: by group."""
        for module, one in linears.items():
            if one.method == "nearest":
                self.note(f"{module}: round-to-nearest is better on held-out inputs, and is used")
        facts = self.findings.facts(
            linears, scales
        )  # also for a unit that is already written: a report covers all units
        if owned:
            self.store.write(
                unit, {module: one.weight for module, one in linears.items()}, unquantized, facts
            )

    def load(self, unit: str) -> tuple[dict[str, Weight], dict[str, Tensor]]:
        """A finished unit's weights by module, and its unquantized tensors by name."""
        weights, unquantized, facts = self.store.load(unit)
        self.findings.merge(facts)
        self._found.add(unit)
        return weights, unquantized

    def merge_facts(self, unit: str) -> None:
        """Merge the facts of a unit that another rank has written."""
        self.findings.merge(self.store.facts(unit))

    def begin_phase(self, phase: str, unit: str) -> None:
        """Begin a phase of a sublayer, whose tensors have other sizes than the last: trim the heap.
        Phases of an expert reuse the blocks of the expert before."""
        trim_heap()
        self.report(phase, unit)

    def report(self, phase: str, unit: str, *, found: bool = False) -> None:
        give_back()
        memory = self._process.memory_info().rss
        self.on_event(
            Progress(
                phase,
                unit,
                self._done,
                self._total,
                self.findings.mean_error,
                memory,
                min(self._share, 1.0),
                found,
            )
        )

    def finish(self, unit: str) -> None:
        """Count the unit as done."""
        self._done += self._bytes[unit]
        self._share += self._shares.get(unit, 0.0)
        self.report("done", unit, found=unit in self._found)

    def skip(self, unit: str) -> None:
        """Count a unit of an earlier run as done; its result is not needed."""
        self._found.add(unit)
        self.finish(unit)

    def note(self, text: str) -> None:
        self.on_event(Note(text))
