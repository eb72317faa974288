"""What backend torch_npu computes, said a second time and another way: float64 over plain weights, one rounding where an operator ends.

No operator of torch_npu, no packing, no sorting: codes as they come, experts one by one. Where the manuals make an operand 16 bits wide,
which the reference backend keeps in float32, it is rounded here too: scales of int4 weights and of bf16 int8 experts, the experts' weights
in their sum, and what attention reads. Sums in float64 are exact to far less than a bf16 step, so two computations that mean the same
give the same bits. `installed()` puts this one in the place of the reference backend.
"""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from quantkit_kernels import backends
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.functional import Choice
from quantkit_kernels.linear import Linear, quantize_rows
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.reference.functional import absorbed, values
from quantkit_kernels.weights import Fp4, Int4, Int8, Weight, dequantize, shape
from torch import Tensor


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within it backend "reference" is this module's."""
    here = SimpleNamespace(**{name: globals()[name] for name in (*FUNCTIONS, "linear", "experts_layout", "unusable")})
    plain = backends.module
    backends.module = lambda name: cast(ModuleType, here) if name == "reference" else importlib.import_module(f"quantkit_kernels.{name}")
    backends.find.cache_clear()
    try:
        yield
    finally:
        backends.module = plain
        backends.find.cache_clear()


def unusable(operator: str, device: torch.device, dtype: torch.dtype | None, shapes: object) -> str | None:
    return None


class ExactLinear(Linear):
    def __init__(self, weight: Weight, dtype: torch.dtype, device: torch.device, in_experts: bool = False) -> None:
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "reference")
        if isinstance(weight, Int4) or (isinstance(weight, Int8) and in_experts and dtype == torch.bfloat16):
            weight = weight._replace(scale=weight.scale.to(dtype).float())
        self.weight, self.in_experts = weight, in_experts

    def held(self) -> list[Tensor]:
        return [tensor for tensor in self.weight if tensor is not None]

    def rows(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Int8):
            codes, scale = quantize_rows(x)
            return ((codes.double() @ self.weight.codes.double().T) * self.weight.scale.double().T * scale.double()).to(self.dtype)
        if isinstance(self.weight, Int4):
            return (x.double() @ dequantize(self.weight, torch.float64).T).to(self.dtype)
        if self.in_experts:
            return (x.double() @ dequantize(self.weight, torch.float32).to(self.dtype).double().T).to(self.dtype)
        # Plain torch on the NPU too: the weight in the compute dtype, torch's product.
        return F.linear(x, dequantize(self.weight, torch.float32).to(self.dtype))


def linear(weight: Weight, dtype: torch.dtype, device: torch.device) -> ExactLinear:
    return ExactLinear(weight, dtype, device)


class ExactExperts(Experts):
    """One expert after the other over the tokens that chose it."""

    def __init__(self, linears: list[tuple[ExactLinear, ExactLinear, ExactLinear]], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(len(linears), linears[0][2].out_features, linears[0][2].in_features, dtype, device, "reference")
        self.linears = linears

    def held(self) -> list[Tensor]:
        return [tensor for three in self.linears for one in three for tensor in one.held()]

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        weights = topk_weights.to(self.dtype).double()
        total = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for choice, expert in enumerate(topk_ids[token].tolist()):
                gate, up, down = self.linears[expert]
                row = x[token : token + 1]
                product = down.rows(silu_and_mul(torch.cat([gate.rows(row), up.rows(row)], dim=-1)))
                total[token] += weights[token, choice] * product[0].double()
        return total.to(self.dtype)


class ExactLayout(ExpertsLayout):
    def __init__(self, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.linears: dict[int, tuple[ExactLinear, ExactLinear, ExactLinear]] = {}

    def place(self, index: int, gate: Weight, up: Weight, down: Weight) -> None:
        one, two, three = (ExactLinear(weight, self.dtype, self.device, in_experts=True) for weight in (gate, up, down))
        self.linears[index] = (one, two, three)

    def finish(self) -> ExactExperts:
        return ExactExperts([self.linears[index] for index in sorted(self.linears)], self.dtype, self.device)


def experts_layout(num_experts: int, gate: Weight, down: Weight, dtype: torch.dtype, device: torch.device) -> ExpertsLayout:
    if isinstance(gate, Fp4):  # no operator of torch_npu either: a loop over torch's product, whose sums depend on the rows it gets
        return LoopLayout(num_experts, linear, dtype, device, "reference")
    return ExactLayout(num_experts, dtype, device)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean = x.double().square().mean(dim=-1, keepdim=True)
    return (x.double() / (mean + eps).sqrt() * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


def route(logits: Tensor, bias: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3's: sigmoid, groups by their best two, weights divided by their sum; then the shared experts."""
    assert (how.scoring, how.norm_topk_prob) == ("sigmoid", True), how
    experts = logits.shape[1]
    ids = torch.empty(len(logits), how.top_k + how.num_shared, dtype=torch.int64)
    weights = torch.ones(ids.shape)
    for token, row in enumerate(logits.double()):
        scores = 1 / (1 + (-row).exp())
        choice = scores if bias is None else scores + bias.double()
        size = experts // how.n_group
        groups = sorted(range(how.n_group), key=lambda g: -float(choice[g * size : (g + 1) * size].topk(2).values.sum()))[: how.topk_group]
        kept = [expert for group in groups for expert in range(group * size, (group + 1) * size)]
        best = sorted(kept, key=lambda expert: -float(choice[expert]))[: how.top_k]
        ids[token] = torch.tensor([*best, *range(experts, experts + how.num_shared)])
        weights[token, : how.top_k] = scores[best] / (scores[best].sum() + 1e-20) * how.routed_scaling_factor
    return ids, weights


def moe_gate(x: Tensor, router: Tensor, bias: Tensor | None, how: Choice) -> tuple[Tensor, Tensor]:
    return route(F.linear(x.float(), router), bias, how)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return turned(x, cos[positions], sin[positions], interleaved)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    assert interleaved
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    angles = torch.complex(cos.double(), sin.double())[:, None]
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


def mla_prepare(
    qkv_a: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slots: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    q_a, latent, k_pe = qkv_a.split([len(q_norm), len(kv_norm), 2 * cos.shape[1]], dim=-1)
    rows = cache.view(-1, cache.shape[2])
    rows[slots, : len(kv_norm)] = rms_norm(latent, kv_norm, eps).to(cache.dtype)
    rows[slots, len(kv_norm) :] = turned(k_pe[:, None], cos, sin, interleaved)[:, 0].to(cache.dtype)
    return rms_norm(q_a, q_norm, eps)


def mla_decode(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """The products with W_UK and W_UV are torch's, as on the NPU."""
    kv_lora, rope_dim = kv_b.shape[2], 2 * cos.shape[1]
    query = torch.cat([absorbed(q, kv_b, cos), turned(q[..., -rope_dim:], cos, sin, interleaved)], dim=-1)
    out = torch.zeros(*q.shape[:2], kv_lora, dtype=q.dtype)
    for row, length in enumerate(seq_lens.tolist()):
        seen = cache[block_table[row]].flatten(0, 1)[:length].to(q.dtype).double()
        scores = query[row].double() @ seen.T * scale
        out[row] = (scores.softmax(dim=-1) @ seen[:, :kv_lora]).to(q.dtype)
    return values(out, q, kv_b, cos)


FUNCTIONS = ("rms_norm", "add_rms_norm", "silu_and_mul", "route", "moe_gate", "rope", "mla_prepare", "mla_decode")
