"""Weights of published shapes made up on the device, as one tensor-parallel rank holds them:
DeepSeek-R1's, V3.2's and V4-Flash's, GLM-5's, Qwen3's, SmolLM2's.

AWQ's grid: int4, groups of 128 where inputs divide so, zero points; router, norms, kv_b, eh_proj, embeddings and heads are
not quantized. Codes and scales are random and are laid out by the kernels' own `prepare`. The
shared expert is one more of the routed ones, as the executor has it where their formats agree. Each
layer has memory of its own; the routed experts of the later layers are those of the first in
another order, for packing 14848 experts would take longer than the benchmark.
"""

import copy
from collections import defaultdict
from typing import Any

import quantkit_kernels as kernels
import torch
from quantkit_kernels import CodedIndexKeys, CodedKeys, CodedLatents
from torch import Tensor

from quantkit.executor.cache.cache import PagedCache
from quantkit.executor.ranks.expert_parallel import NO_RANKS
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.models import deepseek_v3
from quantkit.models.mlp import DEFAULT_MIXTURE
from quantkit.models.table import Parameter
from quantkit.models.weights import ExpertsOp, LinearOp

GROUPS = (128, 64, 32)

R1: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V32: dict[str, Any] = R1 | {
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
GLM_5: dict[str, Any] = V32 | {
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "rope_theta": 1e6,
    "rope_scaling": None,
}
TINY: dict[str, Any] = R1 | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_routed_experts": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 128,
}
_QWEN3: dict[str, Any] = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
}
QWEN3_30B_A3B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


QWEN3_NEXT_80B: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 1e7,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
DEEPSEEK_V4_FLASH: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4],
    "num_hash_layers": 3,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
}
SMOLLM2 = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
}


class CountedExperts:
    """Experts that note, while `distinct` is a list, how many of them a call used."""

    distinct: list[int] | None = None

    def __init__(self, experts: kernels.Experts) -> None:
        self.experts = experts
        self.num_experts, self.nbytes, self.backend = (
            experts.num_experts,
            experts.nbytes,
            experts.backend,
        )

    def __call__(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self._note(topk_ids)
        return self.experts(x, topk_ids, topk_weights)

    def unsummed(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor | kernels.UnsummedPairs:
        self._note(topk_ids)
        return self.experts.unsummed(x, topk_ids, topk_weights)

    def _note(self, topk_ids: Tensor) -> None:
        if CountedExperts.distinct is not None:
            CountedExperts.distinct.append(len(topk_ids.unique()))


class SyntheticWeights:
    """`models.weights.Weights` made up on the device: this rank's shapes, random values of a size
    that keeps activations near 1.

    linears by part of the layer, moe: what was handed out; other: bytes of what a step reads
    besides.
    """

    ranks = parallel = SINGLE
    expert_ranks = NO_RANKS
    backend = "auto"

    def __init__(
        self,
        config: Any,
        tp: int,
        device: torch.device,
        rows: list[Parameter] | None = None,
        bits: int = 4,
    ) -> None:
        """rows: the architecture's table, DeepSeek-V3's where none is given. bits: of linears and
        experts, 4 or 16."""
        self.device, self.dtype, self.bits = device, torch.bfloat16, bits
        self._shapes, self._tp, self._config = {}, tp, config
        for row in deepseek_v3.parameters(config) if rows is None else rows:
            shape = list(row.shape)
            if row.split != "replicate":
                shape[1 if row.split == "row" else 0] //= tp
            self._shapes[row.name] = (row.role, tuple(shape))
        self.linears: dict[str, list[kernels.Linear]] = defaultdict(list)
        self.moe: list[CountedExperts] = []
        self.other: dict[str, int] = defaultdict(int)
        self._first_experts: kernels.Experts | None = None

    def tensor(self, name: str) -> Tensor:
        role, shape = self._shapes[name]
        if role == "norm":
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        if role == "router_bias":
            return torch.zeros(shape, dtype=torch.float32, device=self.device)
        router = role == "router"
        value = torch.randn(
            shape, dtype=torch.float32 if router else self.dtype, device=self.device
        )
        if router:
            self.other["router"] += value.nbytes
            value *= shape[1] ** -0.5
        if role == "streams":
            self.other["streams"] += 4 * value.numel()
            value *= shape[-1] ** -0.5
        if role == "router_table":
            value = torch.randint_like(value, self._config.n_routed_experts)
        return value

    def has(self, name: str) -> bool:
        return name in self._shapes

    def dequantized(self, module: str) -> Tensor:
        value = self._normal(module)
        self.other["kv_b" if module.endswith("kv_b_proj") else "16-bit linears"] += value.nbytes
        return value

    def linear(self, module: str) -> LinearOp:
        role, shape = self._shapes[f"{module}.weight"]
        if role == "mtp_proj" and self._tp > 1:
            return Repeated(
                self._hand_out(_part(module), kernels.prepare_dense(self._normal(module))), self._tp
            )
        if role == "head":
            return self._hand_out(_part(module), kernels.prepare_dense(self._normal(module)))
        return self._hand_out(
            _part(module), kernels.prepare(self._weight(*shape), dtype=self.dtype)
        )

    def input_rotation(self, module: str) -> int:
        return 0

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        shapes = [self._shapes[f"{module}.weight"][1] for module in modules]
        fused = self._weight(sum(n for n, _ in shapes), shapes[0][1])
        return self._hand_out(_part(modules[0]), kernels.prepare(fused, dtype=self.dtype))

    def experts(
        self, prefix: str, num_experts: int, gating: kernels.Gating = kernels.SILU
    ) -> ExpertsOp:
        return self._experts([f"{prefix}.{expert}" for expert in range(num_experts)], gating)

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        return self._experts([*(f"{prefix}.{expert}" for expert in range(num_experts)), shared])

    def _experts(self, modules: list[str], gating: kernels.Gating = kernels.SILU) -> ExpertsOp:
        if self._first_experts is None:
            names = getattr(self._config, "mixture", DEFAULT_MIXTURE).linears
            builder = kernels.ExpertsBuilder(
                len(modules), dtype=self.dtype, device=self.device, gating=gating
            )
            for expert, module in enumerate(modules):
                sides = [
                    self._weight(*self._shapes[f"{side}.weight"][1])
                    for side in names.modules(module)
                ]
                builder.add(expert, *sides)
            self._first_experts = experts = builder.finish()
        else:
            experts = _reordered(self._first_experts, len(modules), len(self.moe))
        counted = CountedExperts(experts)
        self.moe.append(counted)
        return counted

    def mla_prolog(self, *unused: Any) -> None:
        """Operators one by one: none of CUDA's takes the whole."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def add_rms_norm(
        self, x: Tensor | kernels.UnsummedPairs, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x if isinstance(x, Tensor) else x.summed(), residual, gain, eps)

    def read(self, distinct: float) -> dict[str, float]:
        """Weight bytes that a step reads, by part, with so many distinct experts in an average
        layer."""
        linears = {part: sum(op.nbytes for op in ops) for part, ops in self.linears.items()}
        return {
            **linears,
            "experts": sum(op.nbytes * distinct / op.num_experts for op in self.moe),
            **self.other,
        }

    def _hand_out(self, part: str, op: kernels.Linear) -> kernels.Linear:
        self.linears[part].append(op)
        return op

    def _normal(self, module: str) -> Tensor:
        shape = self._shapes[f"{module}.weight"][1]
        return torch.randn(shape, dtype=self.dtype, device=self.device) * shape[1] ** -0.5

    def _weight(self, n: int, k: int) -> kernels.Weight:
        if self.bits == 16:
            return kernels.Dense(
                torch.randn(n, k, dtype=self.dtype, device=self.device).mul_(k**-0.5)
            )
        return self._int4(n, k)

    def _int4(self, n: int, k: int) -> kernels.Int4:
        """Codes over the whole range; with zero points of -2 .. 1 a weight's standard deviation is
        4.75 scales."""
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=self.device)
        group = next(size for size in GROUPS if k % size == 0)
        scale = (torch.rand(n, k // group, device=self.device) + 0.5) / (4.75 * k**0.5)
        return kernels.Int4(
            codes, scale, torch.randint(-2, 2, scale.shape, dtype=torch.int8, device=self.device)
        )


class Repeated:
    """One rank's outputs of a linear that ranks gather, in the places of all others too."""

    def __init__(self, linear: kernels.Linear, times: int) -> None:
        self.linear, self._times = linear, times

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat(1, self._times)


def fill_cache(cache: PagedCache, index_layers: int = 0) -> None:
    """Put something into every slot: numbers of about one, in 8 bits codes of them all.
    index_layers: of the cache, that have index keys."""
    for layer in (*cache.layers, *map(cache.index_keys, range(index_layers))):
        coded = isinstance(layer, CodedLatents | CodedKeys | CodedIndexKeys)
        for part in (layer,) if isinstance(layer, Tensor) else layer:
            if part.dtype == torch.int8:
                part.random_(-127, 128)
            elif part.dtype == torch.float8_e4m3fn:
                part.copy_(
                    torch.randn(part.shape[1:], device=part.device).mul_(64).clamp_(-448, 448)
                )
            elif coded and part.dtype == torch.float32:
                part.fill_(1 / 64)
            else:
                part.normal_()


def _part(module: str) -> str:
    """A linear's line in the tables: q_a and kv_a are one operator, so are gate and up."""
    name = module.rpartition(".")[2].removesuffix("_proj")
    side = {"q_a": "qkv_a", "gate": "gate_up"}.get(name, name)
    if ".mlp." not in module:
        return "head" if "head" in side else side
    return f"shared {side}" if "shared_experts" in module else f"dense mlp {side}"


def _reordered(experts: kernels.Experts, count: int, turn: int) -> kernels.Experts:
    """The experts in other places but the last, which is the shared one, in memory of their own."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (
                torch.cat([value[:-1].roll(turn, 0), value[-1:]])
                if value.shape[:1] == (count,)
                else value.clone()
            )
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make(moved(part) for part in value)
        return value

    twin = copy.copy(experts)
    for name, value in vars(experts).items():
        setattr(twin, name, moved(value))
    return twin
