"""Versions are read from the files that CANN and the driver leave, and said to be unknown where there are none."""

from pathlib import Path

import pytest
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


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert machine.cann_version(tmp_path) == f"no version.info below {tmp_path}"
    assert machine.version_in(tmp_path / "version.info") == f"no {tmp_path}/version.info"
    (tmp_path / "empty.info").write_text("nothing here\n")
    assert "no version in" in machine.version_in(tmp_path / "empty.info")
