"""quantize() by a recipe alone, on this CPU; and runs that are stopped."""

from quantkit.calibrate.recipe import Recipe
from quantkit.grids.schemes import find_scheme
from quantkit.quantization.run import quantize


def quantized(source, out, recipe, format="auto", **options):
    """recipe: of its scheme, or a scheme's name for that scheme's settings. The run's report."""
    if isinstance(recipe, str):
        recipe = Recipe(scheme=recipe)
    scheme = find_scheme(recipe.scheme)
    return quantize(source, out, scheme, format, recipe, device="cpu", **options)


def stop_when(is_there):
    """A listener that interrupts a run at the first event for which this holds."""

    def listen(event):
        if is_there(event):
            raise KeyboardInterrupt

    return listen
