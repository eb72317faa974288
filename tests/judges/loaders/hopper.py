"""A Hopper GPU that is not there: what torch says of it, tensors meant for it on the CPU, and what
parameters mean that vLLM and SGLang, whose methods are of one origin, make for it."""

from types import SimpleNamespace

import torch
from pieces import AWQ_ORDER, e2m1_along_last, linear_names, unsigned_along_last
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


class OnTheCpu(TorchFunctionMode):
    """Whatever asks for a tensor on the GPU gets it on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


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


def linear(name, module, config, bits=4):
    held = dict(module.named_parameters(recurse=False))
    bias = held.pop("bias", None)
    parts = held_parts(held, bits)
    names, rows = linear_names(name), next(iter(parts.values())).shape[0]
    sizes = getattr(module, "output_partition_sizes", None) or [rows]
    if len(sizes) < len(names):  # a replicated linear that two were joined to
        sizes = [config.q_lora_rank, rows - config.q_lora_rank]
    joined = len(sizes) - len(names)  # the first of the names has several of them
    sizes = [sum(sizes[: joined + 1]), *sizes[joined + 1 :]]
    found = (
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


def held_parts(held, bits=4, turned=False):
    """Parts [N, ...] of a linear, or [E, N, ...] of all experts, by the parameters that its method
    made; turned: 4-bit integers lie transposed, as Marlin's repacking takes them. Of FP4, whose
    global scale one format keeps as a divisor; of int8; or of a weight in 16 bits."""

    def laid(name):
        return held[name].mT if turned else held[name]

    if "qweight" in held:  # AWQ: [K, N / 8]
        codes, zeros = (unsigned_along_last(held[key], AWQ_ORDER) for key in ("qweight", "qzeros"))
        return {"codes": codes.mT, "zero": zeros.mT, "scale": held["scales"].mT}
    packed = held.get("weight_packed")
    if packed is not None and packed.dtype == torch.int32:
        codes = unsigned_along_last(laid("weight_packed"), bits=bits)
        parts = {"codes": codes, "scale": laid("weight_scale")}
        if "weight_zero_point" in held:  # packed along N
            parts["zero"] = unsigned_along_last(laid("weight_zero_point").mT).mT
        return parts
    scale = held.get("weight_scale")
    if packed is not None or "weight_scale_2" in held:
        codes = e2m1_along_last(held["weight"] if packed is None else packed)
        divisor = held.get("weight_global_scale")
        whole = held["weight_scale_2"] if divisor is None else 1 / divisor
        return {"codes": codes, "scale": scale.float(), "global": whole}
    return {"value": held["weight"]} if scale is None else {"codes": held["weight"], "scale": scale}
