"""The CPU's version of Ascend C ends a program that counts on what the chip does not promise, and
no other."""

import ctypes

import pytest
import torch
from ascend import ascendc
from ascend.guard import OutsideOperands

RULES = (
    "data is there from DeQue on",
    "a freed buffer is not read",
    "what another instruction wrote is read behind a barrier",
    "the atomic mode is off at the end",
    "every buffer is given back",
    "nothing is written past a buffer",
    "192 KiB of buffers",
    "who waits is told",
    "a flag that is set is waited for",
    "both vector cores tell the cube core",
    "flags 11 to 14 are SyncAll's",
    "all cores meet at SyncAll",
    "eight event ids of a pair of pipes",
    "SyncAll of vector cores wants a type that is scheduled",
    "a cube core has two vector cores",
    "SyncAll wants batch mode",
)


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ascendc.compiled(ascendc.CPU / "rules.cpp", tmp_path_factory.mktemp("ascendc"))


@pytest.mark.parametrize("rule", range(len(RULES)), ids=RULES)
def test_a_rule(rules, rule, capfd):
    values = torch.arange(128.0)
    ascendc.launch(rules, rule, True, [values], [])
    with pytest.raises(OutsideOperands):
        ascendc.launch(rules, rule, False, [torch.arange(128.0)], [])
    assert ".h:" in capfd.readouterr().err, "it says which rule"


def test_what_is_sent_arrives_late(rules):
    values = torch.arange(192.0)
    values[64:] = float("nan")
    rules.late(ctypes.c_void_p(values.data_ptr()))
    assert torch.equal(values[64:128], 2 * values[:64])
    assert values[128:].isnan().all()
