"""Faults visible in headers and the files next to the weights: each is found, and a good checkpoint
has none."""

import json
from pathlib import Path

import faulty
import good_checkpoints
import make_model
import pytest
import r1_headers
from commands import command
from packed_model import write_packed

from quantkit.common.assets import builtin_model
from quantkit.diagnosis.diagnose import diagnose
from quantkit.diagnosis.findings import CATALOGUE, EXIT_CODES, Findings

HEADERS = [fault for fault in faulty.FAULTS.values() if fault.depth == "headers"]
# Small sizes: every fault is made on the first of these that it suits.
CONFIG = make_model.tiny_config(num_hidden_layers=2)
SMALL_MOE = good_checkpoints.QWEN3_MOE | {"num_hidden_layers": 2, "num_experts": 4}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Checkpoints and their sources."""
    folder, made = tmp_path_factory.mktemp("good"), []
    for name, config, formats in (
        ("deepseek", CONFIG, ("ct-int4", "awq", "modelopt", "gptq", "modelslim")),
        ("moe", SMALL_MOE, ("ct-int8", "ct-nvfp4", "gptq-v2")),
    ):
        tensors = good_checkpoints.random_weights(config)
        source = make_model.write_dense(folder / name, config, tensors)
        for format in formats:
            made.append(
                (
                    write_packed(
                        folder / f"{name}-{format}",
                        config,
                        tensors,
                        *good_checkpoints.FORMATS[format],
                    ),
                    source,
                )
            )
    return [*made, (builtin_model("tiny-r1"), builtin_model("tiny-r1"))]


def test_good_checkpoints_have_no_finding(good):
    for path, source in good:
        for given in (None, str(source)):
            assert diagnose(str(path), source=given).to_json() == {
                "verdict": "good",
                "findings": [],
            }, path


@pytest.fixture(scope="module")
def opened(good):
    """The same in memory, to be copied and changed."""
    return [(faulty.Contents.of(path), source) for path, source in good]


@pytest.mark.parametrize("fault", HEADERS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, opened, tmp_path):
    faulty.check_found(fault, opened, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("config_is_no_json", "the_index_lists_nothing", "an_adapters_wrapper_was_kept"),
        *("codes_are_in_another_dtype", "token_of_a_role_is_not_there", "eight_bits_are_said"),
    ],
)
def test_no_other_cause_is_named(name, opened, tmp_path):
    found = diagnose(faulty.damaged(opened[0][0], name, tmp_path)).findings.found
    assert [one.name for one in found] == list(faulty.FAULTS[name].finds)


def test_the_command_says_the_verdict_with_its_exit_code(good, tmp_path):
    contents = faulty.Contents.of(good[0][0])
    faulty.FAULTS["mtp_was_dropped"].apply(contents)
    doubtful = contents.write(tmp_path / "doubtful")
    faulty.FAULTS["a_norm_is_lost"].apply(contents)
    bad = contents.write(tmp_path / "bad")
    for path, verdict in ((good[0][0], "good"), (doubtful, "doubtful"), (bad, "bad")):
        answer = command("check", str(path), "--report", str(tmp_path / "report.html"), "--json")
        about = answer.json
        assert (answer.code, about["verdict"]) == (EXIT_CODES[verdict], verdict)
        assert all(
            set(finding) == {"name", "severity", "where", "evidence", "remedy"}
            for finding in about["findings"]
        )
        assert verdict in (tmp_path / "report.html").read_text()


def test_findings_are_in_the_order_of_harm():
    findings = Findings()
    for name in ("not-read", "mtp-missing", "head-missing", "config-unreadable"):
        findings.add(name, "here", "seen")
    assert [finding.name for finding in findings.ordered] == [
        "config-unreadable",
        "head-missing",
        "mtp-missing",
        "not-read",
    ]


def test_the_page_explains_each_finding():
    page = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    told = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    assert told == set(CATALOGUE)


def test_deepseek_r1s_headers_are_good(tmp_path):
    config = r1_headers.r1_config(num_hidden_layers=5)
    path = r1_headers.write_headers(tmp_path / "r1", config, shards=3)
    assert diagnose(str(path)).findings.found == []
    assert json.loads((path / "config.json").read_text())["n_routed_experts"] == 256
