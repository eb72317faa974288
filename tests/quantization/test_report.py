"""The report of a run: self-contained, whole, and drawn where a browser is."""

import json
import re

import pytest

from quantkit.calibrate.output import Findings
from quantkit.calibrate.recipe import Recipe
from quantkit.models.table import Parameter
from quantkit.quantization.report import (
    RunDescription,
    RunFacts,
    judge,
    report_files,
)

RUN = RunFacts("2026-11-22 14:00 UTC", 252.4, "two <cores>", "3 of 9 units are done")
ACCOUNT = RunDescription(
    model="some-model",
    source="/models/some-model",
    command="quantkit quantize /models/some-model --scheme awq-w4a16",
    recipe=Recipe(scheme="awq-w4a16").model_dump(mode="json"),
    scheme="awq-w4a16",
    format="awq",
    version="1",
    calibration="text.jsonl",
    calibration_tokens=4096,
    min_expert_tokens=64,
    source_bytes={"attention": 4_000_000_000, "routed experts": 9_000_000_000},
    output_bytes={"routed experts": 5_000_000_000, "attention": 2_000_000_000},
    quantized_share=0.98,
    left={"model.norm.weight": 64},
    experts_left=False,
)


def linear(module, layer, block, expert=None):
    return Parameter(f"{module}.weight", (8, 8), "linear", layer=layer, block=block, expert=expert)


ROWS = [
    linear(f"model.layers.{layer}.self_attn.o_proj", layer, "attention") for layer in range(4)
] + [
    linear(f"model.layers.{layer}.mlp.experts.{expert}.{name}", layer, "expert", expert)
    for layer in range(2, 4)
    for expert in range(8)
    for name in ("up_proj", "down_proj")
]


def findings():
    errors = {f"model.layers.{layer}.self_attn.o_proj": 0.001 * (layer + 1) for layer in range(4)}
    errors |= {
        f"model.layers.{layer}.mlp.experts.{e}.down_proj": 0.01 * (e + 1)
        for layer in range(2, 4)
        for e in range(3)
    }
    errors["model.layers.3.mlp.experts.7.up_proj"] = float("nan")
    return Findings(
        errors=errors,
        methods={
            module: "nearest" if module.endswith("0.self_attn.o_proj") else "awq+gptq"
            for module in errors
        },
        scales={f"model.layers.{layer}.mlp.gate_up": [0.5, 1.0, 4.0] for layer in range(4)},
        expert_tokens={"2": [900, 64, 63, 0], "3": [300, 300, 300, 124]},
        expert_agreement={"2": 0.99, "3": 0.97},
        next_token={"tokens": 1024, "kl": 0.00321, "top1_agree": 0.9875, "plain_kl": 0.0642},
        hidden_error={"0": 1e-4, "1": 2e-4, "2": float("nan"), "3": 4e-4},
    )


@pytest.fixture(scope="module")
def files():
    return report_files(ACCOUNT, findings(), ROWS, RUN)


def test_json_says_everything(files):
    facts = json.loads(
        files["report.json"], parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON")
    )
    assert facts["starved_experts"] == {"2": [2, 3]}
    assert facts["errors"]["model.layers.3.mlp.experts.7.up_proj"] is None
    assert facts["hidden_error"]["2"] is None
    assert facts["error_by_layer"]["expert down_proj"]["2"] == pytest.approx(0.02)
    assert facts["expert_tokens"] == findings().expert_tokens
    assert facts["held_out"] == {
        "tokens": 1024,
        "kl": 0.00321,
        "top1_agree": 0.9875,
        "plain_kl": 0.0642,
        "expert_agree": pytest.approx(0.98),
    }
    assert facts["verdict"]["word"] == "good"
    assert "0.05 of round-to-nearest's 6.42e-02; " in facts["verdict"]["sentence"]


@pytest.mark.parametrize(
    ("kl", "plain", "word", "told"),
    [
        (0.002, 0.04, "good", "close to the source"),
        (0.05, 0.4, "fair", "usable"),
        (0.3, 4.0, "poor", "more bits"),
        (0.002, 0.002, "fair", "no closer to the source than round-to-nearest"),
        (0.0019, 0.002, "fair", "hardly closer to the source than round-to-nearest"),
        (0.002, None, "good", "close to the source"),
    ],
)
def test_verdicts(kl, plain, word, told):
    found = judge(kl, 0.9, 1000, plain)
    assert found.word == word
    assert told in found.sentence


def test_page_is_self_contained_and_the_same_each_time(files):
    page = files["report.html"].decode()
    assert report_files(ACCOUNT, findings(), ROWS, RUN) == files
    assert page.count("<svg") == 6
    assert "#000000" not in page, "plots have the page's colour of text"
    assert not re.search(r'(src|href)="(?!#)', page)
    for told in (ACCOUNT.command, "two &lt;cores&gt;", "4 min 12 s", "3 of 9 units are done"):
        assert told in page
    assert "2 experts in 1 layer received fewer than 64" in page
