"""What fewer launches buy on Ascend, predicted: the rows of docs/lab/ascend.md's table, DeepSeek-R1 on
eight 910B1.

    python benchmarks/predictions.py

Nothing is measured: machines and ways to run a captured step are those of recipes/hardware. Launches are counted on the doubles of
torch_npu and of the Triton kernels (tests/ascend/test_launches.py); times are the cost model's.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from core import parser
from r1_headers import r1_config

from quantkit.grids.int_groups import IntGrid
from quantkit.grids.schemes import Scheme, find_scheme
from quantkit.models import find_architecture
from quantkit.models.architecture import ModelConfig
from quantkit.models.table import MLA_PROLOG_PROJECTIONS, Parameter
from quantkit.planning.cost_model import Prediction, WeightTraffic, WholeStep, device_loads
from quantkit.planning.hardware import Hardware, Level, Way, load_hardware

SCHEMES = ("awq-w4a16", "fp4-w4a16", "int8-a8w8c16")
BATCHES = (1, 2, 4, 8, 32)
DEVICES, CONTEXT = 8, 384
WAYS = tuple(
    f"{name}{more}"
    for name in ("torch_npu", "ascend", "ascend, built")
    for more in ("", ", int8-attention")
)
"""Columns of the table, by their names in recipes/hardware/910b1.yaml."""
_INT8 = IntGrid(bits=8, group_size=None, symmetric=True)
_VECTOR_ROWS = 2
"""Rows of linears that the Triton kernels multiply on the vector cores."""
_STREAMED = {"int4": "int4 in Ascend C", "fp4": "fp4 in Ascend C"}
"""What decoding costs the kernels of kernels/ascendc, by the names of the hardware's `decode`."""


def ways(
    parameters: list[Parameter],
    config: ModelConfig,
    scheme: Scheme,
    hardware: Hardware,
    *,
    devices: int,
    batch: int,
    context: int,
) -> list[Prediction]:
    """Those that take the scheme's weights and so many sequences."""
    levels = {level.name: level for level in hardware.levels}
    step = WholeStep(config, scheme, hardware, devices, batch, context)
    found = []
    for way in hardware.ways:
        if scheme.weight.kind in way.kinds and way.min_batch <= batch <= (way.max_batch or batch):
            level = levels[way.level].model_copy(update={"launches": way.launches})
            found.append(step.predict(level, _loads(way, parameters, step, levels), way.name))
    return found


def _loads(
    way: Way, parameters: list[Parameter], step: WholeStep, levels: dict[str, Level]
) -> Iterator[tuple[WeightTraffic, Level]]:
    """Experts, what comes before attention, and the rest, each with how it is decoded."""
    level, grid = levels[way.level], step.scheme.weight
    on_vector = level.model_copy(update={"decode": "vector"})
    experts = [row for row in parameters if row.expert is not None or row.block == "shared_expert"]
    before = [
        row for row in parameters if row.projection in MLA_PROLOG_PROJECTIONS and way.int8_attention
    ]
    taken = {row.name for row in (*experts, *before)}
    rest = [row for row in parameters if row.name not in taken]
    split = None if way.own_linears else step.hardware.split_activations
    few = way.own_linears and step.scheme.activation_bits == 16 and step.batch <= _VECTOR_ROWS
    for load in device_loads(experts, step.config, grid, step.devices, step.batch, split):
        if way.streamed_experts and load.kind in _STREAMED:
            yield replace(load, kind=_STREAMED[load.kind]), levels[way.streamed_experts]
        else:
            yield load, on_vector if way.vector_experts else level
    for rows, own, decoding in ((before, _INT8, level), (rest, grid, on_vector if few else level)):
        yield from (
            (load, decoding)
            for load in device_loads(rows, step.config, own, step.devices, step.batch, split)
        )


def step_rows() -> list[str]:
    """Of the table, as the page has them: milliseconds a token by way, a dash where a way does not
    take the scheme or so many sequences."""
    config, hardware = r1_config(), load_hardware("910b1")
    architecture = find_architecture(config)
    read = architecture.Config.from_dict(config)
    table, made = architecture.parameters(read), []
    for name in SCHEMES:
        for batch in BATCHES:
            found = {
                one.level: f"{one.tpot_ms:.1f}"
                for one in ways(
                    table,
                    read,
                    find_scheme(name),
                    hardware,
                    devices=DEVICES,
                    batch=batch,
                    context=CONTEXT,
                )
            }
            made.append(f"| {name} | {batch} | {' | '.join(found.get(way, '-') for way in WAYS)} |")
    return made


def main() -> None:
    parser(__doc__).parse_args()
    print("\n".join(step_rows()))


if __name__ == "__main__":
    main()
