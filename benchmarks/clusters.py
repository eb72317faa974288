"""DeepSeek-R1 in INT8 on the layouts of many boxes, on paper: what each level predicts beside the
published rates.

    python benchmarks/clusters.py          # writes benchmarks/results/clusters.json

Nothing is measured: layouts and rates are those of recipes/deploy/vllm-ascend.yaml, machines those
of recipes/hardware.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from r1_headers import r1_config

from quantkit.checkpoint.formats import compressed_int8
from quantkit.engines.layouts import find_topology
from quantkit.engines.memory import fit_rows
from quantkit.grids.schemes import find_scheme
from quantkit.models import find_architecture
from quantkit.models.table import Parameter
from quantkit.planning.clusters import ASSUMPTIONS, compare_rate
from quantkit.planning.hardware import load_hardware

LAYOUTS = ("four-boxes", "disaggregated-a2", "disaggregated-384")
LEVELS = ("floor", "fused", "captured", "eager")
MEMORY_GIB, FRACTION, RESERVE_GIB = 64, 0.92, 4.0  # of vllm-ascend's recipe
CONTEXT = 4096
COLUMNS = [
    {"name": "layout"},
    {"name": "experts a card"},
    {"name": "weights", "unit": "GB a card"},
    {"name": "level"},
    {"name": "sequences a card"},
    {"name": "step", "unit": "ms"},
    {"name": "dispatch", "unit": "MB"},
    {"name": "combine", "unit": "MB"},
    {"name": "both", "unit": "ms"},
    {"name": "tokens/s a card"},
    {"name": "published"},
    {"name": "error", "unit": "%"},
]


def stored(row: Parameter) -> int:
    """Bytes of a parameter of INT8 R1 in compressed-tensors; kv_b_proj and what is no linear in
    BF16."""
    if row.role == "linear":
        grid = find_scheme("int8-a8w8c16").weight
        return sum(
            spec.nbytes
            for spec in compressed_int8.FORMAT.specs(row.module, (row.shape[0], row.shape[1]), grid)
        )
    return 2 * row.shape[0] * (row.shape[1] if len(row.shape) > 1 else 1)


def table() -> list[list[Any]]:
    config = {key: value for key, value in r1_config().items() if key != "quantization_config"}
    architecture = find_architecture(config)
    parsed = architecture.Config.from_dict(config)
    rows, scheme = architecture.parameters(parsed), find_scheme("int8-a8w8c16")
    lines: list[list[Any]] = []
    for name in LAYOUTS:
        topology = find_topology("vllm-ascend", name=name)
        assert topology.hardware is not None, name
        for rate in topology.published:
            parallel = next(role for role in topology.roles if role.name == rate.role).parallel
            held = fit_rows(
                [(row, stored(row)) for row in rows],
                parsed,
                parallel,
                CONTEXT,
                MEMORY_GIB,
                FRACTION,
                RESERVE_GIB,
            )
            told = compare_rate(
                rate, topology, rows, parsed, scheme, load_hardware(topology.hardware), held
            )
            for one in told["predicted"]:
                if one["level"] not in LEVELS:
                    continue
                both = one["parts"]["dispatch"] + one["parts"]["combine"]
                lines.append(
                    [
                        f"{name}, {rate.role}",
                        one["experts_per_device"],
                        round(held.weight_bytes / 1e9, 1),
                        one["level"],
                        round(one["batch"] / parallel.world),
                        round(one["step_ms"], 1),
                        round(one["dispatch_bytes"] / 1e6),
                        round(one["combine_bytes"] / 1e6),
                        round(both, 1),
                        round(one["tokens_per_second"]),
                        rate.tokens_per_second,
                        round(100 * one["error"]),
                    ]
                )
    return lines


def main() -> None:
    result = {
        "title": "DeepSeek-R1 in INT8 on many boxes, predicted",
        "machine": "on paper",
        "commit": None,
        "date": "2026-11-22",
        "command": "python benchmarks/clusters.py",
        "columns": COLUMNS,
        "rows": table(),
        "notes": list(ASSUMPTIONS),
    }
    text = json.dumps(
        {key: value for key, value in result.items() if key not in ("columns", "rows", "notes")},
        indent=1,
    )[:-2]
    for key in ("columns", "rows", "notes"):
        listed = ",\n".join(f"  {json.dumps(entry)}" for entry in result[key])  # type: ignore[attr-defined]
        text += f',\n "{key}": [\n{listed}\n ]'
    (Path(__file__).parent / "results" / "clusters.json").write_text(text + "\n}\n")


if __name__ == "__main__":
    main()
