"""The files of recipes/hardware: rates of a device and its machine, execution levels, kernel
launches, and the cost of decoding a weight.

`cost_model` predicts step times from them.
"""

from typing import Literal

from pydantic import model_validator

from quantkit.common.errors import UsageError
from quantkit.common.settings import Strict, find_yaml, read_yaml


class Launches(Strict):
    """Kernel launches per layer, and per step for embedding, head and sampling."""

    dense_layer: int
    moe_layer: int
    step: int = 0


class Decode(Strict):
    """Cost of decoding one weight. With the matrix (cube) unit: 16-bit vector operations, and bytes
    that go through the L2 and back; without it: vector operations per row."""

    cube_ops: float
    cube_l2_bytes: float
    vector_ops_per_row: float


class SplitActivations(Strict):
    """Linears whose weights need no decoding: for few rows, x is split into integers that the cube
    multiplies with the 4-bit codes directly.

    Applies to these group sizes, with at most group / rows_divisor rows, at most max_inputs inputs,
    and outputs that are a multiple of outputs_multiple on a device. pieces: number of integers that
    x is split into; sum_ops: 16-bit vector operations for each int32 sum of a group, which goes
    through the L2.
    """

    groups: tuple[int, ...]
    rows_divisor: int
    max_inputs: int
    outputs_multiple: int
    pieces: int
    sum_ops: float

    def takes(self, outputs: float, inputs: float, group: int, rows: int) -> bool:
        few = group in self.groups and rows * self.rows_divisor <= group
        return (
            few
            and inputs <= self.max_inputs
            and inputs % group == 0
            and outputs % self.outputs_multiple == 0
        )


class Level(Strict):
    """A way to execute a step. hbm_efficiency: share of the bandwidth that matrix products reach;
    cache_passes: how many times the cache is moved. decode "vector": serial, with quantized weights
    multiplied row by row on the vector cores."""

    name: str
    summary: str
    hbm_efficiency: float
    cache_passes: float
    decode: Literal["free", "overlapped", "serial", "vector"]
    launch_us: float
    collective_us: float
    launches: str


class Way(Strict):
    """A captured step with other operators, for weights of these kinds (`Grid.kind`) and
    min_batch to max_batch sequences, based on the named level and launches.

    vector_experts: experts are multiplied on the vector cores; streamed_experts: another level, by
    our own kernels; own_linears: 4-bit linears use our kernels; int8_attention: the projections
    before latent attention are int8.
    """

    name: str
    level: str
    launches: str
    kinds: tuple[str, ...]
    min_batch: int = 1
    max_batch: int | None = None
    vector_experts: bool = False
    streamed_experts: str = ""
    own_linears: bool = False
    int8_attention: bool = False


class Hardware(Strict):
    """One device and its machine.

    gb_s are 10^9 bytes per second, tflops and gops 10^12 and 10^9 operations per second.
    """

    name: str
    devices_per_box: int
    memory_gb: float
    hbm_gb_s: float
    l2_read_gb_s: float
    l2_write_gb_s: float
    cube_tflops: float
    cube_tops_int8: float
    vector_gops: float
    link_gb_s: float
    cube_rows: int
    levels: tuple[Level, ...]
    launches: dict[str, Launches]
    assumptions: tuple[str, ...]
    decode: dict[str, Decode]
    split_activations: SplitActivations | None = None
    ways: tuple[Way, ...] = ()

    @model_validator(mode="after")
    def _levels_name_launches(self) -> "Hardware":
        named = [level.launches for level in self.levels] + [way.launches for way in self.ways]
        unknown = set(named) - self.launches.keys()
        if unknown:
            raise ValueError(
                f"levels name launches that are not listed: {', '.join(sorted(unknown))}"
            )
        return self


def load_hardware(name_or_path: str) -> Hardware:
    """Hardware that ships with quantkit (recipes/hardware) by case-insensitive name, or a YAML
    file."""
    path = find_yaml(name_or_path, "recipes", "hardware") or find_yaml(
        name_or_path.lower(), "recipes", "hardware"
    )
    if path is None:
        remedy = "write 8x64GiB or 8xH100, or give a YAML file like those in recipes/hardware"
        raise UsageError(f"hardware {name_or_path} is not known", remedy)
    return read_yaml(path, Hardware, "see recipes/hardware/910b1.yaml")
