"""Runs inside SGLang's own environment: loads checkpoints with its loader, on a CPU, as on a GPU,
and tells what came of it.

    python sglang_loader.py cuda < jobs.json

Jobs and answers are those of `vllm_ascend_loader.py`. torch says that there is a Hopper GPU, so
that SGLang takes the methods that it has for one; tensors meant for it stay on the CPU, its
kernels' packages are stand-ins, and the two of their operators that only move weights are torch.
Pieces are told as the loader left them, before weights are laid out for a kernel, which only the
GPU can do.
"""

import json
import os
import re
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}

from absent import absent

ABSENT = (
    "torchvision torchaudio sgl_kernel flashinfer deep_gemm cuda flash_attn "
    "torch_memory_saver decord outlines cutlass quack kernels"
)
ABSENT += (
    " soundfile modelscope cv2 mistral_common smg_grpc_servicer tilelang IPython nvshmem "
    "deep_ep humming"
)
absent(*ABSENT.split())
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

HOPPER = SimpleNamespace(
    major=9,
    minor=0,
    total_memory=140 * 2**30,
    multi_processor_count=132,
    name="NVIDIA H200",
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 * 2**20,
    warp_size=32,
)


NEXTN = re.compile(r"^model\.(decoder\.|(?=enorm|hnorm|eh_proj|shared_head))")
"""What SGLang calls the MTP layer and what belongs to it."""


class OnTheCpu(TorchFunctionMode):
    """Whatever asks for a tensor on the GPU gets it on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


class AtOnce:
    """An executor whose calls run where they are submitted: what is written is seen with the tensor
    that it was read from."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Any, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(function(*args, **kwargs))
        return done


torch.version.cuda = "13.0"
for name, answer in {
    "is_available": True,
    "device_count": 4,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_name": HOPPER.name,
    "get_device_properties": HOPPER,
    "mem_get_info": (HOPPER.total_memory, HOPPER.total_memory),
    "max_memory_allocated": 0,
    "memory_allocated": 0,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
}.items():
    setattr(torch.cuda, name, lambda *_, answer=answer: answer)
torch.cuda.Stream = torch.cuda.Event = type("Nothing", (), {"__init__": lambda *_, **__: None})
torch.cuda.current_stream = lambda *_: torch.cuda.Stream()

import sglang.srt.models.deepseek_common.deepseek_weight_loader as deepseek_weights
import sglang.srt.models.deepseek_nextn
import sglang.srt.models.deepseek_v2
import sglang.srt.models.qwen3
import sglang.srt.models.qwen3_moe  # noqa: F401
from pieces import (
    AWQ_ORDER,
    Pieces,
    e2m1_along_last,
    expert_pieces,
    linear_names,
    plain_pieces,
    run_forked,
    unsigned_along_last,
)
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import initialize_moe_config
from sglang.srt.model_loader import get_model
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from watched import Watch


def start(job: dict[str, Any], **options: Any) -> ServerArgs:
    args = ServerArgs(
        model_path=job["path"],
        tp_size=job["of"],
        dtype="bfloat16",
        quantization=job["quantization"],
        skip_tokenizer_init=True,
        device="cuda",
        disable_cuda_graph=True,
        disable_custom_all_reduce=True,
        context_length=256,
        **options,
    )
    publish(
        args, role="scheduler", ranks=SpawnRanks(world_rank=job["rank"], gpu_id=0, dp_rank=None)
    )
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    dist.init_process_group("fake", store=FakeStore(), rank=job["rank"], world_size=job["of"])
    init_distributed_environment(
        backend="fake",
        world_size=job["of"],
        rank=job["rank"],
        local_rank=0,
        distributed_init_method="env://",
    )
    initialize_model_parallel()
    initialize_dp_attention(args)
    initialize_moe_config()
    return args


def load(job: dict[str, Any]) -> tuple[dict[str, list[str]], Pieces]:
    read: set[str] = set()
    used: set[str] = set()
    untouched: list[str] = []
    found: Pieces = {}

    def load_and_tell(model: nn.Module, weights: Any, target_device: Any) -> None:
        watch = Watch(model)
        with watch:
            model.load_weights(watch.reading(weights))
        read.update(watch.read)
        used.update(watch.used)
        shared = (
            ("model.embed_tokens.weight", "lm_head.weight") if found else ()
        )  # of the MTP layer, which gets the model's own
        untouched.extend(
            parameter for parameter in watch.untouched() if not parameter.startswith(shared)
        )
        for name, piece in pieces_of(model).items():
            found.setdefault(name, piece.clone())

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load_and_tell)
    with OnTheCpu():
        args = start(job)
        config = ModelConfig.from_server_args(args)
        get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
        layers = json.loads((Path(job["path"]) / "config.json").read_text())
        if layers.get("num_nextn_predict_layers", 0):
            draft = ModelConfig.from_server_args(args, is_draft_model=True)
            get_model(
                model_config=draft, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
            )
    mtp = f"model.layers.{layers['num_hidden_layers']}"
    return {"unread": sorted(read - used), "untouched": untouched}, {
        NEXTN.sub(f"{mtp}.", name): piece for name, piece in found.items()
    }


def pieces_of(model: nn.Module) -> Pieces:
    found: Pieces = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            held = {key: value for key, value in module.named_parameters(recurse=False)}
            w13, w2 = (
                {
                    key.removeprefix(side): value
                    for key, value in held.items()
                    if key.startswith(side)
                }
                for side in ("w13_", "w2_")
            )
            found |= expert_pieces(name, expert_parts(w13), expert_parts(w2))
        elif isinstance(module, LinearBase):
            found |= linear(name, module, model.config)
        else:
            found |= plain_pieces(name, module)
    return found


def linear(name: str, module: LinearBase, config: Any) -> Pieces:
    held = dict(module.named_parameters(recurse=False))
    bias = held.pop("bias", None)
    parts = linear_parts(held)
    names, rows = linear_names(name), next(iter(parts.values())).shape[0]
    sizes = getattr(module, "output_partition_sizes", None) or [rows]
    if len(sizes) < len(names):  # a replicated linear that two were joined to
        sizes = [config.q_lora_rank, rows - config.q_lora_rank]
    found: Pieces = (
        {}
        if bias is None
        else {
            f"{own}.bias|value": piece for own, piece in zip(names, bias.split(sizes), strict=True)
        }
    )
    for kind, tensor in parts.items():
        pieces = tensor.expand(len(names)).split(1) if kind == "global" else tensor.split(sizes)
        found |= {f"{own}|{kind}": piece for own, piece in zip(names, pieces, strict=True)}
    return found


def linear_parts(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts [N, ...] of a linear, by the parameters that its method made."""
    if "qweight" in held:  # AWQ: [K, N / 8]
        codes, zeros = (
            unsigned_along_last(held[key], AWQ_ORDER).T for key in ("qweight", "qzeros")
        )
        return {"codes": codes, "zero": zeros, "scale": held["scales"].T}
    if "weight_packed" in held and held["weight_packed"].dtype == torch.int32:
        parts = {"codes": unsigned_along_last(held["weight_packed"]), "scale": held["weight_scale"]}
        if "weight_zero_point" in held:  # packed along N
            parts["zero"] = unsigned_along_last(held["weight_zero_point"].T).T
        return parts
    return _other_parts(held, "weight_global_scale")


def expert_parts(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of all experts, [E, N, ...]; 4-bit integers lie transposed, as Marlin's repacking
    takes them."""
    if "qweight" in held:
        codes, zeros = (
            unsigned_along_last(held[key], AWQ_ORDER).transpose(1, 2)
            for key in ("qweight", "qzeros")
        )
        return {"codes": codes, "zero": zeros, "scale": held["scales"].transpose(1, 2)}
    if "weight_packed" in held and held["weight_packed"].dtype == torch.int32:
        parts = {
            "codes": unsigned_along_last(held["weight_packed"].transpose(1, 2)),
            "scale": held["weight_scale"].transpose(1, 2),
        }
        if "weight_zero_point" in held:
            parts["zero"] = unsigned_along_last(held["weight_zero_point"]).transpose(1, 2)
        return parts
    return _other_parts(held, "weight_global_scale")


def _other_parts(held: dict[str, Tensor], divisor: str) -> dict[str, Tensor]:
    """FP4 of either format, whose global scale one keeps as a divisor; int8; or a weight in 16
    bits."""
    if "weight_packed" in held:
        return {
            "codes": e2m1_along_last(held["weight_packed"]),
            "scale": held["weight_scale"].float(),
            "global": 1 / held[divisor],
        }
    if "weight_scale_2" in held:
        return {
            "codes": e2m1_along_last(held["weight"]),
            "scale": held["weight_scale"].float(),
            "global": held["weight_scale_2"],
        }
    if "weight_scale" in held:
        return {"codes": held["weight"], "scale": held["weight_scale"]}
    return {"value": held["weight"]}


def main() -> None:
    deepseek_weights.concurrent.futures.ThreadPoolExecutor = AtOnce
    run_forked(json.load(sys.stdin), load)


if __name__ == "__main__":
    main()
