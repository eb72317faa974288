"""A placement as each engine reads it.

vllm         no release reads a placement when this is written. The JSON of pull request 49572 ("Support custom initial expert maps",
             `eplb_config.initial_expert_map_path`): for every MoE layer the logical expert of each
             physical slot
sglang       `--init-expert-location FILE.json`, {"physical_to_logical_map": [layers, slots]} with a row for every decoder layer, dense
             ones too: python/sglang/srt/eplb/expert_location.py,
             `compute_initial_expert_location_metadata` and `init_trivial`
vllm-ascend  `expert_map_path` of `eplb_config`: vllm_ascend/eplb/core/eplb_utils.py,
`expert_file_to_tensor`; layers are counted from the
             first with experts
omni-infer   `pattern_path` of omni_placement's YAML, an .npy of 0 and 1 [devices, MoE layers, experts]:
             omni_placement/expert_mapping.py, `_load_placement_pattern_with_validation`

Slots are numbered device by device in all of them. MTP layers stay as the engine places them.
"""

import io
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quantkit.common.errors import QuantkitError
from quantkit.planning.placement.balance import Slots


@dataclass(frozen=True)
class PlacedLayers:
    """layers: by number, of the decoder layers with routed experts. num_layers: decoder layers of
    the model."""

    layers: Mapping[int, Slots]
    num_layers: int
    experts: int

    @property
    def redundant(self) -> int:
        """Copies in the layer that has most."""
        return max(slots.size for slots in self.layers.values()) - self.experts


@dataclass(frozen=True)
class PlacementFormat:
    """write: the bytes of the file; options: what the engine is started with, for a file of that
    name. uneven: layers may have different
    numbers of slots. note: what has to be known."""

    suffix: str
    write: Callable[[PlacedLayers], bytes]
    options: Callable[[PlacedLayers, Path], str]
    uneven: bool = False
    note: str = ""


def find_layout(engine: str) -> PlacementFormat:
    if engine not in LAYOUTS:
        raise QuantkitError(
            f"no placement is written for engine {engine!r}", f"choose one of {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[engine]


def _vllm(placed: PlacedLayers) -> bytes:
    return _json([slots.ravel().tolist() for slots in placed.layers.values()])


def _sglang(placed: PlacedLayers) -> bytes:
    count = next(iter(placed.layers.values())).size
    plain = [slot % placed.experts for slot in range(count)]
    rows = [
        placed.layers[layer].ravel().tolist() if layer in placed.layers else plain
        for layer in range(placed.num_layers)
    ]
    return _json({"physical_to_logical_map": rows})


def _vllm_ascend(placed: PlacedLayers) -> bytes:
    layers = [
        {
            "layer_id": number,
            "device_count": len(slots),
            "device_list": [
                {"device_id": device, "device_expert": row.tolist()}
                for device, row in enumerate(slots)
            ],
        }
        for number, slots in enumerate(placed.layers.values())
    ]
    return _json({"moe_layer_count": len(layers), "layer_list": layers})


def _omni(placed: PlacedLayers) -> bytes:
    devices = len(next(iter(placed.layers.values())))
    pattern = np.zeros((devices, len(placed.layers), placed.experts), dtype=np.int32)
    for number, slots in enumerate(placed.layers.values()):
        pattern[np.arange(devices)[:, None], number, slots] = 1
    file = io.BytesIO()
    np.save(file, pattern, allow_pickle=False)
    return file.getvalue()


def _json(value: object) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _vllm_options(placed: PlacedLayers, file: Path) -> str:
    config = {"num_redundant_experts": placed.redundant, "initial_expert_map_path": str(file)}
    return f"--enable-expert-parallel --enable-eplb --eplb-config {shlex.quote(json.dumps(config))}"


def _sglang_options(placed: PlacedLayers, file: Path) -> str:
    redundant = f"--ep-num-redundant-experts {placed.redundant} " if placed.redundant else ""
    devices = len(next(iter(placed.layers.values())))
    return (
        f"--ep-size {devices} {redundant}--ep-dispatch-algorithm static --init-expert-location "
        f"{shlex.quote(str(file))}"
    )


def _vllm_ascend_options(placed: PlacedLayers, file: Path) -> str:
    config = {
        "eplb_config": {"expert_map_path": str(file), "num_redundant_experts": placed.redundant}
    }
    return f"--enable-expert-parallel --additional-config {shlex.quote(json.dumps(config))}"


def _omni_options(placed: PlacedLayers, file: Path) -> str:
    return (
        f"pattern_path: {json.dumps(str(file))}, max_moe_layer_num: {len(placed.layers)} "
        "(omni_placement's YAML)"
    )


LAYOUTS = {
    "vllm": PlacementFormat(
        ".json",
        _vllm,
        _vllm_options,
        note="no release of vLLM reads a placement yet; this is the file of its pull request 49572",
    ),
    "sglang": PlacementFormat(".json", _sglang, _sglang_options),
    "vllm-ascend": PlacementFormat(".json", _vllm_ascend, _vllm_ascend_options),
    "omni-infer": PlacementFormat(".npy", _omni, _omni_options, uneven=True),
}
