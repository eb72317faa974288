"""Two folders run in environments of their own (make test-ascend) and are left out elsewhere.

lowered needs triton-ascend, which takes the name of triton; schemas needs torch_npu, which replaces parts of torch when imported.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

FORMATS = {"rtn-w4a16": "compressed-tensors"}
"""Where it is not the scheme's first: so that both formats of int4 are seen, with their fp16 and bf16 scales."""
ENVIRONMENTS = {"lowered": "triton-ascend", "schemas": "torch_npu"}


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


collect_ignore = [folder for folder, package in ENVIRONMENTS.items() if not _installed(package)]


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The built-in model rounded to nearest on a scheme's grid, made once."""
    from quantkit.assets import builtin_model
    from quantkit.quantize import quantize
    from quantkit.recipe import Recipe
    from quantkit.schemes import find_scheme

    made: dict[str, Path] = {}

    def make(scheme: str) -> Path:
        if scheme not in made:
            made[scheme] = tmp_path_factory.mktemp("quantized") / scheme
            target = FORMATS.get(scheme, "auto")
            quantize(builtin_model("tiny-r1"), made[scheme], find_scheme(scheme), target, Recipe(scheme=scheme, methods=()), device="cpu")
        return made[scheme]

    return make
