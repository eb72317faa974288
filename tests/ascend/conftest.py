"""Two folders run in environments of their own (make test-ascend) and are left out elsewhere.

lowered needs triton-ascend, which takes the name of triton; schemas needs torch_npu, which replaces parts of torch when imported.
"""

from importlib.metadata import PackageNotFoundError, distribution

ENVIRONMENTS = {"lowered": "triton-ascend", "schemas": "torch_npu"}


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


collect_ignore = [folder for folder, package in ENVIRONMENTS.items() if not _installed(package)]
