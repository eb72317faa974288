"""Faults in codes and scales: each is found by the bytes, or by the source. Good checkpoints,
folded and act-order ones too, have none."""

import faulty
import good_checkpoints
import make_model
import pytest
import torch
from nearest import quantize_int
from packed_model import write_packed

from quantkit.checkpoint.formats import gptq
from quantkit.checkpoint.reader import Checkpoint
from quantkit.diagnosis.diagnose import diagnose
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid

TENSORS = [fault for fault in faulty.FAULTS.values() if fault.depth == "tensors"]
SMALL_MOE = good_checkpoints.QWEN3_MOE | {"num_hidden_layers": 2, "num_experts": 4}
FORMATS = ("awq", "ct-int4", "modelopt", "gptq", "ct-int8")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Checkpoints and their source; the last is plain."""
    folder, tensors = tmp_path_factory.mktemp("good"), good_checkpoints.random_weights(SMALL_MOE)
    source = make_model.write_dense(folder / "source", SMALL_MOE, tensors)
    made = [
        write_packed(folder / name, SMALL_MOE, tensors, *good_checkpoints.FORMATS[name])
        for name in FORMATS
    ]
    return [(path, source) for path in [*made, source]]


@pytest.fixture(scope="module")
def opened(good):
    """The same in memory, to be copied and changed."""
    return [(faulty.Contents.of(path), source) for path, source in good]


@pytest.mark.parametrize("fault", TENSORS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, opened, tmp_path):
    faulty.check_found(fault, opened, tmp_path)


def _half(tensor):
    return torch.cat([tensor[: len(tensor) // 2], torch.zeros_like(tensor[len(tensor) // 2 :])])


@pytest.mark.parametrize(
    ("format", "part", "change", "cause"),
    [
        ("fp8", "weight", _half, "codes-constant"),
        ("fp8", "weight_scale_inv", torch.zeros_like, "scales-zero"),
        ("ct-int4", "weight_scale", torch.zeros_like, "scales-zero"),
        ("ct-int8", "weight", torch.Tensor.float, "part-malformed"),
    ],
)
def test_no_other_cause_is_named(
    format,
    part,
    change,
    cause,
    opened,
    tiny_checkpoint,
    tmp_path,
):
    """Of what was not written, or in another dtype."""
    good = faulty.Contents.of(tiny_checkpoint) if format == "fp8" else None
    contents = (good or opened[FORMATS.index(format)][0]).copy()
    name = f"model.layers.1.self_attn.o_proj.{part}"
    contents.tensors[name] = change(contents.tensors[name])
    found = diagnose(str(contents.write(tmp_path / "bad")), depth="tensors").findings
    assert [one.name for one in found.found if one.severity != "note"] == [cause], found.to_json()


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("codes_are_saturated", "ct-int4"),
        ("the_method_is_misspelt", "modelopt"),
        ("modelopts_two_files_disagree", "modelopt"),
    ],
)
def test_a_fault_is_found_in_a_dense_model(name, format, tmp_path):
    """Of these `make test` tries another format, and `make test-faults` missed them here."""
    config = good_checkpoints.QWEN3 | {"num_hidden_layers": 2}
    path = write_packed(
        tmp_path / "good",
        config,
        good_checkpoints.random_weights(config),
        *good_checkpoints.FORMATS[format],
    )
    assert diagnose(str(path), depth="tensors").findings.verdict == "good"
    faulty.check_found(faulty.FAULTS[name], [(faulty.Contents.of(path), None)], tmp_path)


def test_good_checkpoints_have_no_finding(good):
    for path, source in good:
        assert diagnose(str(path), source=str(source), depth="tensors").to_json() == {
            "verdict": "good",
            "findings": [],
        }, path
    assert diagnose("tiny-r1", depth="tensors").to_json() == {"verdict": "good", "findings": []}


def test_scales_that_were_folded_into_all_readers_are_no_fault(good, tmp_path):
    contents = faulty.Contents.of(good[-1][0])
    faulty.tensors.divide_norm(contents, 1, router=True, experts=True)
    assert (
        diagnose(
            str(contents.write(tmp_path / "folded")), source=str(good[-1][1]), depth="tensors"
        ).findings.found
        == []
    )


def test_act_order_is_read_as_it_was_meant(good, tmp_path):
    """Groups of scattered inputs: the codes of a permuted weight, with an index that says so."""
    contents = faulty.Contents.of(next(path for path, _ in good if path.name == "gptq"))
    contents.block["desc_act"] = True
    source = Checkpoint.open(good[-1][0])
    for module in contents.linears:
        w = source.read(f"{module}.weight").float()
        order = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(0))
        sorted_codes = quantize_int(
            w[:, order], IntGrid(4, 64, symmetric=False), scale_dtype=torch.float16
        )
        back = torch.argsort(order)
        of_group = (torch.arange(w.shape[1]) // 64)[back]
        contents.tensors |= gptq.FORMATS[0].pack(module, sorted_codes)
        contents.tensors[f"{module}.qweight"] = gptq._pack(
            sorted_codes.codes[:, back], 4
        ).T.contiguous()
        contents.tensors[f"{module}.g_idx"] = of_group.int()
    path = contents.write(tmp_path / "act-order")
    assert diagnose(str(path), source=str(good[-1][1]), depth="tensors").findings.found == []
    read = Checkpoint.open(path)
    for module in list(contents.linears)[:4]:
        w = source.read(f"{module}.weight").float()
        assert float((dequantize(read.weight(module)) - w).norm() / w.norm()) < 0.15
        weight, first = read.weight_slice(module, "K", 64, 128)
        assert torch.equal(
            dequantize(weight), dequantize(read.weight(module))[:, first : first + 64]
        )
