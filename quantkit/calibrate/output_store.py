"""What calibration asks of whoever writes the output."""

from typing import Any, Protocol

from torch import Tensor

from quantkit.grids.weights import Weight


class UnitStore(Protocol):
    """Where finished units go, and what is already there."""

    def done(self, unit: str) -> bool:
        """Whether the unit was written before, by this run or the one it resumes."""

    def write(
        self,
        unit: str,
        quantized: dict[str, Weight],
        plain: dict[str, Tensor],
        facts: dict[str, Any],
    ) -> None:
        """Write a unit, now or behind the caller's back. quantized: by module. plain: by tensor
        name; those of the unit that are absent are copied from the source."""

    def settle(self) -> None:
        """Returns when all units are written that were to be: other ranks may read them."""

    def reread(self) -> None:
        """Learn what other ranks have written since."""

    def load(self, unit: str) -> tuple[dict[str, Weight], dict[str, Tensor], dict[str, Any]]:
        """A finished unit as it was written, its weights on the device, and its facts."""

    def facts(self, unit: str) -> dict[str, Any]:
        """Those of a finished unit alone."""

    def save_state(self, layer: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Keep the hidden states at the input of a layer, and what was found out so far, for a
        restart, in place of those kept before."""

    def load_state(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """The layer whose input was saved last, with what was saved."""
