"""Which backends an operator's test runs on: each that is usable here, on its own device."""

import pytest
import torch
from quantkit_kernels.backends import why_unusable

BACKENDS = ("reference", "cpu", "triton", "cuda")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = {
    "reference": (torch.float32, *HALVES),
    "cpu": (torch.float32, *HALVES),
    "triton": HALVES,
    "cuda": HALVES,
}
"""What a backend's operators on activations compute in."""
GPU = torch.cuda.is_available()


def device_of(backend):
    """Triton's kernels run in its interpreter where there is no GPU."""
    return torch.device("cuda" if backend == "cuda" or (backend == "triton" and GPU) else "cpu")


def backends_of(operator, names=BACKENDS, dtypes=True):
    """Parameters (backend, dtype), or backend alone; skipped, with the reason, where it cannot
    run."""
    found = []
    for name in names:
        reason = why_unusable(operator, name, device_of(name))
        marks = pytest.mark.skipif(reason is not None, reason=f"{name}: {reason}")
        for dtype in DTYPES[name] if dtypes else (None,):
            values = (name,) if dtype is None else (name, dtype)
            found.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return found
