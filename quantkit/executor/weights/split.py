"""The range of a linear's features that one tensor-parallel rank holds: columns of the output (rows
of W) or of the input, as the model's table says.

The weight cuts itself (`quantkit.grids.base`), packed as it is: along K on group boundaries. FP8
blocks are expanded first, as their operator would. Where activations are rounded too (int8, a scale
per token), each rank rounds its own inputs with their own scale: finer than one rank's, which takes
the largest of them all.
"""

from quantkit.common.errors import UsageError


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
