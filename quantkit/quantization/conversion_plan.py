"""What every tensor of a source becomes in another format, and how stored values differ from it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.checkpoint.aux_files import read_aux_files
from quantkit.checkpoint.formats import FORMATS, compressed_int4, dense
from quantkit.checkpoint.formats.base import Format, output_config
from quantkit.checkpoint.formats.gptq import Gptq
from quantkit.checkpoint.formats.modelslim_folded import FoldedInputs
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.reader import Checkpoint, check_finite
from quantkit.checkpoint.stacked_experts import Stack, expected_stacks, is_expert_tensor
from quantkit.common.devices import dtype_name
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.common.result import JsonObject
from quantkit.engines.profiles import part_of
from quantkit.grids.base import Grid, Weight, dequantize, grid_label, relative_error
from quantkit.grids.mxfp4 import Mxfp4Grid, Mxfp4Weight
from quantkit.grids.nvfp4 import Nvfp4Grid
from quantkit.models import is_known, tensor_names
from quantkit.models.hf_traced.module_tree import read_tree
from quantkit.models.stored_parameters import check_listed, read_model
from quantkit.models.table import Parameter


def fit_scales(module: str, weight: Weight, target: Format) -> Weight:
    """The weight with scales rounded to the dtype that `target` stores; the same object if they
    already are."""
    if isinstance(weight, Tensor):
        return weight
    fitted = weight.with_scale_dtype(target.scale_dtype)
    if fitted is None:
        raise QuantkitError(
            f"{module} has scales that {dtype_name(target.scale_dtype)} cannot hold",
            f"{target.name} is not for this model",
        )
    return fitted


def cast_values(name: str, values: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], float]:
    """`values`, float32 of any shape, in another dtype under their name, and the largest relative
    error. Raises QuantkitError if a value is not finite, or does not fit `dtype`."""
    extremes = torch.stack(values.aminmax()) if values.numel() else values
    if not bool(torch.isfinite(extremes).all()):
        check_finite(name, values)
    if not bool(torch.isfinite(extremes.to(dtype)).all()):
        raise QuantkitError(
            f"{name} holds values that {dtype_name(dtype)} cannot", "use --dtype bf16"
        )
    cast = values.to(dtype)
    return {name: cast}, relative_error(values, cast)


def target_name(format: str | None, dtype: str | None) -> str:
    if (format is None) == (dtype is None):
        raise QuantkitError(
            "convert takes either a format or a dtype",
            "give --format F, or --dtype bf16 for plain weights",
        )
    return format if format is not None else dense.FORMAT.name


def find_target(checkpoint: Checkpoint, name: str, grid: Grid | None) -> Format:
    named = [format for format in FORMATS if format.name == name]
    if not named:
        raise UsageError(
            f"format {name!r} is not known",
            f"choose one of {', '.join(dict.fromkeys(format.name for format in FORMATS))}",
        )
    if name == dense.FORMAT.name:
        return named[0]
    source = checkpoint.format
    if grid is None:
        fault = f"{checkpoint.path} is {source.name}, and {name} holds rounded weights"
        raise QuantkitError(
            fault, f"convert does not round: quantkit quantize {checkpoint.path} does"
        )
    if isinstance(source, Gptq) and source.desc_act:
        fault = (
            f"{checkpoint.path} is GPTQ with desc_act: its scales belong to scattered inputs, "
            f"and {name} has groups in order"
        )
        raise QuantkitError(fault, "--dtype bf16 makes it plain")
    bits = activation_bits(checkpoint)
    able = [format for format in FORMATS if _takes(format, grid)]
    for format in sorted(
        able,
        key=lambda one: (not one.holds(grid), one.activation_bits_of(grid) != bits, one is source),
    ):
        if format.name != name:
            continue
        if format is source:
            raise QuantkitError(
                f"{checkpoint.path} is already {name} {format.variant}",
                "there is nothing to convert",
            )
        exact = format is compressed_int4.FORMAT and source.scale_dtype == torch.float16
        return compressed_int4.FP16_SCALES if exact else format
    holders = " or ".join(dict.fromkeys(one.name for one in able if one.name != source.name))
    fault = f"{name} cannot hold the weights of {checkpoint.path} ({grid_label(grid)})"
    ways = [f"use --format {holders}"] if holders else []
    ways += [f"quantkit quantize {checkpoint.path} rounds it"] if checkpoint.is_source else []
    raise QuantkitError(fault, "; ".join(ways) or "--dtype bf16 makes it plain")


def _takes(format: Format, grid: Grid) -> bool:
    """Whether it can hold such weights; NVFP4 also takes the values of MXFP4."""
    return any(format.holds(one) for one in (grid, *grid.equivalents))


def common_grid(checkpoint: Checkpoint) -> Grid | None:
    grids = {
        linear.grid for linear in checkpoint.linears.values() if linear.format is checkpoint.format
    }
    if len(grids) > 1:
        fault = f"{checkpoint.path} has weights on {len(grids)} grids"
        raise QuantkitError(
            fault, "only checkpoints with one can be converted; --dtype bf16 makes it plain"
        )
    return next(iter(grids), None)


def activation_bits(checkpoint: Checkpoint) -> int:
    """Of the inputs of its quantized linears: 8 or 4 if some are quantized, else 16."""
    return min((checkpoint.activation_bits(module) for module in checkpoint.linears), default=16)


def decoded_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Dtype of a decoded weight if none was given: the model's own 16 bits."""
    said = checkpoint.config.get("torch_dtype", checkpoint.config.get("dtype"))
    return torch.float16 if said == "float16" else torch.bfloat16


UNIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Change:
    """Change of one part of the model: number of weights, and the largest relative difference of
    any stored value."""

    weights: int = 0
    max_relative_error: float = 0.0

    def __add__(self, other: "Change") -> "Change":
        largest = max(self.max_relative_error, other.max_relative_error)
        return Change(self.weights + other.weights, largest)


@dataclass(frozen=True)
class Item:
    """A linear that is quantized in the source (`name` is the module), or any other tensor (`name`
    is its own).

    key: under which its change is reported. quantized: whether it is in the output. stack: routed
    experts that are single tensors in the source, and in the unquantized output one tensor, as
    published. pieces: the single tensors, by name.
    """

    name: str
    linear: bool
    quantized: bool
    key: str
    specs: tuple[TensorSpec, ...]
    stack: Stack | None = None
    pieces: Mapping[str, "Item"] = field(default_factory=dict)


class ConversionPlan:
    """What every tensor of the source becomes. note: a remark for the user, or empty."""

    def __init__(self, checkpoint: Checkpoint, target: str, dtype: torch.dtype | None) -> None:
        self.checkpoint = checkpoint
        self.rows, self.described, self.note = _read(checkpoint)
        for module in (*checkpoint.linears, *(row.module for row in self.rows.values())):
            if checkpoint.input_rotation(module):
                raise QuantkitError(
                    f"inputs of {module} of {checkpoint.path} are rotated as the model runs, which "
                    "is said in no other format",
                    "quantize the source to that format",
                )
        for module, linear in checkpoint.linears.items():
            folded = isinstance(linear.format.member(module), FoldedInputs)
            if folded and target != dense.FORMAT.name:
                raise QuantkitError(
                    f"inputs of {module} of {checkpoint.path} are transformed as the model runs, "
                    "which is said in no other format",
                    "--dtype bf16 makes it plain",
                )
        self.grid = None if target == dense.FORMAT.name else common_grid(checkpoint)
        self.target = find_target(checkpoint, target, self.grid)
        self.as_nvfp4 = self.grid == Mxfp4Grid() and not self.target.holds(Mxfp4Grid())
        if self.as_nvfp4:
            self.grid = Nvfp4Grid()
        self._largest: dict[str, int] = {}
        """Largest exponent of MXFP4, by the fused module that shares a global scale."""
        self.cast_to = dtype
        self.decoded_dtype = dtype or decoded_dtype(checkpoint)
        parts = {name for linear in checkpoint.linears.values() for name in linear.tensors}
        self.items = [self._linear(module) for module in checkpoint.linears]
        parts |= checkpoint.cache_scale_names  # no other format describes them
        self.items += [self._tensor(name) for name in checkpoint.tensors if name not in parts]
        if self.target is dense.FORMAT:
            self._stack_items()
        self.total_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())

    def _linear(self, module: str) -> Item:
        row = self.rows.get(f"{module}.weight")
        role = row.role if row is not None else tensor_names.role(module)
        linear = self.checkpoint.linears[module]
        part = (part_of(row) if row is not None else None) or role
        holds = self.target is not dense.FORMAT and linear.format is self.checkpoint.format
        mtp = row is not None and row.mtp
        outer = role in self.target.outer and not mtp
        taken = outer or self.target.quantizes(module, role, mtp=mtp)
        if holds and taken:
            key = f"{linear.format.name} to {self.target.name}: {part}"
            return Item(
                module, True, True, key, tuple(self.target.specs(module, linear.shape, self.grid))
            )
        spec = TensorSpec(f"{module}.weight", self.decoded_dtype, linear.shape)
        return Item(
            module,
            True,
            False,
            f"{linear.format.name} to {dtype_name(self.decoded_dtype)}: {part}",
            (spec,),
        )

    def _tensor(self, name: str) -> Item:
        info = self.checkpoint.tensors[name]
        # FP32 stays: the router's selection bias loses its meaning in 16 bits.
        cast = (
            self.cast_to is not None
            and info.dtype in (torch.bfloat16, torch.float16)
            and info.dtype != self.cast_to
        )
        dtype = self.cast_to if cast and self.cast_to is not None else info.dtype
        key = f"{dtype_name(info.dtype)} to {dtype_name(dtype)}" if cast else "copied"
        return Item(name, False, False, key, (TensorSpec(name, dtype, info.shape),))

    def _stack_items(self) -> None:
        """Stack experts that are published in one tensor, and were split to be quantized:
        transformers expects them stacked."""
        own = {item.specs[0].name: item for item in self.items}
        for stack in published_stacks_of(
            self.checkpoint, {name: item.specs[0].shape for name, item in own.items()}
        ):
            if stack.name not in own and own.keys() >= {*stack.names}:
                pieces = {name: own.pop(name) for name in stack.names}
                dtype = reduce(
                    torch.promote_types, (piece.specs[0].dtype for piece in pieces.values())
                )
                key = next(iter(pieces.values())).key
                own[stack.name] = Item(
                    stack.name,
                    False,
                    False,
                    key,
                    (TensorSpec(stack.name, dtype, stack.stacked_shape),),
                    stack,
                    pieces,
                )
        self.items = list(own.values())

    def specs(self) -> list[TensorSpec]:
        return [spec for item in self.items for spec in item.specs]

    def units(self) -> Iterator[list[Item]]:
        """Items in order, grouped to about UNIT_BYTES of output."""
        unit: list[Item] = []
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

    def parts(self, item: Item) -> tuple[str, ...]:
        """The source tensors from which it is made."""
        if item.stack is not None:
            return tuple(part for piece in item.pieces.values() for part in self.parts(piece))
        return tuple(self.checkpoint.linears[item.name].tensors) if item.linear else (item.name,)

    def source_bytes(self, item: Item) -> int:
        return sum(self.checkpoint.tensors[name].nbytes for name in self.parts(item))

    def convert(self, unit: list[Item]) -> tuple[dict[str, Tensor], dict[str, Change]]:
        """The tensors of a unit, and their differences from the source."""
        tensors: dict[str, Tensor] = {}
        changes: dict[str, Change] = {}
        for item in unit:
            made, error = self._convert(item)
            tensors |= made
            changes[item.key] = changes.get(item.key, Change()) + Change(1, error)
        return tensors, changes

    def _convert(self, item: Item) -> tuple[dict[str, Tensor], float]:
        name, dtype = item.specs[0].name, item.specs[0].dtype
        if item.stack is not None:
            return self._stacked(item, item.stack)
        if not item.linear:
            tensor = self.checkpoint.read(item.name)
            return (
                ({name: tensor}, 0.0)
                if tensor.dtype == dtype
                else cast_values(name, tensor.float(), dtype)
            )
        weight = self.checkpoint.weight(item.name)
        if not item.quantized:
            return cast_values(name, dequantize(weight), dtype)
        packed = self.target.pack(item.name, self._fitted(item.name, weight))
        stored = self.target.unpack(item.name, packed)
        assert not isinstance(weight, Tensor), f"{item.name} is not quantized"
        return packed, weight.difference(item.name, stored)

    def _stacked(self, item: Item, stack: Stack) -> tuple[dict[str, Tensor], float]:
        """All experts of a layer in one tensor, decoded one after the other."""
        spec, worst = item.specs[0], 0.0
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        for name, room in stack.views(whole).items():
            made, error = self._convert(item.pieces[name])
            room.copy_(made[name])
            worst = max(worst, error)
        return {spec.name: whole}, worst

    def _fitted(self, module: str, weight: Weight) -> Weight:
        """The weight as the target stores it."""
        if self.as_nvfp4:
            return Mxfp4Weight.of(weight).to_nvfp4(self._shared_exponent(module))
        return fit_scales(module, weight, self.target)

    def _shared_exponent(self, module: str) -> int:
        """The largest exponent of a linear and its fused siblings."""
        row = self.rows.get(f"{module}.weight")
        fused = module if row is None or row.fused is None else row.fused
        if fused not in self._largest:
            siblings = (
                [one.module for one in self.rows.values() if one.fused == fused]
                if fused != module
                else [module]
            )
            self._largest[fused] = max(
                Mxfp4Weight.of(self.checkpoint.weight(one)).largest_exponent
                for one in siblings
                if one in self.checkpoint.linears
                and self.checkpoint.linears[one].grid == Mxfp4Grid()
            )
        return self._largest[fused]

    def fingerprint(self) -> dict[str, str]:
        target = f"{self.target.name} {self.target.variant}"
        return {
            "source": self.checkpoint.fingerprint,
            "format": target,
            "dtype": str(self.cast_to),
            "version": __version__,
        }

    def config(self) -> JsonObject:
        block = self.target.config_block(self.grid, self._quantized(), self._unquantized())
        config = output_config(self.described, block)
        if self.cast_to is not None:
            named = "dtype" if "dtype" in config and "torch_dtype" not in config else "torch_dtype"
            config[named] = dtype_name(self.cast_to)
        return config

    def files(self) -> dict[str, bytes]:
        return read_aux_files(self.checkpoint.path) | self.target.extra_files(
            self.grid, self._quantized(), self._unquantized()
        )

    def manifest(self, changes: dict[str, Change]) -> JsonObject:
        note = {key: asdict(change) for key, change in sorted(changes.items())}
        return {
            "converted_from": self.checkpoint.format.name,
            "changes": note,
            "tensors": self._became(),
        }

    def _quantized(self) -> dict[str, Grid | None]:
        return {item.name: self.grid for item in self.items if item.quantized}

    def _unquantized(self) -> list[TensorSpec]:
        return [spec for item in self.items if not item.quantized for spec in item.specs]

    def _became(self) -> dict[str, JsonObject]:
        """Every tensor of the source, and what it became."""
        entries: dict[str, JsonObject] = {}
        for item in self.items:
            became = [spec.name for spec in item.specs]
            status = "copied" if item.key == "copied" else "converted"
            for name in self.parts(item):
                entries[name] = {"status": status, "became": became}
        return dict(sorted(entries.items()))


def published_stacks_of(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Stack, ...]:
    """Tensors of all routed experts of a layer as published checkpoints of this architecture hold
    them, and transformers expects them. shapes: of the output's tensors by name, experts one by
    one."""
    if is_known(checkpoint.config):
        return tuple(expected_stacks(checkpoint.config, shapes))
    return read_tree(checkpoint.config).stacks if any(map(is_expert_tensor, shapes)) else ()


def _read(checkpoint: Checkpoint) -> tuple[dict[str, Parameter], JsonObject, str]:
    """The architecture's table by tensor name, the described config.json, and a note. An
    architecture that quantkit does not compute has an empty table, and can be converted all the
    same."""
    if not is_known(checkpoint.config):
        check_listed(checkpoint, [])
        return {}, checkpoint.config, ""
    model = read_model(checkpoint)
    return {row.name: row for row in model.rows}, model.effective_config, model.warning
