"""One run of ours in a process of its own: python quality_ours.py SOURCE OUT SCHEME DEVICE
SETTINGS.json

SETTINGS are values of a recipe, beside those that the scheme's recipe has; `mixture`, if given, the
fields of a `Mixture` (bits: 4.5).
"""

import json
import sys
from pathlib import Path

from quantkit.calibrate.recipe import Recipe, load_recipe
from quantkit.grids.schemes import find_scheme
from quantkit.quantization.mixed_precision import Mixture
from quantkit.quantization.run import quantize


def main() -> None:
    source, out, scheme, device = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    settings = json.loads(Path(sys.argv[5]).read_text())
    mixture = Mixture(**settings.pop("mixture", {}))
    recipe = Recipe.model_validate(load_recipe(scheme).model_dump() | settings)
    format = "compressed-tensors" if mixture.chooses else "auto"
    report = quantize(
        source,
        out,
        find_scheme(scheme),
        format,
        recipe,
        mixture=mixture,
        device=device,
        overwrite=True,
    )
    print(json.dumps({"seconds": report.seconds, "told": report.findings.next_token}))


if __name__ == "__main__":
    main()
