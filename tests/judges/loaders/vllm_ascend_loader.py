"""Runs inside vllm-ascend's own environment: loads checkpoints with its loader, on a CPU, and tells
what came of it.

    python vllm_ascend_loader.py npu < jobs.json

jobs: [{"path", "rank", "of", "device", "quantization", "plugin", "out"}]. For each, OUT.json has {"error"} or
{"unread": tensors of the checkpoint that were written to no parameter, "untouched": parameters not
written in full}, and OUT.safetensors what the parameters mean, by the checkpoint's modules, after
vllm-ascend laid them out for the device (`pieces.py`).

Rank `rank` of `of` is a process of torch's fake process group: nothing is sent. torch_npu is real,
over do-nothing CANN libraries. Two of its operators are called while loading and are torch here: a
change of layout, which changes no value, and the packing of int4.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "ascend,ascend_model",
}
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}

from absent import absent

absent("torchvision", "torchaudio")
import torch
import torch.distributed as dist
import torch_npu
from pangu_config import PanguConfig
from pieces import expert_pieces, int4_along_last, linear_names, plain_pieces, released
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearBase
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform
from watched import Loads


def stand_in():
    """What asks a device, or another rank, answers for a CPU and for nobody."""
    torch.npu.current_device = lambda: torch.device("cpu")
    torch.npu.set_device = torch.npu.synchronize = torch.npu.empty_cache = lambda *_: None
    torch_npu.npu_format_cast = lambda tensor, *_, **__: tensor
    torch_npu.npu_convert_weight_to_int4pack = pack_int4
    Tensor.npu = lambda tensor, *_: tensor
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    new_group, backend = dist.new_group, dist.ProcessGroup._get_backend
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    dist.broadcast_object_list = lambda *_, **__: (
        None
    )  # the fake group's would unpickle memory that nobody wrote, and end the process
    of_npu = SimpleNamespace(get_hccl_comm_name=lambda _: "nobody")
    dist.ProcessGroup._get_backend = lambda group, device: (
        of_npu if device.type == "npu" else backend(group, device)
    )
    type(current_platform).device_type = "cpu"
    type(current_platform).set_device = classmethod(lambda *_: None)


def pack_int4(codes):
    """int32 [..., 8 n] to [..., n]: eight codes a word, the first in the low bits, two's
    complement."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (codes.unflatten(-1, (-1, 8)) & 15).to(torch.int64) << shifts
    return nibbles.sum(-1).to(torch.int32)


def start(config, rank, of):
    """What NPUWorker does before it loads."""
    from vllm_ascend import ops
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.distributed.parallel_state import init_ascend_model_parallel
    from vllm_ascend.utils import register_ascend_customop

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
    ops.register_dummy_fusion_op()
    register_ascend_customop(config)
    init_ascend_config(config)
    init_distributed_environment(of, rank, "env://", 0, "fake")
    ensure_model_parallel_initialized(of, 1, 1, 1)
    init_ascend_model_parallel(config.parallel_config)
    WEIGHT_LOADER_V2_SUPPORTED[:] = [
        name for name in WEIGHT_LOADER_V2_SUPPORTED if name != "UnquantizedLinearMethod"
    ]


def load(job):
    if job["plugin"]:
        os.environ["VLLM_PLUGINS"] = "ascend,ascend_model,quantkit_ascend"
    about = json.loads((Path(job["path"]) / "config.json").read_text())
    has_mtp = about.get("num_nextn_predict_layers", 0)
    config = EngineArgs(
        model=job["path"],
        quantization=job["quantization"],
        tensor_parallel_size=job["of"],
        enforce_eager=True,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=256,
        distributed_executor_backend="mp",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if has_mtp else None,
    ).create_engine_config()
    config.device_config.device = torch.device("cpu")
    loads = Loads()
    v4 = about["model_type"] == "deepseek_v4"  # its MTP layer gets the model's own
    shared = ("model.embed_tokens.", "model.layers.0.shared_head.head.") if v4 else ()
    loads.watch_vllm(DefaultModelLoader, shared=shared)
    found = {}
    with set_current_vllm_config(config):
        start(config, job["rank"], job["of"])
        found |= pieces_of(get_model(vllm_config=config))
        if has_mtp:
            drafts = draft_pieces(config)
            if v4:
                first = f"layers.{about['num_hidden_layers']}."
                drafts = {name.replace("layers.0.", first): one for name, one in drafts.items()}
            found = drafts | found
    return loads.told(), released(found, about)


def draft_pieces(config):
    speculative = config.speculative_config
    model = get_model(vllm_config=config, model_config=speculative.draft_model_config)
    return {name.replace(".mtp_block", ""): tensor for name, tensor in pieces_of(model).items()}


def pieces_of(model):
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedMoE):
            found |= expert_pieces(name, *experts(module))
        elif isinstance(module, LinearBase):
            found |= linear(name, module)
        elif hasattr(module, "fak_descale_float") or hasattr(module, "k_cache_scale"):
            found |= cache_steps(name.split(".self_attn")[0] + ".self_attn", module)
        elif not name.endswith((".fa_q", ".fa_k", ".fa_v")):
            found |= plain_pieces(name, module)
        impl = getattr(module, "impl", None)
        if impl is not None and hasattr(impl, "W_UV"):
            absorbed = torch.cat(
                [impl.W_UK_T, impl.W_UV.transpose(1, 2)], dim=1
            )  # heads, nope + v, kv_lora
            attention = name.split(".self_attn")[0] + ".self_attn"
            found[f"{attention}.kv_b_proj|value"] = absorbed.flatten(0, 1)
    return found


def cache_steps(attention, module):
    """Of an int8 cache, as the rank's attention uses them: a latent's, or those of its heads'
    channels."""
    if hasattr(module, "fak_descale_float"):
        return {f"{attention}.fa_k|scale": module.fak_descale_float}
    module.impl._prepare_c8_scales(module, torch.device("cpu"))
    assert not module.k_cache_offset.any()
    assert not module.v_cache_offset.any()
    return {
        f"{attention}.{side}_proj.kv_cache|scale": getattr(module, f"_c8_{side}_scale")
        for side in "kv"
    }


def scheme_of(module):
    method = module.quant_method
    scheme = (
        method
        if type(method).__name__ == "AwqLinearMethod"
        else getattr(method, "quant_method", None)
    )
    return None if scheme is None else type(scheme).__name__


def linear(name, module):
    sizes = getattr(module, "output_partition_sizes", None) or [module.weight.shape[0]]
    method = scheme_of(module)
    if method is None:
        parts = {"value": module.weight}
    elif method in ("WeightOnlyLinear", "AwqLinearMethod"):
        four = module.weight.dtype == torch.int32
        codes = int4_along_last(module.weight) if four else module.weight
        parts = {"codes": codes.T, "scale": module.weight_scale.T}
        if method == "AwqLinearMethod" or not module.quant_method.quant_method.symmetric:
            parts["zero"] = (-module.weight_offset).T.to(torch.int8)
    else:
        assert method == "AscendW8A8DynamicLinearMethod", method
        parts = {"codes": module.weight.T, "scale": module.weight_scale.reshape(-1, 1)}
    found = {}
    for kind, tensor in parts.items():
        for own, piece in zip(
            linear_names(name), tensor.split(sizes) if len(sizes) > 1 else [tensor], strict=True
        ):
            found[f"{own}|{kind}"] = piece
    if module.bias is not None:
        for own, piece in zip(linear_names(name), module.bias.split(sizes), strict=True):
            found[f"{own}.bias|value"] = piece
    of_router = {key: getattr(module, key, None) for key in ("e_score_correction_bias", "tid2eid")}
    return found | {f"{name}.{key}|value": one for key, one in of_router.items() if one is not None}


def experts(module):
    """Of w13 and w2, each part [E, N, ...]."""
    match scheme_of(module):
        case None:
            return {"value": module.w13_weight.transpose(1, 2)}, {
                "value": module.w2_weight.transpose(1, 2)
            }
        case "AscendW8A8DynamicFusedMoEMethod":
            return (
                {
                    "codes": module.w13_weight.transpose(1, 2),
                    "scale": module.w13_weight_scale.unsqueeze(2),
                },
                {
                    "codes": module.w2_weight.transpose(1, 2),
                    "scale": module.w2_weight_scale.unsqueeze(2),
                },
            )
        case "AscendW4A16FusedMoEMethod" | "AwqExperts" as method:
            return _w4a16(module, "w13", method), _w4a16(module, "w2", method)
        case "AscendW4A8DynamicFusedMoEMethod":
            return _w4a8(module, "w13"), _w4a8(module, "w2")
        case other:
            raise TypeError(other)


def _w4a16(module, side, method):
    offset = getattr(module, f"{side}_weight_offset")
    found = {
        "codes": int4_along_last(getattr(module, f"{side}_weight_packed")).transpose(1, 2),
        "scale": getattr(module, f"{side}_weight_scale").transpose(1, 2),
    }
    if method == "AwqExperts":
        return found | {"zero": (-offset).transpose(1, 2).to(torch.int8)}
    assert not offset.any()
    return found


def _w4a8(module, side):
    """The scale is a float32's bits in an int64; scale_bias is what the kernel takes off again."""
    codes = int4_along_last(getattr(module, f"{side}_weight")).transpose(1, 2)
    scale = (
        getattr(module, f"{side}_weight_scale")
        .to(torch.int32)
        .view(torch.float32)
        .reshape(codes.shape[0], -1, 1)
    )
    return {
        "codes": codes,
        "scale": scale,
        "scale_bias": getattr(module, f"{side}_scale_bias").reshape(codes.shape[0], -1, 1),
    }


def main():
    from pieces import run_forked
    from vllm_ascend.utils import adapt_patch

    AutoConfig.register("pangu_ultra_moe", PanguConfig)
    stand_in()
    adapt_patch()
    import vllm.model_executor.models.deepseek_mtp
    import vllm.model_executor.models.openpangu
    import vllm.model_executor.models.qwen3
    import vllm.model_executor.models.qwen3_moe  # noqa: F401

    run_forked(json.load(sys.stdin), load)


if __name__ == "__main__":
    main()
