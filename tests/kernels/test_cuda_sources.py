"""What can be told of the CUDA sources without compiler or device: what Python calls is there, exported, and takes what it is given."""

import ctypes
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantkit_kernels.cuda import build

FOLDER = Path(build.__file__).parent
SOURCES = [re.sub(r"//.*", "", path.read_text()) for path in sorted({*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")})]
FUNCTIONS = dict(match for text in SOURCES for match in re.findall(r'extern "C" int (\w+)\(([^)]*)\)', text))
STRUCTURES = [
    build.Params,
    build.Matrix,
    build.ExpertsParams,
    build.TileParams,
    build.Shares,
    build.Route,
    build.GqaPrepare,
    build.GqaDecode,
]
SCALARS = {"int": ctypes.c_int, "float": ctypes.c_float, "int64_t": ctypes.c_int64}


def parameters(function: str) -> list[str]:
    return [one.strip() for one in FUNCTIONS[function].split(",")]


def test_calls_agree_with_their_functions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: dict[str, SimpleNamespace] = defaultdict(SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(build, "library_path", lambda _: tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: type("Library", (), {"__getattr__": lambda _, name: loaded[name]})())
    build.library.__wrapped__()
    assert len(loaded) >= 15
    for name, function in loaded.items():
        assert name in FUNCTIONS, f"{name} is in no source"
        assert len(function.argtypes) == len(parameters(name)), name
        for given, parameter in zip(function.argtypes, parameters(name), strict=True):
            pointer = given is ctypes.c_void_p or issubclass(given, ctypes._Pointer)
            assert pointer if "*" in parameter else given is SCALARS[parameter.split()[0]], (name, parameter, given)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.__name__)
def test_structures_have_the_fields_of_the_source(structure: type[ctypes.Structure]) -> None:
    (body,) = (match for text in SOURCES for match in re.findall(rf"struct {structure.__name__} {{(.*?)}};", text, re.DOTALL))
    fields = [name for line in body.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert fields == [name for name, *_ in structure._fields_]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.__name__)
def test_structures_lie_in_no_namespace(structure: type[ctypes.Structure]) -> None:
    """A function of C with a type of an unnamed namespace compiles, and nobody can call it."""
    for text in SOURCES:
        before, found, _ = text.partition(f"struct {structure.__name__} {{")
        assert not found or before.count("{") == before.count("}"), structure
