"""How much a calibrated run has in work at a time. Results differ with it in their last bits, so a
run keeps to what it began with."""

from dataclasses import dataclass

BATCH_TOKENS = 2048
PIECE_VALUES = 2**24


@dataclass(frozen=True)
class Batches:
    """What fits in a CPU's memory.

    tokens: run through a sublayer together, in whole sequences. expert_values: weights of routed
    experts solved together, at least one expert (R1's, of 44 million, go one by one). piece_values:
    weights of one linear rounded together, in whole rows: rows are independent, and a piece's
    blocks of columns stay in a processor's cache.
    """

    tokens: int = BATCH_TOKENS
    expert_values: int = 2**25
    piece_values: int = PIECE_VALUES

    def halved(self) -> "Batches":
        """Half as much, but not below what saves nothing any more."""
        return Batches(
            max(self.tokens // 2, 128),
            max(self.expert_values // 2, 2**16),
            max(self.piece_values // 2, 2**20),
        )

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.expert_values} expert values, {self.piece_values} "
            "values a piece"
        )
