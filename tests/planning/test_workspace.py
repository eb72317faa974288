"""Memory that a step of DeepSeek-R1 takes of an Ascend card in addition to weights and cache,
computed by hand; and that the documented command leaves it free."""

import re

from r1_headers import R1, R1_TABLE

from quantkit.common.assets import asset
from quantkit.grids.schemes import find_scheme
from quantkit.planning.device_fit import COLLECTIVE_BYTES, RESERVE_GIB, workspace_bytes

CARD = 64 * 2**30


def of(scheme, **changes):
    return workspace_bytes(
        R1_TABLE, R1, find_scheme(scheme).weight, **{"devices": 8, "context": 32768} | changes
    )


def test_of_r1_on_eight_cards():
    """257 experts, gate and up of 512 rows a card; nine rows of every token; keys and values of 16
    heads."""
    found = of("awq-w4a16")
    assert found["decoded experts"] == 257 * 512 * 7168 * 2
    assert found["rows of experts"] == 2048 * 9 * (2 * 7168 + 512 + 256) * 2
    assert found["prompt"] == 2048 * 7168 * 8 + 32768 * 16 * 256 * 2
    assert (
        found["attention"]
        == 16 * 2**20 + 24 * 2 * 256 * (512 * 6 + 512 * 8 + 8) + 24 * 2 * 256 * (512 + 2 * 8) * 4
    )
    assert found["collectives"] == COLLECTIVE_BYTES
    assert sum(found.values()) < RESERVE_GIB * 2**30


def test_what_changes_it():
    assert not any(
        of(scheme)["decoded experts"] for scheme in ("int8-a8w8c16", "fp4-w4a16", "int4-w4a8")
    )
    assert of("awq-w4a16", devices=1)["collectives"] == 0
    assert of("awq-w4a16", devices=16)["decoded experts"] == of("awq-w4a16")["decoded experts"] // 2
    assert (
        of("awq-w4a16", tokens=1024)["rows of experts"] == of("awq-w4a16")["rows of experts"] // 2
    )


def test_the_documented_command_leaves_room():
    """Weights as the page says, the cache that its command asks for, and all of the above, in nine
    tenths of a card."""
    page = asset("docs", "ascend.md").read_text()
    command = re.search(r"quantkit serve R1-awq .*--max-batch (\d+) --max-model-len (\d+)", page)
    weights = re.search(r"AWQ ([\d.]+) GB of weights", page)
    tokens = int(command[1]) * int(command[2])
    cache = tokens * R1.num_hidden_layers * R1.cache.token_bytes(16, 8)
    used = float(weights[1]) * 1e9 + cache + sum(of("awq-w4a16").values())
    assert used < 0.9 * CARD
    assert int(command[2]) >= 1536  # 1024 tokens in and 512 out
