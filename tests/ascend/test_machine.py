"""Versions are read from the files that CANN and the driver leave, and said to be unknown where
there are none."""

import os
import platform
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from quantkit_kernels import backends, torch_npu
from quantkit_kernels.torch_npu import calls, machine


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version=8.2.RC1\nversion_dir=8.2.RC1\n", "8.2.RC1"),
        ("Version=25.2.0\nascendhal_version=7.35.23\n", "25.2.0"),
        ("package_version=24.1.rc3\n", "24.1.rc3"),
        ("version=[7.7.0.1.238:8.3.RC1]\n", "8.3.RC1"),
    ],
)
def test_versions(tmp_path, text, version):
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text(text)
    assert machine.cann_version(tmp_path) == version


NPU = SimpleNamespace(
    device_count=lambda: 8,
    get_device_name=lambda index: {1: "Ascend910B1"}[index],
    get_device_limit=lambda index: {1: {"cube_core_num": 24, "vector_core_num": 48}}[index],
    is_available=lambda: False,
)
TORCH_NPU = SimpleNamespace(
    __version__="2.12.0",
    npu=SimpleNamespace(utils=SimpleNamespace(get_cann_version=lambda: "9.1.0")),
)


@pytest.fixture
def npu(tmp_path, monkeypatch):
    """torch_npu is imported, and cards are files of a folder."""
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "driver.info")
    monkeypatch.setattr(torch, "get_device_module", lambda device: NPU)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch_npu", TORCH_NPU)
    return tmp_path


def test_what_stands_beside_a_time(npu, monkeypatch):
    (npu / "driver.info").write_text("Version=25.2.0\n")
    about = machine.describe(torch.device("cpu", 1))
    assert (
        about.items()
        >= {
            "torch": torch.__version__,
            "torch_npu": "2.12.0",
            "cann": "9.1.0",
            "driver": "25.2.0",
            "python": platform.python_version(),
            "processor": platform.machine(),
            "device": "8 x Ascend910B1",
            "cores": "24 cube, 48 vector",
        }.items()
    )
    (npu / "runtime").mkdir()
    (npu / "runtime" / "version.info").write_text("Version=8.2.RC1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(npu))
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.13.0"))
    monkeypatch.setattr(platform, "freedesktop_os_release", Mock(side_effect=FileNotFoundError))
    assert machine.versions().items() >= {"cann": "8.2.RC1", "os": platform.system()}.items()


def test_what_keeps_an_npu_from_being_used(npu, monkeypatch):
    def said():
        lack = machine.lack()
        return f"{lack.what}: {lack.remedy}"

    monkeypatch.syspath_prepend(npu)
    for fault in ("ImportError", "OSError", "RuntimeError"):
        (npu / "torch_npu.py").write_text(f"raise {fault}('libhccl.so: cannot open')")
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch_npu")
            assert "torch_npu finds no libhccl.so: source CANN's set_env.sh" in said()
    assert f"there is no {npu}/davinci*: install the driver" in said()
    card = npu / "davinci0"
    card.touch()
    assert f"sees no card, though {card} is there" in said()
    monkeypatch.setattr(machine.os, "access", lambda path, mode: mode == os.R_OK)
    assert f"{card} may not be opened: join" in said()
    monkeypatch.undo()
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert "torch_npu is not installed: pip install torch_npu" in said()


HERE = {"torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4", "cann": "9.1.0", "processor": "aarch64"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ()),
        ({"torch_npu": "2.10.0.post6", "cann": "9.1.1"}, ()),
        ({"torch_npu": "2.10.0", "cann": "9.0.0"}, ()),
        ({"torch": "2.12.0", "torch_npu": "2.12.0.post2"}, ()),
        ({"torch_npu": "2.10.0"}, ("published for CANN 9.0, here is 9.1.0",)),
        ({"cann": "9.0.0"}, ("published for CANN 9.1, here is 9.0.0",)),
        ({"cann": "no version.info below /x"}, ("here is no version.info",)),
        ({"torch": "2.15.0"}, ("made for torch 2.10.0, not 2.15.0",)),
        ({"torch": "2.9.0", "torch_npu": "2.9.0"}, ("2.9.0 has no published CANN; published are 2.12",)),
        ({"processor": "riscv64"}, ("CANN is for aarch64 and x86_64",)),
        ({"torch": "2.11.0", "cann": "8.5.0"}, ("made for torch", "here is 8.5.0")),
    ],
)  # fmt: skip
def test_what_was_published_to_work_together(change, words):
    said = machine.unpublished(HERE | change)
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said))


@pytest.mark.parametrize(
    ("cann", "runs"),
    [("9.1.0", True), ("10.0.0", True), ("9.0.0", False), ("8.5.0", False), ("not known", False)],
)
def test_an_operator_that_cann_has_not_falls_back(cann, runs, monkeypatch):
    """It is registered all the same; `quantkit kernels` says why it is not taken."""
    npu = SimpleNamespace(type="npu", index=0)
    monkeypatch.setattr(machine, "installed_cann", lambda: cann)
    monkeypatch.setattr(torch_npu, "has_kernel", lambda name, device: True)
    reason = torch_npu.unusable("mla_prolog", npu, None, ())
    assert reason == (None if runs else f"needs CANN 9.1, here is {cann}")
    assert torch_npu.unusable("mla_decode", npu, None, ()) is None
    served = backends.serving("mla_prolog", "auto", npu)
    assert served == ("torch_npu" if runs else "reference")


def test_the_cubes_own_layout_is_allowed_before_it_is_asked_for(monkeypatch):
    config, cast = SimpleNamespace(allow_internal_format=False), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(config=config))
    monkeypatch.setattr(calls, "call", lambda *_: cast.append(config.allow_internal_format))
    calls.format_cast_nz(SimpleNamespace(device=SimpleNamespace(type="npu")))
    assert cast == [True]


def test_what_is_missing_is_named(tmp_path):
    assert machine.cann_version(tmp_path) == f"no version.info below {tmp_path}"
    assert machine.version_in(tmp_path / "version.info") == f"no {tmp_path}/version.info"
    (tmp_path / "empty.info").write_text("nothing here\n")
    assert "no version in" in machine.version_in(tmp_path / "empty.info")


def test_an_operator_is_looked_for_on_the_device():
    library = torch.library.Library("quantkit_probe", "DEF")
    library.define("one(Tensor x) -> Tensor")
    library.impl("one", torch.clone, "PrivateUse1")
    kinds = [SimpleNamespace(type=kind) for kind in ("npu", "cpu")]
    found = [calls.has_kernel("one", kind, "quantkit_probe") for kind in kinds]
    library._destroy()
    assert found == [True, False]
