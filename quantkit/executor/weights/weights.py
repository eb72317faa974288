"""The model's weights as prepared kernels: what the executor answers to a forward's questions
(`models.weights.Weights`).

Each linear is read from the checkpoint, decoded to its format-neutral value, and laid out for a
kernel backend once. Nothing is read twice and nothing unpacked stays: peak memory is what is
prepared so far plus one linear, or one expert. Under tensor parallelism each rank reads and keeps
its share, cut as the model's table says. For a GPU packed bytes are unpacked there: the host holds
a buffer of them.

Where no operator of this machine takes a packed weight as it is (FP4 on any CPU, int4 on one
without bfloat16), the reference would expand it at every call. A model small enough is expanded
once instead, with the same values.

The range of a linear's features that one tensor-parallel rank holds: columns of the output (rows
of W) or of the input, as the model's table says.

The weight cuts itself (`quantkit.grids.base`), packed as it is: along K on group boundaries. FP8
blocks are expanded first, as their operator would. Where activations are rounded too (int8, a scale
per token), each rank rounds its own inputs with their own scale: finer than one rank's, which takes
the largest of them all.
"""

import math
import warnings
from collections.abc import Iterable
from functools import partial
from itertools import chain

import quantkit_kernels as kernels
import torch
from quantkit_kernels import backends
from quantkit_kernels.linear import rounds_inputs
from quantkit_kernels.weights import can_stack, kind, shape, stack
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import CPU
from quantkit.common.devices import free_bytes
from quantkit.common.errors import QuantkitError, UsageError
from quantkit.executor.ranks.expert_parallel import NO_RANKS, ExpertRanks, ExpertShare
from quantkit.executor.ranks.parallel import SINGLE, Parallel
from quantkit.executor.weights.fallback_warning import warn_slow
from quantkit.executor.weights.prefetch import find_prefetcher
from quantkit.grids.base import Grid, Weight, cut_columns, cut_rows, dequantize
from quantkit.models.ngram_table import StoredNgramTable
from quantkit.models.rope import Rope
from quantkit.models.table import GatedMlp, Parameter
from quantkit.models.weights import ExpertsOp, LinearOp, NgramTable, PrologOp


def share_range(
    features: int, what: str, name: str, rank: int, size: int, heads: int = 0
) -> tuple[int, int]:
    """From where to where the features of a rank go. heads: of keys, that they are; more ranks than
    these hold copies."""
    if 0 < heads < size and size % heads == 0:
        rank, size = rank * heads // size, heads
    if features % size:
        raise UsageError(
            f"{name} has {features} {what}, which {size} ranks cannot share evenly",
            "use another --tp",
        )
    return rank * features // size, (rank + 1) * features // size


_EXPANDED_SHARE = 0.25
"""Share of the free memory that a model may take expanded."""

_SMALL_FP4 = 1 << 19
"""Elements of an FP4 weight up to which a CPU is faster over it expanded: the kernels' own call
takes 10 us to begin (1024 x 256, AVX2, one thread, one token: 38 us expanded, 50 packed)."""


_WIDE = ("router", "router_bias", "router_table", "indexer_gate", "state", "streams")
"""Roles that are computed with in float32: what chooses, and what a state is made of."""


class ExecutorWeights:
    """Prepares for one device.

    backend: a kernel backend's name, for what it has, or "auto". dtype: of activations. parameters:
    the model's table. parallel: this rank's place among those that cut linears; expert_ranks: among
    those that share out routed experts, and cut nothing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        parameters: list[Parameter],
        *,
        device: torch.device,
        dtype: torch.dtype,
        backend: str = "auto",
        parallel: Parallel = SINGLE,
        expert_ranks: ExpertRanks = NO_RANKS,
    ) -> None:
        self.checkpoint, self.expert_ranks = checkpoint, expert_ranks
        self.device, self.dtype, self.backend, self.parallel = device, dtype, backend, parallel
        self.ranks = expert_ranks.parallel if expert_ranks.size > 1 else parallel
        """All that share the model."""
        self._parameters = {parameter.name: parameter for parameter in parameters}
        _check_rotations(checkpoint, parameters)
        self._mlps = _gated_mlps(parameters)
        shares = (parallel.size if row.expert is None else self.ranks.size for row in parameters)
        expanded = sum(
            math.prod(row.shape) * dtype.itemsize // share for row, share in zip(parameters, shares)
        )
        self._may_expand = expanded < _EXPANDED_SHARE * free_bytes(device) / (
            self.ranks.size if device.type == "cpu" else 1
        )
        self._unpacked_on = device if device.type == "cuda" else CPU
        self._prefetcher = find_prefetcher(device, parallel)
        self._read: dict[str, kernels.Weight] = {}
        """Linears that were read to ask for a prolog, and for which there is none: whoever asks for
        them next gets them."""
        self._warned_slow = False
        self._warned_unserved: set[str] = set()
        self.nbytes = 0
        """Bytes held by everything handed out so far."""
        self.decoded_bytes = 0
        """Of weights that a pass decodes at a time, at most."""

    def tensor(self, name: str) -> Tensor:
        """As `Weights.tensor`: float32 for `_WIDE` roles, the compute dtype for the rest."""
        parameter = self._parameters[name]
        if parameter.role == "embedding" and parameter.module in self.checkpoint.linears:
            return self.dequantized(parameter.module)
        value = self.checkpoint.read(name, self._unpacked_on)
        if parameter.split == "column":
            value = value.transpose(0, parameter.output_axis)
            parts = value.split(list(parameter.segments)) if parameter.segments else [value]
            value = torch.cat([part[slice(*self._rows(parameter, len(part)))] for part in parts])
            value = value.transpose(0, parameter.output_axis)
        elif parameter.split == "row" and self.parallel.rank:
            value = torch.zeros_like(value)  # a bias of partial sums counts once
        value = value.to(self.device, torch.float32 if parameter.role in _WIDE else self.dtype)
        self.nbytes += value.numel() * value.element_size()
        return value

    def has(self, name: str) -> bool:
        return self.checkpoint.has(name)

    def dequantized(self, module: str) -> Tensor:
        value = dequantize(self._share(module), self.dtype).to(self.device)
        self.nbytes += value.numel() * value.element_size()
        return value

    def ngram_table(self, module: str) -> NgramTable:
        return StoredNgramTable(self.checkpoint, module)

    def input_rotation(self, module: str) -> int:
        """As `Weights.input_rotation`. Raises UsageError where a block would be cut."""
        block = self.checkpoint.input_rotation(module)
        share = self.checkpoint.shape(module)[1] // self.parallel.size
        if block and self._is_cut(module, "row") and share % block:
            raise UsageError(
                f"inputs of {module} are rotated in blocks of {block}, and a rank has {share}",
                "use a smaller --tp",
            )
        return block

    def linear(self, module: str) -> LinearOp:
        linear = self._prepare(self._operand(module))
        if self._is_cut(module, "row"):
            return partial(linear)  # no `Linear`: the sum over ranks comes before the residual's
        return Gathered(linear, self.parallel) if self._is_cut(module, "gathered") else linear

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        """One operator where the weights are on one grid; else one each, their outputs side by
        side."""
        operands = [self._operand(module) for module in modules]
        fused = operands[0]
        for operand in operands[1:]:
            if not can_stack(fused, operand):
                return SideBySide([self._prepare(one) for one in operands])
            fused = stack(fused, operand)
        return self._prepare(fused)

    def mla_prolog(
        self,
        modules: tuple[str, str, str],
        kv_b: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        rope: Rope,
    ) -> PrologOp | None:
        """As `Weights.mla_prolog`: where a backend's operator takes such sizes, and weights as they
        are."""
        backend = backends.serving("mla_prolog", self.backend, self.device, self.dtype)
        if backend == "reference":
            return None
        q_a, q_b, kv_a = map(self._operand, modules)
        weights = kernels.MlaWeights(q_a, q_b, kv_a, kv_b, *gains)
        if kernels.why_no_prolog(weights, rope.dim, backend, self.dtype, self.device):
            self._read.update(zip(modules, (q_a, q_b, kv_a)))
            return None
        prolog = kernels.prepare_mla_prolog(
            weights,
            rope.dim,
            eps=eps,
            interleaved=rope.interleaved,
            backend=backend,
            dtype=self.dtype,
            device=self.device,
        )
        self.nbytes += prolog.nbytes
        return self._prefetcher.follow_prolog(prolog) if self._prefetcher else prolog

    def experts(
        self, prefix: str, num_experts: int, gating: kernels.Gating = kernels.SILU
    ) -> ExpertsOp:
        own = self.expert_ranks.own(num_experts)
        modules = [f"{prefix}.{expert}" for expert in own]
        gating = gating.rotated(self._rotation(modules))
        prepared = self._experts(modules, map(self._expert, modules), gating)
        return (
            prepared
            if self.expert_ranks.size == 1
            else ExpertShare(prepared, own, num_experts, self.expert_ranks)
        )

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        """As `Weights.experts_with_shared`: where the shared expert has the shapes and grid of the
        others, no ranks share these out, and no inputs inside them are rotated."""
        if self.expert_ranks.size > 1 or self._rotation([f"{prefix}.0", shared]):
            return None
        first, last = self._expert(f"{prefix}.0"), self._expert(shared)
        if any(_form(one) != _form(other) for one, other in zip(first, last)):
            return None
        modules = [f"{prefix}.{expert}" for expert in range(num_experts)]
        return self._experts(
            [*modules, shared], chain([first], map(self._expert, modules[1:]), [last])
        )

    def _rotation(self, modules: list[str]) -> int:
        """The largest block of the Hadamard matrices at these experts' down projections."""
        return max(self.input_rotation(self._mlps[module].down.module) for module in modules)

    def _expert(self, module: str) -> list[kernels.Weight]:
        return [
            self._narrowed(linear, self._operand(linear)) for linear in self._mlps[module].modules
        ]

    def _narrowed(self, module: str, weight: kernels.Weight) -> kernels.Weight:
        """int8 whose codes are int4's is marked so, where experts' backend holds four bits of each:
        a shared expert in int8 is then none of them."""
        grid = self._grid(module)
        if kind(weight) != "int8" or grid is None or grid.kind != "int4":
            return weight
        serving = backends.module(
            backends.serving("experts_int8", self.backend, self.device, self.dtype)
        )
        return kernels.NarrowInt8(*weight) if getattr(serving, "NARROW_EXPERTS", False) else weight

    def _biases(self, module: str) -> kernels.ExpertBiases | None:
        names = self._mlps[module].biases if module in self._mlps else ()
        return kernels.ExpertBiases(*map(self.tensor, names)) if names else None

    def _experts(
        self,
        modules: list[str],
        experts: Iterable[list[kernels.Weight]],
        gating: kernels.Gating = kernels.SILU,
    ) -> ExpertsOp:
        builder: kernels.ExpertsBuilder | None = None
        for expert, (module, (gate, up, down)) in enumerate(zip(modules, experts)):
            biases = self._biases(module)
            try:
                if builder is None:
                    if biases is None and gating == kernels.SILU:
                        backend = self._backend("experts", gate, down)
                    else:
                        backend = self._gates_backend(gate, down, biases is None and gating.is_silu)
                    builder = kernels.ExpertsBuilder(
                        len(modules),
                        backend=backend,
                        dtype=self.dtype,
                        device=self.device,
                        gating=gating,
                    )
                builder.add(expert, gate, up, down, biases=biases)
            except ValueError as fault:
                raise QuantkitError(
                    f"{module} cannot be prepared: {fault}", "quantize all experts of a layer alike"
                ) from fault
        assert builder is not None, "a layer without experts"
        prepared = builder.finish()
        self.nbytes += prepared.nbytes
        self.decoded_bytes = max(self.decoded_bytes, prepared.decoded_bytes)
        return self._prefetcher.follow(prepared) if self._prefetcher else prepared

    def all_reduce(self, x: Tensor) -> Tensor:
        add_up = self.parallel.all_reduce
        return self._prefetcher.during(add_up, x) if self._prefetcher else add_up(x)

    def add_rms_norm(
        self, x: Tensor | kernels.UnsummedPairs, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._prefetcher and isinstance(x, Tensor):
            return kernels.add_rms_norm(self.all_reduce(x), residual, gain, eps)
        return self.parallel.add_rms_norm(x, residual, gain, eps)

    def _operand(self, module: str) -> kernels.Weight:
        if module in self._read:
            return self._read.pop(module)
        grid, bits = self._grid(module), self.checkpoint.activation_bits(module)
        in_groups = grid is not None and grid.group_size is not None
        joined, *others = (
            operand(share, self.dtype, bits, in_groups=in_groups) for share in self._shares(module)
        )
        for other in others:
            joined = stack(joined, other)
        return joined

    def _grid(self, module: str) -> Grid | None:
        """The grid of a linear as stored; None for one in 16 bits."""
        stored = self.checkpoint.linears.get(module)
        return None if stored is None else stored.grid

    def _shares(self, module: str) -> list[Weight]:
        """This rank's part of a linear, of each of its segments where it has some."""
        segments = (
            self._parameters[f"{module}.weight"].segments if self._is_cut(module, "column") else ()
        )
        if not segments:
            return [self._share(module)]
        shares, end = [], 0
        for size in segments:
            first, last = self._rows(self._parameters[f"{module}.weight"], size)
            weight, begin = self.checkpoint.weight_slice(
                module, "N", end + first, end + last, self._unpacked_on
            )
            shares.append(cut_rows(weight, end + first - begin, end + last - begin))
            end += size
        return shares

    def _share(self, module: str) -> Weight:
        """This rank's part of a linear."""
        rank, size = self.parallel.rank, self.parallel.size
        if self._is_cut(module, "row"):
            start, stop = share_range(
                self.checkpoint.shape(module)[1], "input features", module, rank, size
            )
            weight, first = self.checkpoint.weight_slice(
                module, "K", start, stop, self._unpacked_on
            )
            return cut_columns(weight, module, start - first, stop - first)
        if self._is_cut(module, "column", "gathered"):
            start, stop = self._rows(
                self._parameters[f"{module}.weight"], self.checkpoint.shape(module)[0]
            )
            weight, first = self.checkpoint.weight_slice(
                module, "N", start, stop, self._unpacked_on
            )
            return cut_rows(weight, start - first, stop - first)
        return self.checkpoint.weight(module, self._unpacked_on)

    def _rows(self, parameter: Parameter, count: int) -> tuple[int, int]:
        """From where to where this rank's rows go, of so many that are shared out."""
        return share_range(
            count,
            "output features",
            parameter.module,
            self.parallel.rank,
            self.parallel.size,
            parameter.key_heads,
        )

    def _is_cut(self, module: str, *splits: str) -> bool:
        """Whether the ranks share the linear in one of these ways; what is gathered and does not
        divide is not shared."""
        if self.parallel.size == 1:
            return False
        parameter = self._parameters[f"{module}.weight"]
        divides = parameter.split != "gathered" or parameter.shape[0] % self.parallel.size == 0
        return parameter.split in splits and divides

    def _prepare(self, weight: kernels.Weight) -> LinearOp:
        try:
            linear = kernels.prepare(
                weight,
                backend=self._backend("linear", weight),
                dtype=self.dtype,
                device=self.device,
            )
        except ValueError as fault:
            raise QuantkitError(
                str(fault), "choose another --backend (`quantkit kernels` lists them)"
            ) from fault
        self.nbytes += linear.nbytes
        return self._prefetcher.follow(linear) if self._prefetcher else linear

    def _backend(self, operator: str, *weights: kernels.Weight) -> str:
        """The backend asked for, where it takes such weights; else the best one, or expansion where
        that is the reference or the weight is small."""
        shapes, grid = tuple(shape(weight) for weight in weights), kind(weights[0])
        chosen = backends.serving(
            f"{operator}_{grid}", self.backend, self.device, self.dtype, shapes
        )
        if chosen == self.backend:
            return chosen
        self._warn_unserved(f"{operator}_{grid}", shapes, chosen)
        small = grid == "fp4" and chosen == "cpu" and max(map(math.prod, shapes)) <= _SMALL_FP4
        if self._may_expand and (small or chosen == "reference"):
            return "expanded"
        if chosen == "reference" and not self._warned_slow:
            self._warned_slow = True
            warn_slow(f"{operator}_{grid}", weights[0], self.device, self.dtype)
        return chosen

    def _warn_unserved(
        self, operator: str, shapes: tuple[backends.Shape, ...], chosen: str
    ) -> None:
        """Warn once where the backend asked for has an operator, and not for these weights in the
        compute dtype."""
        if (
            self.backend == "auto"
            or operator in self._warned_unserved
            or backends.why_unusable(operator, self.backend, self.device)
        ):
            return
        self._warned_unserved.add(operator)
        reason = backends.why_unusable(operator, self.backend, self.device, self.dtype, shapes)
        warnings.warn(
            f"backend {self.backend} does not serve {operator} of this model, {chosen} does: "
            f"{reason}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _gates_backend(self, gate: kernels.Weight, down: kernels.Weight, silu: bool) -> str:
        """As `_backend`, of experts with biases or another gating. silu: as of `serving_gates`."""
        if rounds_inputs(gate):
            return self._backend("linear", gate, down)
        found = backends.serving_gates(
            kind(gate), silu, self.backend, self.device, self.dtype, (shape(gate), shape(down))
        )
        if not backends.computes_gates(found, kind(gate), silu):
            return self._backend("linear", gate, down)
        return found


class Gathered:
    """A linear whose outputs the ranks hold in parts: everybody gets all of them."""

    def __init__(self, linear: LinearOp, parallel: Parallel) -> None:
        self.linear, self.parallel = linear, parallel

    def __call__(self, x: Tensor) -> Tensor:
        return self.parallel.all_gather(self.linear(x))


class SideBySide:
    """Linears on different grids that read the same input."""

    def __init__(self, linears: list[LinearOp]) -> None:
        self.linears = linears

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=-1)


def operand(
    weight: Weight, dtype: torch.dtype, activation_bits: int = 16, *, in_groups: bool = False
) -> kernels.Weight:
    """The kernel operand of a weight; see `QuantizedWeight.kernel_weight`."""
    if isinstance(weight, Tensor):
        return kernels.Dense(weight.to(dtype))
    return weight.kernel_weight(dtype, activation_bits, in_groups=in_groups)


def _check_rotations(checkpoint: Checkpoint, parameters: list[Parameter]) -> None:
    """Raise QuantkitError where inputs are rotated for which no forward asks, or those of some
    experts of a layer alone."""
    blocks: dict[int | None, int] = {}
    for row in parameters:
        if row.role != "linear":
            continue
        block = checkpoint.input_rotation(row.module)
        odd = block > 0 and row.projection != "down"
        if row.projection == "down" and row.expert is not None:  # all of a layer alike
            odd = blocks.setdefault(row.layer, block) != block
        if odd:
            raise QuantkitError(
                f"{checkpoint.path} says that inputs of {row.module} are rotated as the model runs",
                "quantkit rotates those of down projections, of a layer's routed experts alike",
            )


def _gated_mlps(parameters: list[Parameter]) -> dict[str, GatedMlp]:
    """Experts, routed and shared, by the module that their three linears are part of."""
    linears: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.block in ("expert", "shared_expert"):
            linears.setdefault(
                parameter.module.removesuffix(".bias").rpartition(".")[0], []
            ).append(parameter)
    return {module: GatedMlp.of(rows) for module, rows in linears.items()}


def _form(weight: kernels.Weight) -> tuple[object, ...]:
    """Grid, shapes and groups: what the experts of one operator have in common."""
    return type(weight), *(None if part is None else tuple(part.shape) for part in weight)
