"""Runs inside vLLM's own environment: loads checkpoints with vLLM and tells what it generates.

    python vllm_run.py < jobs.json > answers.json

jobs: [{"path", "prompts": [[token id]], "max_tokens", and "dtype" where not bfloat16}]. The output
is {"engine", "products": {"int4", "int8"}, "answers"}; one answer a job: [{"tokens":
[...], "logprobs": [[[token, value], ...] a position]}] a prompt, or {"error": text} where vLLM
would not load it.

Two of vLLM's products for CPUs need newer instructions than every CPU has: int4 wants AVX-512, and
without VNNI oneDNN's int8 product saturates inside and is some percent off. There the product alone
is computed by torch, from the parameters as vLLM's
loader left them: configuration, loading, fusing, repacking and the rounding of activations stay
vLLM's. "products" says which.
"""

import gc
import json
import os
import sys
import traceback

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from torch.nn.functional import linear
from transformers import AutoConfig, DeepseekV3Config
from vllm import LLM, SamplingParams, __version__
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.platforms import current_platform


class PanguConfig(DeepseekV3Config):
    """openPangu's releases bring a configuration class as code to be run; this one has what vLLM
    reads of it."""

    model_type = "pangu_ultra_moe"


def multiply_int4_in_torch():
    """w [K, N] = (code - zero) * scale, from vLLM's words of eight codes along K."""

    def decode(self, layer):
        words, scale, zeros = self._get_weight_params(layer)[:3]
        codes = unpack_quantized_values_into_int32(words.data, self.config.weight_type, 0).float()
        zero = torch.full_like(scale, 8.0, dtype=torch.float32)
        if self.config.zero_points:
            zero = unpack_quantized_values_into_int32(
                zeros.data, self.config.weight_type, 1
            ).float()
        centred = codes.unflatten(0, (scale.shape[0], -1)) - zero.unsqueeze(1)
        layer.plain = (centred * scale.float().unsqueeze(1)).flatten(0, 1).t().to(scale.dtype)

    def apply(self, layer, x, bias=None):
        return linear(x, layer.plain, bias)

    CPUWNA16LinearKernel._process_gptq_weights_w4a16 = decode
    CPUWNA16LinearKernel.apply_weights = apply


def multiply_int8_in_torch():
    """Codes times codes in float32, which is exact for these sizes, then both scales."""

    def keep(self, layer):
        weight, scale = (getattr(layer, name) for name in self.layer_param_names[:2])
        layer.codes, layer.channel_scale = weight.data.float(), scale.data.float().view(-1)

    def apply(self, layer, x, bias=None):
        flat = x.reshape(-1, x.shape[-1])
        codes, scale, _ = ops.onednn_scaled_int8_quant(flat, None, None, True)
        out = linear(codes.float(), layer.codes) * scale.view(-1, 1) * layer.channel_scale
        return ((out if bias is None else out + bias.float()).to(x.dtype)).view(*x.shape[:-1], -1)

    CPUInt8ScaledMMLinearKernel.process_weights_for_onednn = keep
    CPUInt8ScaledMMLinearKernel._apply_weights_onednn = apply


def int8_product_error():
    """Relative error of oneDNN's product of normally distributed int8 codes, which should be that
    of rounding to BF16, 0.002."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(rows, 256, generator=generator) for rows in (16, 128)]
    x, w = (
        (value / value.abs().amax(1, keepdim=True) * 127).round().to(torch.int8) for value in values
    )
    x_scale, w_scale = (
        torch.full((16, 1), 0.01),
        torch.full((128, 1), 0.01),
    )  # the handler keeps a pointer to w_scale
    handler = ops.create_onednn_scaled_mm(w.t(), w_scale, torch.bfloat16, True, False, 32)
    out = torch.empty(16, 128, dtype=torch.bfloat16)
    ops.onednn_scaled_mm(handler, x, out, x_scale, None, None, None)
    exact = (x.float() @ w.float().t()) * 1e-4
    return float((out.float() - exact).norm() / exact.norm())


def products_of_this_cpu():
    """Whose product each grid's is here, after those that this CPU has not are replaced."""
    products = {"int4": "vLLM's", "int8": "vLLM's"}
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        multiply_int4_in_torch()
        products["int4"] = "torch's, for this CPU has no AVX-512"
    error = int8_product_error()
    if error > 0.01:
        multiply_int8_in_torch()
        products["int8"] = f"torch's, for oneDNN's is {100 * error:.1f} % off on this CPU"
    return products


def load(job):
    return LLM(
        model=job["path"],
        dtype=job.get("dtype", "bfloat16"),
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        # A cache of fixed size, so that several of these run beside each other on one GPU.
        **(
            {}
            if current_platform.is_cpu()
            else {"kv_cache_memory_bytes": 2**28, "gpu_memory_utilization": 0.05}
        ),
    )


def generate(model, job):
    params = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, logprobs=5, detokenize=False
    )
    found = model.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]], params, use_tqdm=False
    )
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "logprobs": [
                [[token, entry.logprob] for token, entry in position.items()]
                for position in each.outputs[0].logprobs
            ],
        }
        for each in found
    ]


def main():
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints; the answers must stand alone
    AutoConfig.register("pangu_ultra_moe", PanguConfig)
    products = products_of_this_cpu() if current_platform.is_cpu() else {}
    answers = []
    for job in json.load(sys.stdin):
        try:
            model = load(job)
            answers.append(generate(model, job))
        except Exception as fault:
            traceback.print_exc()
            answers.append({"error": f"{type(fault).__name__}: {fault}"})
        model = None
        gc.collect()
    json.dump({"engine": f"vllm {__version__}", "products": products, "answers": answers}, told)
    told.close()


if __name__ == "__main__":
    main()
