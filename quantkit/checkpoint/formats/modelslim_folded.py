"""ModelSlim's linears whose inputs are transformed as the model runs: online QuaRot and FlatQuant.
Read only.

    QuaRot      X.heads_rotation [m, m]; or X.kronecker_rotation_m [m, m] and X.kronecker_rotation_n [n, n], of the modules that
                metadata.quarot of the description lists; the weight is of any type
    FlatQuant   X.left_trans [m, m] and X.right_trans [n, n], or one of them; X.clip_ratio [1]

An input x [K] is a matrix [m, n], K = m n, and becomes L^T x R; a matrix that is missing is the
identity (msmodelslim's ir/quarot.py and ir/flatquant.py, vllm-ascend's w4a4_flatquant.py). What the
linear multiplies x by is then a row w [m, n] as L w R^T, which is made as the weight is read: it is
plain, and what it reads is not rounded. clip_ratio, of the rounding, is not used.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.checkpoint.formats.base import (
    FLOAT_DTYPES,
    Format,
    Json,
    Parts,
    Shape,
    Specs,
    StoredPart,
    Tensors,
)
from quantkit.common.errors import QuantkitError
from quantkit.grids.base import Grid, Weight, dequantize

Sides = tuple[str, str]
"""Suffixes of the left and the right matrix; empty for one that there is not."""
FLAT: Sides = (".left_trans", ".right_trans")
_ONLINE: Mapping[str, Sides] = {
    "heads_rotation": (".heads_rotation", ""),
    "kronecker_rotation": (".kronecker_rotation_m", ".kronecker_rotation_n"),
}
_CLIP = ".clip_ratio"


class FoldedInputs(Format):
    """Linears of `member` over inputs transformed by matrices with these suffixes."""

    name = "modelslim"

    def __init__(self, member: Format, sides: Sides) -> None:
        self.inner, self.sides = member, sides
        self.variant, self.marker_dtype = member.variant, member.marker_dtype  # type: ignore[misc]
        self.own_suffixes = member.own_suffixes  # type: ignore[misc]

    def stored(self, module: str, tensors: Specs, grid: Grid | None) -> tuple[Shape, Grid | None]:
        return self.inner.stored(module, tensors, grid)

    def parts(self, module: str, shape: Shape, grid: Grid | None) -> Parts:
        """Every input is of the one group that the matrices mix."""
        clip = StoredPart(_CLIP, FLOAT_DTYPES, (1,), required=False)
        matrices = (
            StoredPart(side, FLOAT_DTYPES, (), False, (("K", shape[1]),), any_shape=True)
            for side in self.sides
            if side
        )
        return (*self.inner.parts(module, shape, grid), *matrices, clip)

    def unpack(self, module: str, tensors: Tensors) -> Weight:
        weight = dequantize(self.inner.unpack(module, tensors))
        left, right = (tensors.get(module + side) for side in self.sides)
        columns = weight.shape[1]
        rows = columns // max(1, len(right)) if left is None and right is not None else 0
        rows = rows if left is None else len(left)
        sizes = (rows, columns // max(1, rows))
        fit = all(
            matrix is None or matrix.shape == (size, size)
            for matrix, size in zip((left, right), sizes)
        )
        if rows * sizes[1] != columns or not fit:
            raise QuantkitError(
                f"the matrices that transform inputs of {module} are missing, or do not fit its "
                f"{columns} input channels",
                "download the shard again",
            )
        folded = weight.unflatten(1, sizes)
        folded = folded if left is None else torch.einsum("ia,naj->nij", left.float(), folded)
        folded = folded if right is None else folded @ right.float().T
        return folded.flatten(1).contiguous()


def rotated_online(described: Json) -> dict[str, Sides]:
    """By the module that QuaRot rotates the inputs of as the model runs. What is under `optional` is
    folded into the weights."""
    found = dict[str, Sides]()
    for kind, sides in _ONLINE.items():
        said: Any = described
        for key in ("metadata", "quarot", kind, "layers"):
            said = said.get(key) if isinstance(said, dict) else None
        found |= {str(one).rstrip("."): sides for one in (said if isinstance(said, list) else ())}
    return found
