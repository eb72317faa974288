"""convert(): from one format to another without calibration, or to plain BF16: decode format A, encode format B, write.

Codes and zero points are never touched; MXFP4 becomes NVFP4 with the same values where its powers of two allow it (quant/mxfp4.py). What
may change is the dtype of scales, and values that become plain; for every part of the model the largest relative error is measured while
converting and written into manifest.json. Zero means bit-exact.

Memory is one unit, UNIT_BYTES of output or the largest single tensor, a few copies of it in float32, and what waits to be written
(`checkpoint.writer.WAITING`).
"""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from quantkit import __version__
from quantkit.amounts import size, span
from quantkit.checkpoint.companions import read_companions
from quantkit.checkpoint.formats import FORMATS, compressed_int4, dense
from quantkit.checkpoint.formats.base import Format, output_config
from quantkit.checkpoint.formats.nvfp4 import Nvfp4
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.manifest import made_for
from quantkit.checkpoint.reader import Checkpoint, check_finite
from quantkit.checkpoint.watch import Watch
from quantkit.checkpoint.writer import CheckpointWriter, prepare
from quantkit.devices import dtype_named
from quantkit.engines.profiles import part_of
from quantkit.errors import QuantkitError
from quantkit.models import by_name, is_known
from quantkit.models.stored import check_listed, read_model
from quantkit.models.table import Parameter
from quantkit.progress import Note, OnEvent, Progress, peak_memory, silent
from quantkit.quant.mxfp4 import largest_exponent, to_nvfp4
from quantkit.quant.weights import Fp4Weight, Fp8BlockWeight, IntWeight, Mxfp4Weight, Weight, dequantize
from quantkit.result import Result
from quantkit.schemes import Fp4Grid, Grid, Mxfp4Grid

UNIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Change:
    """What became of one part of the model: how many weights, and the largest relative difference of any stored value."""

    weights: int
    max_relative_error: float


@dataclass(frozen=True, repr=False)
class ConversionReport(Result):
    """What came of a conversion. Bytes are of tensors; peak_memory is this process's largest resident set, in bytes.

    changes: by what happened and where, such as "awq to compressed-tensors: experts" or "copied".
    """

    out: Path
    source_format: str
    format: str
    source_bytes: int
    output_bytes: int
    seconds: float
    peak_memory: int
    changes: dict[str, Change]
    done_already: bool = False
    """Nothing was done: `out` was there, complete, from the same source and settings."""

    @property
    def exact(self) -> bool:
        return all(change.max_relative_error == 0 for change in self.changes.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "exact": self.exact}

    @property
    def heading(self) -> str:
        return "converted"

    def facts(self) -> list[tuple[str, str]]:
        told = "{:,} weights, largest relative difference {:.1e}"
        return [
            ("written to", f"{self.out} ({self.format}, from {self.source_format})"),
            ("size", f"{size(self.output_bytes)}, from {size(self.source_bytes)}"),
            ("time", span(self.seconds)),
            ("peak memory", size(self.peak_memory)),
            ("exact", "yes, every value" if self.exact else "no"),
            *((f"  {what}", told.format(one.weights, one.max_relative_error)) for what, one in self.changes.items()),
        ]


def convert(
    source: Path,
    out: Path,
    *,
    format: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    on_event: OnEvent = silent,
) -> ConversionReport:
    """Write the checkpoint `source` to the directory `out` in another format, or plain in `dtype` (bfloat16 or bf16, and so on).

    Raises QuantkitError before any work where the format cannot hold the weights: rounding them is what `quantkit quantize` does.
    A conversion that was stopped goes on when it is called again with the same arguments; of one that is complete the report is told
    again.
    """
    start = time.perf_counter()
    prepare(out, [source])
    plan = _Plan(Checkpoint.open(source), _target_name(format, dtype), None if dtype is None else dtype_named(dtype))
    units = {f"{number:05d} {unit[0].name}": unit for number, unit in enumerate(plan.units())}
    watch = Watch(plan.checkpoint, {name: [part for item in unit for part in plan.parts(item)] for name, unit in units.items()})
    if not overwrite and (manifest := made_for(out, plan.fingerprint())):
        watch.compare_with(out, manifest)
        return plan.report(out, start, {key: Change(**change) for key, change in manifest["changes"].items()}, done_already=True)
    writer = CheckpointWriter(out, plan.specs(), fingerprint=plan.fingerprint(), overwrite=overwrite, inputs=[source], watch=watch)
    with writer, writer.keeping(units):
        writer.check_source()
        if resumed := writer.finished(units):
            on_event(Note(f"resuming {out}: {resumed}"))
        changes = _write(plan, units, writer, on_event)
        writer.finish(plan.config(), plan.files(), plan.manifest(changes))
    return plan.report(out, start, changes)


def _write(plan: "_Plan", units: dict[str, list["_Item"]], writer: CheckpointWriter, on_event: OnEvent) -> dict[str, "Change"]:
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
            changes[key] = _joined(changes.get(key), Change(**change))
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


@dataclass(frozen=True)
class _Item:
    """A linear that is quantized in the source (`name` is the module), or any other tensor (`name` is its own).

    key: under which its change is reported. quantized: whether it is so in the output.
    """

    name: str
    linear: bool
    quantized: bool
    key: str
    specs: tuple[TensorSpec, ...]


class _Plan:
    """What every tensor of the source becomes."""

    def __init__(self, checkpoint: Checkpoint, target: str, dtype: torch.dtype | None) -> None:
        self.checkpoint = checkpoint
        self.rows = _rows(checkpoint)
        self.grid = None if target == dense.FORMAT.name else _common_grid(checkpoint)
        self.target = _find_target(checkpoint, target, self.grid)
        self.as_nvfp4 = isinstance(self.grid, Mxfp4Grid) and isinstance(self.target, Nvfp4)
        if self.as_nvfp4:
            self.grid = Fp4Grid()
        self._largest: dict[str, int] = {}
        """Largest exponent of MXFP4, by the fused module that shares a global scale."""
        self.cast_to = dtype
        self.plain_dtype = dtype or _plain_dtype(checkpoint)
        parts = {name for linear in checkpoint.linears.values() for name in linear.tensors}
        self.items = [self._linear(module) for module in checkpoint.linears]
        self.items += [self._tensor(name) for name in checkpoint.tensors if name not in parts]
        self.total_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())

    def _linear(self, module: str) -> _Item:
        row = self.rows.get(f"{module}.weight")
        role = row.role if row is not None else by_name.role(module)
        linear = self.checkpoint.linears[module]
        part = (part_of(row) if row is not None else None) or role
        holds = self.target is not dense.FORMAT and linear.format is self.checkpoint.format
        if holds and self.target.quantizes(module, role, mtp=row is not None and row.mtp):
            key = f"{linear.format.name} to {self.target.name}: {part}"
            return _Item(module, True, True, key, tuple(self.target.specs(module, linear.shape, self.grid)))
        spec = TensorSpec(f"{module}.weight", self.plain_dtype, linear.shape)
        return _Item(module, True, False, f"{linear.format.name} to {_name(self.plain_dtype)}: {part}", (spec,))

    def _tensor(self, name: str) -> _Item:
        info = self.checkpoint.tensors[name]
        # FP32 stays: the router's selection bias loses its meaning in 16 bits.
        cast = self.cast_to is not None and info.dtype in (torch.bfloat16, torch.float16) and info.dtype != self.cast_to
        dtype = self.cast_to if cast and self.cast_to is not None else info.dtype
        key = f"{_name(info.dtype)} to {_name(dtype)}" if cast else "copied"
        return _Item(name, False, False, key, (TensorSpec(name, dtype, info.shape),))

    def specs(self) -> list[TensorSpec]:
        return [spec for item in self.items for spec in item.specs]

    def units(self) -> Iterator[list[_Item]]:
        """Items in order, so many together as make UNIT_BYTES of output."""
        unit: list[_Item] = []
        size = 0
        for item in self.items:
            nbytes = sum(spec.nbytes for spec in item.specs)
            if unit and size + nbytes > UNIT_BYTES:
                yield unit
                unit, size = [], 0
            unit.append(item)
            size += nbytes
        if unit:
            yield unit

    def parts(self, item: _Item) -> tuple[str, ...]:
        """The tensors of the source that it is made from."""
        return tuple(self.checkpoint.linears[item.name].tensors) if item.linear else (item.name,)

    def source_bytes(self, item: _Item) -> int:
        return sum(self.checkpoint.tensors[name].nbytes for name in self.parts(item))

    def report(self, out: Path, start: float, changes: dict[str, Change], *, done_already: bool = False) -> ConversionReport:
        return ConversionReport(
            out=out,
            source_format=self.checkpoint.format.name,
            format=self.target.name,
            source_bytes=self.total_bytes,
            output_bytes=sum(spec.nbytes for spec in self.specs()),
            seconds=time.perf_counter() - start,
            peak_memory=peak_memory(),
            changes=changes,
            done_already=done_already,
        )

    def convert(self, unit: list[_Item]) -> tuple[dict[str, Tensor], dict[str, Change]]:
        """The tensors of a unit, and how they differ from the source."""
        tensors: dict[str, Tensor] = {}
        changes: dict[str, Change] = {}
        for item in unit:
            made, error = self._convert(item)
            tensors |= made
            changes[item.key] = _joined(changes.get(item.key), Change(1, error))
        return tensors, changes

    def _convert(self, item: _Item) -> tuple[dict[str, Tensor], float]:
        name, dtype = item.specs[0].name, item.specs[0].dtype
        if not item.linear:
            tensor = self.checkpoint.read(item.name)
            return ({name: tensor}, 0.0) if tensor.dtype == dtype else _cast(name, tensor.float(), dtype)
        weight = self.checkpoint.weight(item.name)
        if not item.quantized:
            return _cast(name, dequantize(weight), dtype)
        packed = self.target.pack(item.name, self._fitted(item.name, weight))
        return packed, _stored_error(item.name, weight, self.target.unpack(item.name, packed))

    def _fitted(self, module: str, weight: Weight) -> Weight:
        """As the target stores it."""
        if self.as_nvfp4 and isinstance(weight, Mxfp4Weight):
            return to_nvfp4(weight, self._shared_exponent(module))
        return fit_scales(module, weight, self.target)

    def _shared_exponent(self, module: str) -> int:
        """The largest exponent of a linear and its fused siblings."""
        row = self.rows.get(f"{module}.weight")
        fused = module if row is None or row.fused is None else row.fused
        if fused not in self._largest:
            siblings = [one.module for one in self.rows.values() if one.fused == fused] if fused != module else [module]
            weights = [self.checkpoint.weight(one) for one in siblings if one in self.checkpoint.linears]
            self._largest[fused] = max(largest_exponent(one) for one in weights if isinstance(one, Mxfp4Weight))
        return self._largest[fused]

    def fingerprint(self) -> dict[str, str]:
        target = f"{self.target.name} {self.target.variant}"
        return {"source": self.checkpoint.fingerprint, "format": target, "dtype": str(self.cast_to), "version": __version__}

    def config(self) -> dict[str, Any]:
        block = self.target.config_block(self.grid, self._quantized(), self._plain())
        config = output_config(self.checkpoint.config, block)
        if self.cast_to is not None:
            named = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
            config[named] = str(self.cast_to).removeprefix("torch.")
        return config

    def files(self) -> dict[str, bytes]:
        return read_companions(self.checkpoint.path) | self.target.extra_files(self.grid, self._quantized(), self._plain())

    def manifest(self, changes: dict[str, Change]) -> dict[str, Any]:
        told = {key: asdict(change) for key, change in sorted(changes.items())}
        return {"converted_from": self.checkpoint.format.name, "changes": told, "tensors": self._became()}

    def _quantized(self) -> dict[str, Grid | None]:
        return {item.name: self.grid for item in self.items if item.quantized}

    def _plain(self) -> list[TensorSpec]:
        return [spec for item in self.items if not item.quantized for spec in item.specs]

    def _became(self) -> dict[str, dict[str, Any]]:
        """Every tensor of the source, and what it became."""
        entries: dict[str, dict[str, Any]] = {}
        for item in self.items:
            became = [spec.name for spec in item.specs]
            status = "copied" if item.key == "copied" else "converted"
            for name in self.parts(item):
                entries[name] = {"status": status, "became": became}
        return dict(sorted(entries.items()))


def fit_scales(module: str, weight: Weight, target: Format) -> Weight:
    """The weight with scales rounded to what `target` stores; the same object where they already are."""
    if not isinstance(weight, IntWeight):
        return weight
    scale = weight.scale.to(target.scale_dtype).float()
    if not bool(torch.isfinite(scale).all()) or bool(((scale == 0) & (weight.scale != 0)).any()):
        raise QuantkitError(f"{module} has scales that {_name(target.scale_dtype)} cannot hold", f"{target.name} is not for this model")
    return replace(weight, scale=scale)


def _target_name(format: str | None, dtype: str | None) -> str:
    if (format is None) == (dtype is None):
        raise QuantkitError("convert takes either a format or a dtype", "give --format F, or --dtype bf16 for plain weights")
    return format if format is not None else dense.FORMAT.name


def _find_target(checkpoint: Checkpoint, name: str, grid: Grid | None) -> Format:
    named = [format for format in FORMATS if format.name == name]
    if not named:
        raise QuantkitError(f"format {name!r} is not known", f"choose one of {', '.join(dict.fromkeys(format.name for format in FORMATS))}")
    if name == dense.FORMAT.name:
        return named[0]
    source = checkpoint.format
    if grid is None:
        fault = f"{checkpoint.path} is {source.name}, and {name} holds rounded weights"
        raise QuantkitError(fault, "convert does not round: use quantkit quantize")
    for format in sorted(named, key=lambda one: one is source or not one.holds(grid)):
        if format is source:
            raise QuantkitError(f"{checkpoint.path} is already {name} {format.variant}", "there is nothing to convert")
        if format.holds(grid) or (isinstance(grid, Mxfp4Grid) and isinstance(format, Nvfp4)):
            exact = format is compressed_int4.FORMAT and source.scale_dtype == torch.float16
            return compressed_int4.FP16_SCALES if exact else format
    holders = ", ".join(dict.fromkeys(format.name for format in FORMATS if format.holds(grid)))
    raise QuantkitError(f"{name} cannot hold the weights of {checkpoint.path} ({grid})", f"formats that can: {holders}")


def _common_grid(checkpoint: Checkpoint) -> Grid | None:
    grids = {linear.grid for linear in checkpoint.linears.values() if linear.format is checkpoint.format}
    if len(grids) > 1:
        fault = f"{checkpoint.path} has weights on {len(grids)} grids"
        raise QuantkitError(fault, "only checkpoints with one can be converted; --dtype bf16 makes it plain")
    return next(iter(grids), None)


def _rows(checkpoint: Checkpoint) -> dict[str, Parameter]:
    """The table of the architecture by tensor name; empty for one that quantkit does not compute, which converts all the same."""
    if not is_known(checkpoint.config):
        check_listed(checkpoint, [])
        return {}
    return {row.name: row for row in read_model(checkpoint).rows}


def _plain_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What a decoded weight is stored in where no dtype was asked for: the model's own 16 bits."""
    said = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    return torch.float16 if said == "float16" else torch.bfloat16


def _stored_error(module: str, weight: Weight, stored: Weight) -> float:
    match weight, stored:
        case IntWeight(), IntWeight():
            assert torch.equal(weight.codes, stored.codes), module
            zero = torch.zeros_like(weight.scale, dtype=torch.int8)
            before, after = (zero if w.zero_point is None else w.zero_point for w in (weight, stored))
            assert torch.equal(before, after), module
            return _relative(weight.scale, stored.scale)
        case Fp4Weight(), Fp4Weight():
            assert torch.equal(weight.codes, stored.codes), module
            assert torch.equal(weight.scale.view(torch.uint8), stored.scale.view(torch.uint8)), module
            if not bool(torch.isfinite(stored.global_scale)):
                raise QuantkitError(
                    f"the global scale of {module} has no reciprocal in FP32", "the checkpoint is damaged: download it again"
                )
            return _relative(weight.global_scale, stored.global_scale)
        case Mxfp4Weight(), _:
            return _relative(dequantize(weight), dequantize(stored))
        case Fp8BlockWeight(), _:
            raise AssertionError("FP8 blocks convert to plain weights only")
    raise AssertionError(f"{type(weight)} became {type(stored)}")


def _cast(name: str, values: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """`values`, float32, in another dtype, and the error of that."""
    extremes = torch.stack(values.aminmax()) if values.numel() else values
    if not bool(torch.isfinite(extremes).all()):
        check_finite(name, values)
    if not bool(torch.isfinite(extremes.to(dtype)).all()):
        raise QuantkitError(f"{name} holds values that {_name(dtype)} cannot", "use --dtype bf16")
    cast = values.to(dtype)
    return {name: cast}, _relative(values, cast)


def _relative(before: Tensor, after: Tensor) -> float:
    """Largest |after / before - 1|, in few passes; where before is 0 after must be too, as casts keep it."""
    if not before.numel():
        return 0.0
    smallest, largest = torch.div(after.to(before.dtype), before).nan_to_num_(nan=1.0).aminmax()
    return max(float(largest) - 1, 1 - float(smallest))


def _joined(one: Change | None, other: Change) -> Change:
    if one is None:
        return other
    return Change(one.weights + other.weights, max(one.max_relative_error, other.max_relative_error))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
