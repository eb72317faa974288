"""`quantkit kernels --check`, which the first person with an NPU runs, on the double: every
operator of the backend, and the versions."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from ascend import npu_double
from quantkit_kernels import function_cases, timing, torch_npu
from quantkit_kernels.torch_npu import machine
from typer.testing import CliRunner

from quantkit.cli import app
from quantkit.common import devices

check = importlib.import_module(
    "quantkit_kernels.self_check"
)  # the package's attribute of that name is the function


@pytest.fixture(scope="module")
def measured():
    """All rows, and the operators of torch_npu that were called. R1's shapes take the double a
    minute; these are smaller."""
    with pytest.MonkeyPatch.context() as patch, npu_double.installed() as called:
        patch.setattr(check, "LINEARS", {"q_b": (24576, 1536)})
        patch.setattr(timing, "_CPU_SECONDS", 0.0)
        for one in (check, function_cases):
            patch.setattr(one, "HIDDEN", 1024)
            # Thousands, of weights so small next to a large cache.
            patch.setattr(one, "copies_beyond_cache", lambda nbytes, device: 1)
        yield list(check.check("cpu")), set(called)


def test_every_operator_is_run_and_right(measured):
    found = [one for one in measured[0] if one.backend == "torch_npu"]
    assert {one.operator for one in found} == torch_npu.NEEDS.keys()
    assert [(one.operator, one.case, one.error) for one in found if not one.ok] == []
    assert measured[1] == {name for names in torch_npu.NEEDS.values() for name in names}


def test_versions_stand_beside_the_results(measured, monkeypatch):
    """The command as on an NPU: versions of CANN and the driver, every row, the published
    tables."""
    versions = {
        "torch": "2.13.0",
        "torch_npu": "2.13.0",
        "cann": "8.2.RC1",
        "driver": "25.2.0",
        "device": "8 x Ascend910B1",
    }
    npu = SimpleNamespace(device_count=lambda: 8, get_device_name=lambda: "Ascend910B1")
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(devices, "find_device", lambda name: SimpleNamespace(type="npu", index=0))
    monkeypatch.setattr(machine, "describe", lambda device: versions)
    monkeypatch.setattr(check, "check", lambda target: measured[0])
    reply = CliRunner().invoke(app, ["kernels", "--check", "--json"])
    said = json.loads(reply.stdout)
    assert versions.items() <= said["machine"].items()
    assert [(row["operator"], row["backend"]) for row in said["rows"]] == [
        (row.operator, row.backend) for row in measured[0]
    ]
    assert said["published"]
    shown = CliRunner().invoke(app, ["kernels", "--check"]).output
    for text in ("8.2.RC1", "25.2.0", "Ascend910B1", "mla_prolog"):
        assert text in shown
