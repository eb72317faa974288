"""abi.py against the CUDA sources, without compiler or device: every structure field by field,
every function parameter by parameter."""

import ctypes
import inspect
import re

import pytest
from quantkit_kernels.cuda import abi, build

SOURCES = [re.sub(r"//.*", "", path.read_text()) for path in sorted(build.SOURCES.rglob("*.cu*"))]
EXPORTED = re.compile(r'extern "C" ([\w\s*]+?)(\w+)\(([^)]*)\)')
FUNCTIONS = {
    name: (result, taken) for text in SOURCES for result, name, taken in EXPORTED.findall(text)
}
"""By name: what each function returns, and its parameters."""
WAITS_FIRST = ("fused_experts.cu", "expand.cu")
"""Sources whose kernels read nothing before their predecessor has ended, or have none."""
STRUCTURES = [
    one for _, one in inspect.getmembers(abi, inspect.isclass) if issubclass(one, ctypes.Structure)
]
SCALARS = {
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
}
SCALARS |= {one.__name__: one for one in STRUCTURES}


def kind_of(declared):
    """What ctypes calls a C type, whatever a pointer points to."""
    return ctypes.c_void_p if "*" in declared else SCALARS[declared.replace("const", "").split()[0]]


def is_pointer(kind):
    return kind is ctypes.c_void_p or issubclass(kind, ctypes._Pointer)


def fields(structure):
    """Names and types of the fields that the source declares, in order."""
    (body,) = (
        match
        for text in SOURCES
        for match in re.findall(rf"struct {structure} {{(.*?)}};", text, re.DOTALL)
    )
    found = []
    for line in filter(None, map(str.strip, body.split(";"))):
        first, *others = line.split(",")
        declared, name = re.fullmatch(r"(.*?)(\w+)", first, re.DOTALL).groups()
        found.append((name, kind_of(declared)))
        base = declared.replace("*", "")
        found += [(other.strip(" *"), kind_of(base + "*" * other.count("*"))) for other in others]
    return found


def test_every_function_is_declared_as_its_source_has_it():
    assert abi.FUNCTIONS.keys() == FUNCTIONS.keys()
    for name, given in abi.FUNCTIONS.items():
        result, taken = FUNCTIONS[name]
        assert abi.RESULTS.get(name, ctypes.c_int) is (
            ctypes.c_char_p if "char" in result else SCALARS[result.strip()]
        ), name
        parameters = [one.strip() for one in taken.split(",")]
        assert len(given) == len(parameters), name
        for kind, parameter in zip(given, parameters, strict=True):
            assert is_pointer(kind) == ("*" in parameter), (name, parameter)
            assert is_pointer(kind) or kind is kind_of(parameter), (name, parameter)
            named = [one for one in STRUCTURES if re.search(rf"\b{one.__name__}\b", parameter)]
            pointed = getattr(kind, "_type_", None) if issubclass(kind, ctypes._Pointer) else None
            assert named == [pointed] * (pointed in STRUCTURES), (name, parameter)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda one: one.__name__)
def test_structures_have_the_fields_of_the_source(structure):
    """And lie in no namespace: a function of C with a type of an unnamed one compiles, and nobody
    can call it."""
    assert fields(structure.__name__) == [(name, kind) for name, kind, *_ in structure._fields_]
    for text in SOURCES:
        before, found, _ = text.partition(f"struct {structure.__name__} {{")
        assert not found or before.count("{") == before.count("}"), structure


def test_no_load_is_moved_past_the_wait_for_the_predecessor():
    """ptxas moves ld.global.nc, which __ldg is too, behind griddepcontrol.wait: weights would be
    asked for when the predecessor has ended. Kernels that wait first may have some."""
    for path in sorted(build.SOURCES.rglob("*.cu*")):
        text = re.sub(r"//.*", "", path.read_text())
        late = {"ld.global.nc", "__ldg("} & set(re.findall(r"ld\.global\.nc|__ldg\(", text))
        assert not late or path.name in WAITS_FIRST, (path.name, late)
