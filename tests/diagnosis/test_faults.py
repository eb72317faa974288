"""Faults visible in headers and the files next to the weights, in codes and scales: each is found, by
the bytes or by the source. Good checkpoints, folded and act-order ones too, have none."""

import json
from pathlib import Path

import faulty
import good_checkpoints
import make_model
import pytest
import r1_headers
import torch
from commands import typed
from nearest import quantize_int

from quantkit.checkpoint.formats import gptq
from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.assets import builtin_model
from quantkit.diagnosis import EXIT_CODES, catalogue
from quantkit.diagnosis.diagnose import diagnose
from quantkit.grids.base import dequantize
from quantkit.grids.int_groups import IntGrid

CONFIG = make_model.tiny_config(num_hidden_layers=2)
SMALL_MOE = good_checkpoints.QWEN3_MOE | {"num_hidden_layers": 2, "num_experts": 4}


FORMATS = ("awq", "ct-int4", "modelopt", "gptq", "ct-int8")
FAULTS = [one for one in faulty.FAULTS.values() if one.depth in ("headers", "tensors")]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Checkpoints and their sources, by the depth of the faults that are made on them."""

    def packed(config, formats):
        folder = tmp_path_factory.mktemp("good")
        source, paths = good_checkpoints.packed(folder, config, formats)
        return [(path, source) for path in paths.values()]

    headers = packed(CONFIG, ("ct-int4", "awq", "modelopt", "gptq", "modelslim"))
    headers += packed(SMALL_MOE, ("ct-int8", "ct-nvfp4", "gptq-v2"))
    tensors = packed(SMALL_MOE, FORMATS)
    plain, tiny = tensors[0][1], builtin_model("tiny-r1")
    return {
        "headers": [*headers, (tiny, tiny)],
        "tensors": [*tensors, (plain, plain), (tiny, tiny)],
    }


@pytest.mark.parametrize("depth", ["headers", "tensors"])
def test_good_checkpoints_have_no_finding(depth, good):
    for path, source in good[depth]:
        for given in (None, str(source)):
            found = diagnose(str(path), source=given, depth=depth)
            assert found.to_json() == {"verdict": "good", "findings": []}, path


@pytest.fixture(scope="module")
def opened(good):
    """The same in memory, to be copied and changed."""
    return {
        depth: [(faulty.Contents.of(path), source) for path, source in pairs]
        for depth, pairs in good.items()
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, opened, tmp_path):
    """On the first that it suits."""
    faulty.check_found(fault, opened[fault.depth], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("config_is_no_json", "the_index_lists_nothing", "an_adapters_wrapper_was_kept"),
        *("codes_are_in_another_dtype", "token_of_a_role_is_not_there", "eight_bits_are_said"),
    ],
)
def test_no_other_cause_is_named(name, opened, tmp_path):
    found = diagnose(faulty.damaged(opened["headers"][0][0], name, tmp_path)).findings.found
    assert [one.name for one in found] == list(faulty.FAULTS[name].finds)


def test_the_command_says_the_verdict_with_its_exit_code(good, tmp_path):
    contents, report = faulty.Contents.of(good["headers"][0][0]), tmp_path / "report.html"
    paths = {"good": good["headers"][0][0]}
    for verdict, fault in (("doubtful", "mtp_was_dropped"), ("bad", "a_norm_is_lost")):
        faulty.FAULTS[fault].apply(contents)
        paths[verdict] = contents.write(tmp_path / verdict)
    for verdict, path in paths.items():
        answer = typed(f"check {path} --report {report} --json")
        assert (answer.code, answer.json["verdict"]) == (EXIT_CODES[verdict], verdict)
        keys = {"name", "severity", "where", "evidence", "remedy"}
        assert all(found.keys() == keys for found in answer.json["findings"])
        severities = [found["severity"] for found in answer.json["findings"]]
        assert severities == sorted(severities, key=["error", "warning", "note"].index)
        assert verdict in report.read_text()


def test_the_page_explains_each_finding():
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    told = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert told == set(catalogue())


def test_deepseek_r1s_headers_are_good(tmp_path):
    config = r1_headers.r1_config(num_hidden_layers=5)
    path = r1_headers.write_headers(tmp_path / "r1", config, shards=3)
    assert diagnose(str(path)).findings.found == []
    assert json.loads((path / "config.json").read_text())["n_routed_experts"] == 256


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
def test_no_other_cause_is_named_of_what_was_not_written(
    format, part, change, cause, opened, tiny_checkpoint, tmp_path
):
    """Of what was not written, or in another dtype."""
    fp8 = faulty.Contents.of(tiny_checkpoint) if format == "fp8" else None
    contents = fp8 or opened["tensors"][FORMATS.index(format)][0].copy()
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
    path = good_checkpoints.packed(tmp_path, config, [format])[1][format]
    assert diagnose(str(path), depth="tensors").findings.verdict == "good"
    faulty.check_found(faulty.FAULTS[name], [(faulty.Contents.of(path), None)], tmp_path)


def test_scales_that_were_folded_into_all_readers_are_no_fault(good, tmp_path):
    contents, source = faulty.Contents.of(good["tensors"][0][1]), str(good["tensors"][0][1])
    faulty.tensors.divide_norm(contents, 1, router=True, experts=True)
    folded = str(contents.write(tmp_path / "folded"))
    assert diagnose(folded, source=source, depth="tensors").findings.found == []


def test_act_order_is_read_as_it_was_meant(good, tmp_path):
    """Groups of scattered inputs: the codes of a permuted weight, with an index that says so."""
    contents = faulty.Contents.of(next(path for path, _ in good["tensors"] if path.name == "gptq"))
    contents.block["desc_act"] = True
    source, grid = Checkpoint.open(good["tensors"][0][1]), IntGrid(4, 64, symmetric=False)
    for module in contents.linears:
        w = source.read(f"{module}.weight").float()
        order = torch.randperm(w.shape[1], generator=torch.Generator().manual_seed(0))
        back = torch.argsort(order)
        ordered = quantize_int(w[:, order], grid, scale_dtype=torch.float16)
        words = gptq._pack(ordered.codes[:, back], 4).T.contiguous()
        contents.tensors |= gptq.FORMATS[0].pack(module, ordered)
        contents.tensors[f"{module}.qweight"] = words
        contents.tensors[f"{module}.g_idx"] = (torch.arange(w.shape[1]) // 64)[back].int()
    path = contents.write(tmp_path / "act-order")
    assert (
        diagnose(str(path), source=str(good["tensors"][0][1]), depth="tensors").findings.found == []
    )
    read, module = Checkpoint.open(path), next(iter(contents.linears))
    whole, w = dequantize(read.weight(module)), source.read(f"{module}.weight").float()
    assert float((whole - w).norm() / w.norm()) < 0.15
    part, first = read.weight_slice(module, "K", 64, 128)
    assert torch.equal(dequantize(part), whole[:, first : first + 64])
