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
import deep_gemm
import torch.distributed as dist
from hopper import HOPPER, OnTheCpu, held_parts, linear
from torch.testing._internal.distributed.fake_pg import FakeStore

NEXTN = re.compile(r"^model\.(decoder\.|(?=enorm|hnorm|eh_proj|shared_head))")
"""What SGLang calls the MTP layer and what belongs to it."""


class AtOnce:
    """An executor whose calls run where they are submitted: what is written is seen with the tensor
    that it was read from."""

    def __init__(self, *_, **__): ...

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def submit(self, function, *args, **kwargs):
        done = Future()
        done.set_result(function(*args, **kwargs))
        return done


import sglang.srt.models.deepseek_common.deepseek_weight_loader as deepseek_weights
import sglang.srt.models.deepseek_nextn
import sglang.srt.models.deepseek_v2
import sglang.srt.models.qwen3
import sglang.srt.models.qwen3_moe  # noqa: F401
from pieces import expert_pieces, plain_pieces, released, run_forked, sides
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
from watched import Loads


def start(job, **options):
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


def load(job):
    found = {}
    loads = Loads()

    def load_and_tell(model, weights, target_device):
        # Of the MTP layer, which gets the model's own.
        shared = ("model.embed_tokens.weight", "lm_head.weight") if found else ()
        loads.watch(model, lambda reading: model.load_weights(reading(weights)), shared)
        for name, piece in pieces_of(model).items():
            found.setdefault(name, piece.clone())

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load_and_tell)
    with OnTheCpu():
        args = start(job)
        config = ModelConfig.from_server_args(args)
        config.hf_config.language_only = config.hf_config.language_model_only = True
        get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
        layers = json.loads((Path(job["path"]) / "config.json").read_text())
        layers = layers.get("text_config", {}) | layers
        if layers.get("num_nextn_predict_layers", 0):
            draft = ModelConfig.from_server_args(args, is_draft_model=True)
            get_model(
                model_config=draft, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
            )
    mtp = f"model.layers.{layers['num_hidden_layers']}"
    found = {NEXTN.sub(f"{mtp}.", name): piece for name, piece in found.items()}
    return loads.told(), released(found, layers)


def pieces_of(model):
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            parts = (
                held_parts(side, turned=True)
                for side in sides(dict(module.named_parameters(recurse=False)))
            )
            found |= expert_pieces(name, *parts)
        elif isinstance(module, LinearBase):
            found |= linear(name, module, model.config)
        else:
            found |= plain_pieces(name, module)
    return found


def main():
    deep_gemm.get_num_sms = lambda: HOPPER.multi_processor_count
    deepseek_weights.concurrent.futures.ThreadPoolExecutor = AtOnce
    run_forked(json.load(sys.stdin), load)


if __name__ == "__main__":
    main()
