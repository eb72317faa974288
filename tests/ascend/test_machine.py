"""Versions are read from the files that CANN and the driver leave, and said to be unknown where
there are none."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantkit_kernels.torch_npu import machine


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version=8.2.RC1\nversion_dir=8.2.RC1\n", "8.2.RC1"),
        ("Version=25.2.0\nascendhal_version=7.35.23\n", "25.2.0"),
        ("package_version=24.1.rc3\n", "24.1.rc3"),
        ("version=[7.7.0.1.238:8.3.RC1]\n", "8.3.RC1"),
    ],
)
def test_versions(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text(text)
    assert machine.cann_version(tmp_path) == version


def test_what_stands_beside_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "version.info").write_text("Version=8.2.RC1\n")
    (tmp_path / "driver.info").write_text("Version=25.2.0\n")
    npu = SimpleNamespace(
        device_count=lambda: 8,
        get_device_name=lambda index: {1: "Ascend910B1"}[index],
        get_device_limit=lambda index: {1: {"cube_core_num": 24, "vector_core_num": 48}}[index],
    )
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "driver.info")
    monkeypatch.setattr(torch, "get_device_module", lambda device: npu)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.13.0"))
    about = machine.describe(torch.device("cpu", 1))
    assert about == {
        "torch": torch.__version__,
        "torch_npu": "2.13.0",
        "cann": "8.2.RC1",
        "driver": "25.2.0",
        "device": "8 x Ascend910B1",
        "cores": "24 cube, 48 vector",
    }


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert machine.cann_version(tmp_path) == f"no version.info below {tmp_path}"
    assert machine.version_in(tmp_path / "version.info") == f"no {tmp_path}/version.info"
    (tmp_path / "empty.info").write_text("nothing here\n")
    assert "no version in" in machine.version_in(tmp_path / "empty.info")
