"""Files of `quantkit place`, read by SGLang's and vllm-ascend's own loaders on CPU: every copy must
be found where we put it.

make test-placement-loaders   # downloads both wheels, and takes the modules that read such files out of them
"""

import argparse
import json
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import numpy as np
import torch
from commands import command
from imported import module_at
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.common.assets import builtin_model
from quantkit.models.expert_counts import ExpertCounts

EXPERTS, DEVICES, COPIES = 16, 4, 8
MODULES = {
    "sglang": "sglang/srt/eplb/expert_location.py",
    "vllm-ascend": "vllm_ascend/eplb/core/eplb_utils.py",
}


def module_of(wheel, engine, folder):
    """The engine's module by itself: what it imports of the engine are settings, a logger and a
    default, which stand-ins give."""
    own = types.SimpleNamespace
    moe = own(
        init_expert_location=str(folder / "sglang.json"),
        ep_num_redundant_experts=COPIES,
        ep_dispatch_algorithm="static",
    )
    vars(moe).update(ep_join_mode="", moe_a2a_backend="deepep")
    settings = {
        "sglang.srt.runtime_context": {
            "get_device": lambda: own(device="cpu"),
            "get_exec": lambda: own(moe=moe),
            "get_parallel": lambda: own(ep_size=DEVICES, elastic_ep_initial_size=None, nnodes=1),
            "get_resources": own,
        },
        "sglang.srt.elastic_ep.elastic_ep": {"elastic_expanded_world_enabled": lambda: False},
        "vllm.logger": {"logger": own(warning=print)},
        "vllm.model_executor.layers.fused_moe.expert_map_manager": {"determine_expert_map": None},
    }
    for name, values in settings.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules.setdefault(
                ".".join(parts[:count]), types.ModuleType(".".join(parts[:count]))
            )
        vars(sys.modules[name]).update(values)
    path = Path(zipfile.ZipFile(wheel).extract(MODULES[engine], folder))
    return module_at(path, f"{engine.replace('-', '_')}_loader")


def judge_sglang(module, placed):
    """placed: the expert of each slot by layer. Returns how many entries of SGLang's tables were
    compared."""
    module.ModelConfigForExpertLocation.from_model_config = staticmethod(
        lambda _: module.ModelConfigForExpertLocation(
            num_layers=len(placed), num_logical_experts=EXPERTS
        )
    )
    compared = 0
    for rank in range(DEVICES):
        read = module.compute_initial_expert_location_metadata(None, rank)
        assert read.physical_to_logical_map.tolist() == placed
        for layer, slots in enumerate(placed):
            for expert in range(EXPERTS):
                found = read.logical_to_all_physical(layer, expert)
                assert found, (layer, expert)
                assert {slots[slot] for slot in found} == {expert}
                assert (
                    slots[int(read.logical_to_rank_dispatch_physical_map[layer, expert])] == expert
                )
                compared += len(found)
    return compared


def judge_vllm_ascend(module, path, layers):
    """layers: the experts of each device, by layer with experts."""
    Tensor.npu = lambda tensor: tensor
    said, compared = (
        types.SimpleNamespace(
            expert_map_path=str(path), dynamic_eplb=False, num_redundant_experts=0
        ),
        0,
    )
    for number, devices in enumerate(layers):
        for rank in range(DEVICES):
            moe = types.SimpleNamespace(num_experts=EXPERTS, ep_size=DEVICES, ep_rank=rank)
            every, own, slot_of, redundant = module.init_eplb_config(said, number, moe)
            assert redundant == COPIES
            assert torch.equal(every[rank], own)
            assert [int(own[expert]) for expert in devices[rank]] == list(range(len(devices[rank])))
            flat = [expert for device in devices for expert in device]
            assert [flat[int(slot)] for slot in slot_of] == list(range(EXPERTS))
            compared += len(flat)
    return compared


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        required=True,
        help="a folder with sglang-*.whl and vllm_ascend-*.whl",
    )
    wheels = parser.parse_args().wheels
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = Checkpoint.open(builtin_model("tiny-r1")).config
        sparse = range(config["first_k_dense_replace"], config["num_hidden_layers"])
        shares = np.random.default_rng(0).random((len(sparse), EXPERTS)) ** 3
        layers = dict(zip(sparse, (1000 * shares).astype(int).tolist()))
        ExpertCounts("deepseek_v3", config["hidden_size"], EXPERTS, 900, layers).write(
            folder / "counts.json"
        )
        for engine in MODULES:
            asked = (
                "--devices",
                str(DEVICES),
                "--redundant",
                str(COPIES),
                "--engine",
                engine,
                "--out",
                str(folder / f"{engine}.json"),
            )
            answer = command("place", "tiny-r1", "--counts", str(folder / "counts.json"), *asked)
            assert answer.code == 0, answer.err
            module = module_of(
                next(wheels.glob(f"{engine.replace('-', '_')}-*.whl")), engine, folder
            )
            written = json.loads((folder / f"{engine}.json").read_text())
            if engine == "sglang":
                compared = judge_sglang(module, written["physical_to_logical_map"])
            else:
                devices = [
                    [device["device_expert"] for device in layer["device_list"]]
                    for layer in written["layer_list"]
                ]
                compared = judge_vllm_ascend(module, folder / f"{engine}.json", devices)
            print(
                f"{engine}: {len(sparse)} layers on {DEVICES} devices, {compared} entries of its "
                "tables are where they were placed"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
