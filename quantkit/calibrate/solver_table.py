"""The solver of every linear of one output, whose linears may be on several grids."""

from collections.abc import Callable, Collection, Mapping

from quantkit.calibrate.batches import PIECE_VALUES
from quantkit.calibrate.linear_solver import Solver
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.formats.base import Format
from quantkit.grids.schemes import Grid, Method
from quantkit.grids.weights import Weight
from quantkit.models.activation_quant import Reading


class Solvers:
    """One recipe on each grid. grid_of: of a module that is rounded. format: tells what its scales
    and inputs are stored and read in."""

    def __init__(
        self,
        format: Format,
        grid_of: Callable[[str], Grid],
        recipe: Recipe,
        methods: tuple[Method, ...],
        piece_values: int = PIECE_VALUES,
    ) -> None:
        self.format, self.grid_of, self.recipe, self.methods, self.piece_values = (
            format,
            grid_of,
            recipe,
            methods,
            piece_values,
        )
        self._by_grid: dict[Grid, Solver] = {}

    @property
    def compensates(self) -> bool:
        return "gptq" in self.methods

    def of(self, module: str) -> Solver:
        """What rounds this linear."""
        return self.on(self.grid_of(module))

    def on(self, grid: Grid) -> Solver:
        """What rounds to this grid; the same object for all linears on it."""
        if grid not in self._by_grid:
            scale_dtype, bits = (
                self.format.scale_dtype_of(grid),
                self.format.activation_bits_of(grid),
            )
            self._by_grid[grid] = Solver(
                grid, scale_dtype, self.recipe, self.methods, bits, self.piece_values
            )
        return self._by_grid[grid]

    def alike(self, modules: Collection[str]) -> dict[Solver, list[str]]:
        """The modules by what rounds them, in their order."""
        found: dict[Solver, list[str]] = {}
        for module in modules:
            found.setdefault(self.of(module), []).append(module)
        return found

    def readings(
        self, modules: Collection[str], weights: Mapping[str, Weight] | None = None
    ) -> dict[str, Reading]:
        """Of these, those that round what they read, and how. weights: rounded ones, by module."""
        bits = {module: self.of(module).activation_bits for module in modules}
        return {
            module: Reading.of((weights or {}).get(module), own)
            for module, own in bits.items()
            if own < 16
        }
