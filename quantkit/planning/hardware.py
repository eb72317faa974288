"""What a file of recipes/hardware says of a device and its box: rates, levels of execution,
launches, and what decoding a weight costs.

The time of a step on it is `costmodel`'s.
"""

from typing import Literal

from pydantic import model_validator

from quantkit.common.errors import UsageError
from quantkit.common.settings import Strict, find_yaml, read_yaml


class Launches(Strict):
    """Kernel launches per layer and, for embedding, head and sampling, per step."""

    dense_layer: int
    moe_layer: int
    step: int = 0


class Decode(Strict):
    """What decoding one weight costs: for the cube 16-bit vector operations, and bytes that go to
    the L2 and come back; operations per row without the cube."""

    cube_ops: float
    cube_l2_bytes: float
    vector_ops_per_row: float


class SplitActivations(Strict):
    """Linears that need no decoding: of few rows, x is split into whole numbers that the cube
    multiplies by the 4-bit codes themselves.

    For groups of these sizes, with rows up to group / rows_divisor, max_inputs inputs at most and
    outputs a multiple of outputs_multiple on
    a device. pieces: what x is split into; sum_ops: 16-bit vector operations on each int32 sum of a
    group, which goes to the L2 and back.
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
    """A way to run a step. hbm_efficiency: share of the bandwidth that products reach;
    cache_passes: times the cache is moved. decode
    vector: serial, quantized weights multiplied row by row on the vector cores."""

    name: str
    summary: str
    hbm_efficiency: float
    cache_passes: float
    decode: Literal["free", "overlapped", "serial", "vector"]
    launch_us: float
    collective_us: float
    launches: str


class Way(Strict):
    """A captured step with other operators: which launches, on the named level, of weights of these
    kinds (`kind_of`), for min_batch to max_batch sequences. vector_experts: experts are multiplied
    on the vector cores; streamed_experts: as another level has it, by kernels of our own;
    own_linears: 4-bit linears by our kernels; int8_attention: what comes before latent attention is
    int8."""

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


class Fabric(Strict):
    """Between boxes: what a device sends a second, one way, and what an exchange of all with all
    takes before its first byte."""

    gb_s: float
    exchange_us: float


class Hardware(Strict):
    """One device and its box; fabric is None where what joins boxes is not known.

    gb_s are 10^9 bytes a second, tflops and gops 10^12 and 10^9 operations.
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
    fabric: Fabric | None = None
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
    """A machine that ships with quantkit (recipes/hardware), by name in any case, or a YAML
    file."""
    path = find_yaml(name_or_path, "recipes", "hardware") or find_yaml(
        name_or_path.lower(), "recipes", "hardware"
    )
    if path is None:
        remedy = "write 8x64GiB or 8xH100, or give a YAML file like those in recipes/hardware"
        raise UsageError(f"hardware {name_or_path} is not known", remedy)
    return read_yaml(path, Hardware, "see recipes/hardware/910b1.yaml")
