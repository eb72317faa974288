"""Rotations folded into the weights before anything is quantized (QuaRot, arXiv 2404.00456; R1 and
R2 of SpinQuant, arXiv 2405.16406). The model computes what it did, and its outliers are spread over
all channels.

residual: the residual stream h becomes h Q. The gain of a norm g is folded into its readers W,
which become W diag(g) Q; embedding and writers W become Q^T W; a tied head is stored apart. Of
several streams, which are mixed by scalars, every one becomes h Q, and what weighs them reads each
so. values: a head's values v become v R, in the rows that make them and the columns of o_proj that
read them. latents: a latent c of latent attention becomes c P, in the rows of its linear and, after
its norm, in all readers. down: what a down projection reads, x, becomes x H as the model runs, and
its weight W H, for a block Hadamard matrix H (R4 of SpinQuant).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch
from quantkit_kernels import block_hadamard
from quantkit_kernels.hadamard import hadamard_matrix
from torch import Tensor

from quantkit.calibrate.recipe import RotationKind
from quantkit.checkpoint.formats.base import Axis
from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint, CheckpointView
from quantkit.checkpoint.shards import CPU
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Weight, dequantize
from quantkit.models import is_known
from quantkit.models.stored_parameters import Model, check_stored_head, is_stored, read_model
from quantkit.models.table import Parameter, Projection, ScaleGroup

_LARGEST_FACTOR = 64
_VALUES = 1 << 22
"""Rotated at once."""
_BLOCK = 128
"""Most rows of the Hadamard matrices before down projections: 512 rows gave no more."""
_LEAST_BLOCK = 16
_MADE_BY: dict[Projection, Projection] = {"q_b": "q_a", "kv_b": "kv_a"}
"""By the projection that reads a latent, the one that makes it."""


class Rotation:
    """The orthogonal matrix diag(signs) (O x H x H ...), [width, width]: Kronecker factors are
    Hadamard matrices of at most 64 rows, and for an odd factor of the width a random O. Signs and O
    are drawn with the seed."""

    def __init__(self, width: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        power = width & -width
        self.signs = torch.randint(0, 2, (width,), generator=draw) * 2.0 - 1
        self.factors: list[Tensor] = []
        if power < width:
            odd = torch.randn(width // power, width // power, generator=draw, dtype=torch.float64)
            self.factors.append(torch.linalg.qr(odd)[0])
        while power > 1:
            self.factors.append(hadamard_matrix(min(power, _LARGEST_FACTOR)))
            power //= len(self.factors[-1])

    def __call__(self, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """(x * gain) Q, x [R, ..., width], some of the R at a time: embeddings are large."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        scale, step = self.signs.to(x) * gain, max(1, _VALUES // x[0].numel())
        for some, into in zip(x.split(step), out.split(step)):
            into.copy_(self._mixed(some * scale))
        return out

    def _mixed(self, x: Tensor) -> Tensor:
        """x [..., width] by the factors."""
        sizes = [len(factor) for factor in self.factors]
        rotated = x.unflatten(-1, sizes)
        for axis, factor in enumerate(self.factors, start=x.dim() - 1):
            rotated = (rotated.transpose(axis, -1) @ factor.to(x)).transpose(axis, -1)
        return rotated.reshape(x.shape)


@dataclass(frozen=True)
class _Fold:
    """What a tensor becomes.

    gains: of columns that read what is rotated as `of`, for each block of them as wide as that the
    norms whose gains they take; None for others. writes: whether its rows, or a bias, are added to
    the residual stream. made: width of the heads whose values its rows make, after `before` other
    rows of each; read: of those that its columns read; latent: width of the latent that its first
    rows make; block: size of the Hadamard matrices that rotate its inputs as the model runs; 0 for
    none. unit: a norm, whose gain becomes 1.
    """

    gains: tuple[tuple[Parameter, ...], ...] | None = None
    of: RotationKind = "residual"
    writes: bool = False
    made: int = 0
    before: int = 0
    read: int = 0
    latent: int = 0
    block: int = 0
    unit: bool = False

    def joined(self, other: "_Fold") -> "_Fold":
        """What both say of one tensor."""
        said = {field.name: getattr(other, field.name) for field in fields(other)}
        return replace(self, **{key: one for key, one in said.items() if one != _PLAIN[key]})


_PLAIN = {field.name: field.default for field in fields(_Fold)}


class RotatedCheckpoint(CheckpointView):
    """A view of `base` whose tensors are rotated as they are read, in float32; nothing is packed.
    note: a line for the user."""

    def __init__(
        self,
        base: Checkpoint,
        config: dict[str, Any],
        rows: Sequence[Parameter],
        folds: Mapping[str, _Fold],
        seed: int,
        note: str,
    ) -> None:
        self.base, self.note, self._folds, self._seed = base, note, folds, seed
        self._rotations = dict[tuple[RotationKind, int], Rotation]()
        self._embedding = next(row for row in rows if row.role == "embedding")
        self._rows = {row.name: row if is_stored(base, row) else self._embedding for row in rows}
        packed = {name for linear in base.linears.values() for name in linear.tensors}
        tensors = {name: info for name, info in base.tensors.items() if name not in packed}
        for name, row in self._rows.items():
            info = self.stored(name)[0]
            dtype = torch.bfloat16 if row.module in base.linears else info.dtype
            tensors[name] = TensorInfo(name, dtype, row.shape, info.shard, info.offset)
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        super().__init__(base, config, {}, tensors)

    @property
    def bytes_read(self) -> int:
        return self.base.bytes_read

    def is_rotated(self, name: str) -> bool:
        return name in self._folds

    def input_rotation(self, module: str) -> int:
        return self._folds.get(f"{module}.weight", _Fold()).block

    def stored(self, name: str) -> tuple[TensorInfo, ...]:
        """A tied head is the embedding."""
        row = self._rows.get(name)
        if row is not None and row.module in self.base.linears:
            return tuple(self.base.tensors[part] for part in self.base.parts(row.module))
        return (self.base.tensors[name if row is None else row.name],)

    def prefetch(self, name: str, device: torch.device = CPU) -> None:
        for info in self.stored(name):
            self.base.prefetch(info.name, device)

    def read(self, name: str, device: torch.device = CPU) -> Tensor:
        """float32 where it is rotated."""
        row = self._rows.get(name)
        if name in self._folds and row is not None:
            return self._folded(self._folds[name], row, self._source(row, device))
        if row is not None and row.module in self.base.linears:
            return dequantize(self.base.weight(row.module, device), torch.bfloat16)
        return self.base.read(name if row is None else row.name, device)

    def weight_slice(
        self, module: str, axis: Axis, start: int, stop: int, device: torch.device = CPU
    ) -> tuple[Weight, int]:
        """Only these rows are read, if none are rotated together, as in the head."""
        name = f"{module}.weight"
        row, fold = self._rows[name], self._folds.get(name, _Fold())
        if axis == "N" and not (fold.writes or fold.made or fold.latent):
            weight, first = self.base.weight_slice(row.module, axis, start, stop, device)
            return self._folded(fold, row, dequantize(weight)), first
        value = self.read(name, device)
        return value[start:stop] if axis == "N" else value[:, start:stop], start

    def _source(self, row: Parameter, device: torch.device) -> Tensor:
        """float32."""
        packed = row.module in self.base.linears
        return dequantize(
            self.base.weight(row.module, device) if packed else self.base.read(row.name, device)
        )

    def _folded(self, fold: _Fold, row: Parameter, value: Tensor) -> Tensor:
        if fold.unit:
            return torch.full_like(value, 1 - row.gain_offset)
        if fold.made:
            heads = value.unflatten(0, (-1, fold.before + fold.made)).clone()
            values = heads[:, fold.before :]
            heads[:, fold.before :] = self._rotated("values", values.mT).mT
            value = heads.flatten(0, 1)
        if fold.read:
            value = self._rotated("values", value.unflatten(-1, (-1, fold.read))).flatten(-2)
        if fold.block:
            value = block_hadamard(value, fold.block)
        if fold.latent:
            made, others = value[: fold.latent], value[fold.latent :]
            value = torch.cat((self._rows_rotated("latents", made), others))
        if fold.gains is not None:
            blocks = value.unflatten(-1, (len(fold.gains), -1))
            gains = [self._gain(norms, number, blocks) for number, norms in enumerate(fold.gains)]
            value = self._rotated(fold.of, blocks, torch.stack(gains)).flatten(-2)
        return self._rows_rotated("residual", value) if fold.writes else value

    def _gain(self, norms: Sequence[Parameter], number: int, blocks: Tensor) -> Tensor:
        """float32 [W] for the block of that number, which is read after these norms, of which the
        last one divides by the size of what the others leave. blocks: [..., W]."""
        width = blocks.shape[-1]
        gain = blocks.new_ones(width)
        for norm in norms:
            parts = (self._source(norm, blocks.device) + norm.gain_offset).view(-1, width)
            gain = gain / gain.square().mean().sqrt() * parts[number % len(parts)]
        return gain

    def _rotated(self, kind: RotationKind, x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """x * gain, [R, ..., W], in its last dimension."""
        key = kind, x.shape[-1]
        if key not in self._rotations:
            seed = self._seed + get_args(RotationKind).index(kind)
            self._rotations[key] = Rotation(x.shape[-1], seed)
        return self._rotations[key](x, gain)

    def _rows_rotated(self, kind: RotationKind, value: Tensor) -> Tensor:
        """A weight [W, K] or a bias [W] in its first dimension."""
        if value.dim() == 1:
            return self._rotated(kind, value[None])[0]
        return self._rotated(kind, value.mT).mT.contiguous()


def open_rotated(
    checkpoint: Checkpoint, rotations: Collection[RotationKind], seed: int, *, untie: bool = False
) -> RotatedCheckpoint:
    """`checkpoint` rotated. untie: a tied head is stored apart in any case. Raises QuantkitError
    where its table does not say that this leaves the model as it is."""
    config = checkpoint.config
    if not is_known(config):
        raise _refusal(checkpoint, f"quantkit has no table of {config.get('model_type')!r}")
    model = read_model(checkpoint)
    if checkpoint.has_weights:
        check_stored_head(checkpoint, model.rows)
    rows, folds = model.rows, dict[str, _Fold]()
    note = f"rotated: {' and '.join(rotations)}" if rotations else ""
    if (untie or "residual" in rotations) and not has_head(rows):
        config = _untied(config)
        made = model.architecture.parameters(model.architecture.Config.from_dict(config))
        rows = [*rows, next(row for row in made if row.role == "head" and not row.mtp)]
        note = "; ".join(
            filter(None, (note, f"{rows[-1].module} is stored apart from the embedding"))
        )
    if "residual" in rotations:
        folds = _residual_folds(checkpoint, model, rows)
        if any(row.role == "mtp_proj" for row in rows):
            note += "; MTP layers do without the gain of a last norm, and draft worse"
    found_by = (("values", _value_folds), ("latents", _latent_folds), ("down", _down_folds))
    for kind, found in found_by:
        if kind in rotations:
            for name, fold in found(checkpoint, model).items():
                folds[name] = folds.get(name, _Fold()).joined(fold)
    return RotatedCheckpoint(checkpoint, config, rows, folds, seed, note)


def has_head(rows: Iterable[Parameter]) -> bool:
    """Whether the head has a tensor of its own."""
    return any(row.role == "head" and not row.mtp for row in rows)


def _refusal(checkpoint: Checkpoint, why: str) -> QuantkitError:
    return QuantkitError(
        f"{checkpoint.path} cannot be rotated: {why}", "leave rotation out of the recipe"
    )


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    own = {**config, "tie_word_embeddings": False}
    text = config.get("text_config")
    return own | {"text_config": _untied(text)} if isinstance(text, dict) else own


def _layers(model: Model) -> list[int]:
    return sorted({row.layer for row in model.rows if row.layer is not None})


def _groups(model: Model) -> Iterator[ScaleGroup]:
    for layer in _layers(model):
        yield from model.architecture.scale_groups(model.config, layer)


def _residual_folds(
    checkpoint: Checkpoint, model: Model, rows: Sequence[Parameter]
) -> dict[str, _Fold]:
    """Every norm of the residual stream, which have no block, must have its readers in the table:
    those of a group, or the head after the last norm, and after the first two of an MTP layer its
    projections. An MTP layer's last norm before the main model's head goes without its gain."""
    if any(row.role in ("copied", "ngram_table") for row in rows):
        why = "another model or a table of n-grams in it writes to the residual stream"
        raise _refusal(checkpoint, why)
    readers: dict[str, list[str]] = {}
    for group in _groups(model):
        if group.producer_is_norm:
            readers.setdefault(group.producer, []).extend(group.consumers)
    modules = {row.module: row for row in rows}
    folds: dict[str, _Fold] = {}
    final = [row for row in rows if row.layer is None and row.role == "norm"][-1:]
    reads = getattr(model.architecture.MtpLayer, "reads", "normed")
    before_hnorm = final if reads == "normed" else []
    for layer in (None, *_layers(model)):
        own = [row for row in rows if row.layer == layer]
        stream = [row for row in own if row.role == "norm" and row.block is None]
        ends = [row for row in stream if row.module not in readers]
        heads = [row for row in own if row.role == "head"]
        projections = [row for row in own if row.role == "mtp_proj"]
        last = len(ends) - 2 * bool(projections)
        if last != len(heads) and not (projections and last == 1):
            raise _refusal(checkpoint, f"{(ends or own)[-1].name} is not read by linears alone")
        for norm in stream:
            folds[norm.name] = _Fold(unit=True)
            for module in readers.get(norm.module, ()):
                folds[modules[module].name] = _Fold(gains=((norm,),))
        for row in heads:
            folds[row.name] = _Fold(gains=((ends[-1],),))
        read = ((ends[0],), (*before_hnorm, ends[1])) if projections else ()
        for number, row in enumerate(projections):
            gains = read if len(projections) == 1 else (read[number],)
            folds[row.name] = _Fold(gains=gains, writes=True)
        folds |= _mixing_folds(checkpoint, own, model.config.hidden_size)
        latent = any(row.role == "latent" for row in own)
        for row in own:
            inside = latent and row.expert is not None
            if row.role == "embedding":
                folds[row.name] = _Fold(gains=((),))
            elif (row.split == "row" and not inside) or (
                row.role == "latent" and row.after_experts
            ):
                folds[row.name] = _Fold(writes=True)
                if row.bias in modules:
                    folds[row.bias] = _Fold(writes=True)
    return folds


def _mixing_folds(
    checkpoint: Checkpoint, rows: Sequence[Parameter], width: int
) -> dict[str, _Fold]:
    """Of what weighs several residual streams in one layer: linears over all of them, normed, and
    the gains of these norms."""
    folds: dict[str, _Fold] = {}
    mixing = [row for row in rows if row.role == "streams"]
    for row in mixing:
        if len(row.shape) < 2:
            continue
        if row.shape[1] % width or not row.shape[0] % width:
            raise _refusal(checkpoint, f"{row.name} weighs every channel of its residual streams")
        norms = [one for one in mixing if one.block == row.block and one.shape == row.shape[1:]]
        folds[row.name] = _Fold(gains=(tuple(norms),) * (row.shape[1] // width))
        folds |= {norm.name: _Fold(unit=True) for norm in norms}
    return folds


def _latent_folds(checkpoint: Checkpoint, model: Model) -> dict[str, _Fold]:
    modules, folds = {row.module: row for row in model.rows}, dict[str, _Fold]()
    for group in _groups(model):
        readers = [modules[module] for module in group.consumers]
        made = _MADE_BY.get(readers[0].projection or "o")
        if not group.producer_is_norm or made is None:
            continue
        norm = modules[group.producer]
        own = [row for row in model.rows if row.layer == norm.layer and row.block == "attention"]
        if any(row.role == "state" for row in own):
            raise _refusal(checkpoint, f"{norm.name} comes after a convolution of each channel")
        for row in own:
            if row.projection == made:
                parts = [row.name, *([row.bias] if row.bias in modules else [])]
                folds |= {name: _Fold(latent=norm.shape[0]) for name in parts}
        folds[norm.name] = _Fold(unit=True)
        folds |= {row.name: _Fold(gains=((norm,),), of="latents") for row in readers}
    if not folds:
        raise _refusal(checkpoint, "it has no latent attention whose latents linears alone read")
    return folds


def _value_folds(checkpoint: Checkpoint, model: Model) -> dict[str, _Fold]:
    folds: dict[str, _Fold] = {}
    for group in _groups(model):
        if width := group.head_width:
            before = 0 if group.heads is None else group.heads.before
            folds[f"{group.producer}.weight"] = _Fold(made=width, before=before)
            folds |= {f"{module}.weight": _Fold(read=width) for module in group.consumers}
    if not folds:
        raise _refusal(checkpoint, "no layer passes its values on as attention sums them")
    return folds


def _down_folds(checkpoint: Checkpoint, model: Model) -> dict[str, _Fold]:
    """Blocks of one size: config.json names linears by the ends of their names."""
    downs = [row for row in model.rows if row.projection == "down"]
    widths = {row.shape[1] for row in downs}
    block = min((_BLOCK, *(width & -width for width in widths)))
    if not downs or block < _LEAST_BLOCK:
        raise _refusal(checkpoint, f"no block of {_LEAST_BLOCK} channels divides {sorted(widths)}")
    return {row.name: _Fold(block=block) for row in downs}
