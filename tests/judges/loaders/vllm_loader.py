"""Runs with vLLM's released Python: loads checkpoints with its loader, on a CPU, as on a GPU, and
tells what came of it.

    python vllm_loader.py cuda < jobs.json

Jobs and answers are those of `vllm_ascend_loader.py`, the GPU is that of `hopper.py`. Pieces are
told as the loader left them, before weights are laid out for a kernel, which only the GPU can do.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}

from absent import absent

absent(
    *[
        "torchvision",
        "torchaudio",
        "flashinfer",
        "deep_gemm",
        "deep_ep",
        "cutlass",
        "quack",
        "humming",
        "pynvml",
    ],
    *["vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._C", "vllm._moe_C"],
    *["vllm.third_party.pynvml", "vllm.vllm_flash_attn"],
)
import torch
import torch.distributed as dist
from hopper import OnTheCpu, held_parts, linear
from pieces import expert_pieces, plain_pieces, released, run_forked, sides
from torch.testing._internal.distributed.fake_pg import FakeStore

_operator = torch._ops._OpNamespace.__getattr__


def operator(namespace, name):
    """Of those that vLLM compiles: what a Hopper GPU supports is asked while loading, and no more."""
    if namespace.name == "_C" and "support" in name:
        return lambda *_: True
    return _operator(namespace, name)


torch._ops._OpNamespace.__getattr__ = operator
from vllm import platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform

platforms._current_platform = NonNvmlCudaPlatform()
from vllm.config import PassConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import base_loader, get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from watched import Loads

OF_ROUTER = ("e_score_correction_bias", "tid2eid")


def load(job):
    about = json.loads((Path(job["path"]) / "config.json").read_text())
    about = about.get("text_config", {}) | about
    torch._ops._OpNamespace.__getattr__ = lambda own, name: (
        (lambda *_: True) if own.name in ("_C", "_moe_C") else _operator(own, name)
    )
    torch.accelerator.empty_cache = torch.accelerator.max_memory_allocated = lambda: 0
    draft = {"method": "mtp", "num_speculative_tokens": 1}
    found = {}
    loads = Loads()

    def tell(model):
        for name, piece in pieces_of(model).items():
            found.setdefault(name.replace(".mtp_block", ""), piece.clone())

    v4 = about["model_type"] == "deepseek_v4"
    # Its MTP layer gets the model's own.
    drawn = f"model.layers.{about['num_hidden_layers']}.shared_head.head."
    shared = ("model.embed_tokens.", drawn) if v4 else ()
    loads.watch_vllm(DefaultModelLoader, tell, shared)
    PassConfig.default_fi_allreduce_fusion_max_size_mb = staticmethod(dict)
    base_loader.process_weights_after_loading = lambda *_, **__: None
    NonNvmlCudaPlatform.get_device_communicator_cls = (
        platforms.interface.Platform.get_device_communicator_cls
    )
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    # The fake group's would unpickle memory that nobody wrote.
    dist.broadcast_object_list = lambda *_, **__: None
    new_group = dist.new_group
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    with OnTheCpu():
        config = EngineArgs(
            model=job["path"],
            quantization=job["quantization"],
            tensor_parallel_size=job["of"],
            enforce_eager=True,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=256,
            distributed_executor_backend="mp",
            speculative_config=draft if about.get("num_nextn_predict_layers") else None,
        ).create_engine_config()
        config.device_config.device = torch.device("cpu")
        with set_current_vllm_config(config):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=job["rank"], world_size=job["of"]
            )
            init_distributed_environment(job["of"], job["rank"], "env://", 0, "fake")
            ensure_model_parallel_initialized(job["of"], 1)
            get_model(vllm_config=config)
            if config.speculative_config is not None:
                drafter = config.speculative_config.draft_model_config
                get_model(vllm_config=config, model_config=drafter)
    return loads.told(), released(found, about)


def pieces_of(model):
    found = {}
    for name, module in model.named_modules():
        held = dict(module.named_parameters(recurse=False))
        if any(key.startswith("w13_") for key in held):
            bits = getattr(module.quant_method, "num_bits", 4)
            turned = "w13_weight_packed" not in held
            parts = (held_parts(side, bits, turned) for side in sides(held))
            found |= expert_pieces(name.removesuffix(".routed_experts"), *parts)
        elif isinstance(module, LinearBase):
            bits = getattr(getattr(module, "scheme", None), "num_bits", 4)
            found |= linear(name, module, model.config, bits)
            found |= {f"{name}.{key}|value": held[key] for key in OF_ROUTER if key in held}
        else:
            found |= plain_pieces(name, module)
    return found


if __name__ == "__main__":
    run_forked(json.load(sys.stdin), load)
