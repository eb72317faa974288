"""The calls of backend torch_npu against torch_npu 2.13.0 itself: its schemas, and the shapes its
Meta functions give.

Runs where torch_npu is installed over do-nothing libraries (stand_ins.py); no NPU and no CANN.
"""

import inspect
from pathlib import Path

import pytest
import torch
import torch_npu
from ascend.device_double import TOLD
from ascend.test_rule_bounds import BOUNDS, read
from quantkit_kernels import accelerator
from quantkit_kernels.torch_npu import NEEDS, calls
from quantkit_kernels.torch_npu.rules import RULES
from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

META = torch.device("meta")
WITHOUT_META = {"npu_format_cast"}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device=META)


def test_the_doubles_schemas_are_torch_npus():
    ours = (Path(__file__).parents[1] / "npu_schemas.txt").read_text().splitlines()
    assert ours == [str(getattr(torch.ops.npu, name).default._schema) for name in RULES]


@pytest.mark.parametrize("name", RULES)
def test_an_npu_has_the_kernel_a_cpu_has_not(name):
    # has_kernel asks for the device's dispatch key; the device itself is never touched.
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{name}", "PrivateUse1")
    assert not calls.has_kernel(name, torch.device("cpu"))
    assert calls.has_kernel(name, torch.device("meta")) == (name not in WITHOUT_META)


def test_every_needed_operator_has_rules():
    assert {name for names in NEEDS.values() for name in names} <= RULES.keys()


SHAPES = [(name, row) for name in RULES if name in BOUNDS for row in BOUNDS[name].get("shapes", ())]


@pytest.mark.parametrize(("name", "row"), SHAPES, ids=str)
def test_results(name, row):
    """Shapes and dtypes by torch_npu's Meta functions; every rule holds too."""
    change = {key: value for key, value in row.items() if key != "gives"}
    given = {key: read(value) for key, value in (BOUNDS[name]["call"] | change).items()}
    found = calls.call(name, **given)
    every = found if isinstance(found, (tuple, list)) else [found]
    for one, expected in zip(every, read(row["gives"]), strict=True):
        if expected is not None:
            assert (one.shape, one.dtype) == (expected.shape, expected.dtype)


def test_every_operator_has_its_results():
    assert {name for name, _ in SHAPES} == RULES.keys() - {"npu_format_cast", "npu_prefetch"}


def test_graphs_are_told_lengths():
    """What accelerator.capture and accelerator.replay call, and the double of graphs stands for, is
    torch_npu's own: the context's and the graph's signatures, and its handler of our operator,
    which swaps in the variant with room for results and updates the lengths."""
    capture = inspect.signature(torch_npu.npu.graph.__init__).parameters
    assert {"pool", "stream", "auto_dispatch_capture", "capture_error_mode"} <= capture.keys()
    assert list(inspect.signature(torch_npu.npu.NPUGraph.update).parameters) == [
        "self",
        "cpu_update_input",
    ]
    for name, told in TOLD.items():
        operator = getattr(torch.ops.npu, name)
        handler = _NPU_GRAPH_OP_HANDLERS[operator.default.__name__]
        assert handler is _NPU_GRAPH_OP_HANDLERS[operator.out.__name__]
        assert [key for _, _, key in handler.get_update_specs(operator.default.__name__)] == list(
            told
        )
        known = {argument.name for argument in operator.out._schema.arguments}
        assert {argument.name for argument in operator.default._schema.arguments} | {
            "workspace",
            "out",
        } == known
        assert set(told) <= known
        assert hasattr(torch_npu, f"_{name}_get_max_workspace")
        assert hasattr(torch_npu, f"_{name}_infer_output")


def test_the_driver_has_what_is_asked_of_it():
    for name in (
        "NPUGraph",
        "Stream",
        "current_stream",
        "graph",
        "graph_pool_handle",
        "stream",
        "set_device",
        "mem_get_info",
    ):
        assert hasattr(torch_npu.npu, name), name
    assert hasattr(torch_npu.npu.Stream, "wait_stream")
    assert hasattr(torch_npu.npu.Stream, "synchronize")
    assert accelerator.GRAPHS["npu"] == torch_npu.npu.NPUGraph.__name__


def test_ranks_meet_over_hccl():
    """The name that Parallel.connect gives torch.distributed for an NPU is the one that torch_npu
    registers."""
    assert "hccl" in torch.distributed.Backend.backend_list
    assert "npu" in torch.distributed.Backend.backend_capability["hccl"]


def test_the_meta_functions_are_lenient():
    """Why the rules exist: a group of 33 passes torch_npu's own check, and ours refuses it."""
    x, weight, scale = meta(4, 128), meta(128, 8, dtype=torch.int32), meta(4, 64)
    torch.ops.npu.npu_weight_quant_batchmatmul(x, weight, scale, antiquant_group_size=33)
    with pytest.raises(AssertionError, match="multiple of 32"):
        calls.call("npu_weight_quant_batchmatmul", x, weight, scale, None, antiquant_group_size=33)
