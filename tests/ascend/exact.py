"""What backend torch_npu computes, said a second time and another way: float64 over plain weights,
one rounding where an operator ends.

No operator of torch_npu, no packing, no sorting: codes as they come, experts one by one. Where the
manuals make an operand 16 bits wide, which the reference backend keeps in float32, it is rounded
here too: scales of int4 weights and of bf16 int8 experts, the experts' weights in their sum, and
what attention reads. Sums in float64 are exact to far less than a bf16 step, so two computations
that mean the same give the same bits. `installed()` puts this one in the place of the reference
backend.
"""

import contextlib
import importlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from kernel_formulas import chosen_experts
from quantkit_kernels import backends
from quantkit_kernels.experts import Experts, ExpertsLayout
from quantkit_kernels.linear import Linear, quantize_rows
from quantkit_kernels.paged import CacheLayout, Rotation
from quantkit_kernels.prolog import MlaWeights, sizes_of
from quantkit_kernels.reference import prompts as plain_prompts
from quantkit_kernels.reference.experts import LoopLayout
from quantkit_kernels.reference.functional import rotary_angles  # noqa: F401, one of FUNCTIONS
from quantkit_kernels.torch_npu.prolog import prolog_refused
from quantkit_kernels.weights import Fp4, Int4, Int8, NarrowInt8, dequantize, kind, shape
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.executor.weights.weights import ExecutorWeights


class ExactProducts(TorchDispatchMode):
    """Products of torch's own with 16-bit operands, in float64 and rounded once: a processor's are
    summed in an order that depends on rows and layout."""

    PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"})

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        half = arguments[0].dtype if arguments and isinstance(arguments[0], Tensor) else None
        if half not in (torch.float16, torch.bfloat16) or (
            function.overloadpacket.__name__ not in self.PRODUCTS
        ):
            return function(*arguments, **(options or {}))
        wide = [one.double() if isinstance(one, Tensor) else one for one in arguments]
        return function(*wide, **(options or {})).to(half)


@contextlib.contextmanager
def installed():
    """Within it backend "reference" is this module's, and the CPU's own operators, which would be
    taken first, are not there."""
    here = SimpleNamespace(
        **{
            name: globals()[name]
            for name in (*FUNCTIONS, "cache_layout", "linear", "experts_layout", "unusable")
        }
    )
    plain, chained = backends.module, ExecutorWeights.mla_prolog
    here.NARROW_EXPERTS = True
    absent = SimpleNamespace(unusable=lambda *arguments: "the reference is asked for")
    replaced = {"reference": here, "cpu": absent}
    backends.module = lambda name: (
        replaced.get(name) or importlib.import_module(f"quantkit_kernels.{name}")
    )
    ExecutorWeights.mla_prolog = mla_prolog
    backends.forget()
    try:
        yield
    finally:
        backends.module, ExecutorWeights.mla_prolog = plain, chained
        backends.forget()


def unusable(operator, device, dtype, shapes):
    return None


class ExactLinear(Linear):
    def __init__(self, weight, dtype, device, in_experts=False):
        n, k = shape(weight)
        super().__init__(k, n, dtype, device, "reference")
        narrow = isinstance(
            weight, NarrowInt8
        )  # whose scales stay float32, as does what makes up for the split of rows
        if isinstance(weight, Int4) or (
            isinstance(weight, Int8) and not narrow and in_experts and dtype == torch.bfloat16
        ):
            weight = weight._replace(scale=weight.scale.to(dtype).float())
        self.weight, self.in_experts = weight, in_experts

    def held(self):
        return [tensor for tensor in self.weight if tensor is not None]

    def rows(self, x):
        if isinstance(self.weight, Int8):
            codes, scale = quantize_rows(x)
            if isinstance(self.weight, NarrowInt8):
                w, eights = (
                    self.weight.codes.double() * self.weight.scale.double(),
                    8 * torch.ones(1, x.shape[1], dtype=torch.float64),
                )
                return (((codes.double() - 8) @ w.T + (eights @ w.T).float()) * scale.double()).to(
                    self.dtype
                )
            return (
                (codes.double() @ self.weight.codes.double().T)
                * self.weight.scale.double().T
                * scale.double()
            ).to(self.dtype)
        if isinstance(self.weight, Int4):
            return (x.double() @ dequantize(self.weight, torch.float64).T).to(self.dtype)
        if self.in_experts:
            return (
                x.double() @ dequantize(self.weight, torch.float32).to(self.dtype).double().T
            ).to(self.dtype)
        # Plain torch on the NPU too: the weight in the compute dtype, torch's product.
        return F.linear(x, dequantize(self.weight, torch.float32).to(self.dtype))


def linear(weight, dtype, device):
    return ExactLinear(weight, dtype, device)


class ExactExperts(Experts):
    """One expert after the other over the tokens that chose it."""

    def __init__(
        self,
        linears,
        dtype,
        device,
    ):
        super().__init__(
            len(linears),
            linears[0][2].out_features,
            linears[0][2].in_features,
            dtype,
            device,
            "reference",
        )
        self.linears = linears

    def held(self):
        return [tensor for three in self.linears for one in three for tensor in one.held()]

    def forward(self, x, topk_ids, topk_weights):
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
    def __init__(self, num_experts, dtype, device):
        self.dtype, self.device = dtype, device
        self.linears = {}

    def place(self, index, gate, up, down):
        one, two, three = (
            ExactLinear(weight, self.dtype, self.device, in_experts=True)
            for weight in (gate, up, down)
        )
        self.linears[index] = (one, two, three)

    def finish(self):
        return ExactExperts(
            [self.linears[index] for index in sorted(self.linears)], self.dtype, self.device
        )


def experts_layout(num_experts, gate, down, dtype, device):
    if isinstance(
        gate,
        Fp4,
        # no operator of torch_npu either: a loop over torch's product, whose sums depend on the
        # rows it gets
    ):
        return LoopLayout(num_experts, linear, dtype, device, "reference")
    return ExactLayout(num_experts, dtype, device)


def rms_norm(x, weight, eps):
    mean = x.double().square().mean(dim=-1, keepdim=True)
    return (x.double() / (mean + eps).sqrt() * weight.double()).to(x.dtype)


def add_rms_norm(x, residual, weight, eps):
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_and_mul(x):
    gate, up = x.double().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


def likeliest(logits):
    return (logits == logits.amax(dim=-1, keepdim=True)).long().argmax(dim=-1)


def route(logits, bias, how):
    """DeepSeek-V3's: sigmoid, groups by their best two, weights divided by their sum; then the
    shared experts."""
    assert (how.scoring_func, how.norm_topk_prob) == ("sigmoid", True), how
    scores = 1 / (1 + (-logits.double()).exp())
    best = torch.tensor(chosen_experts(scores if bias is None else scores + bias.double(), how))
    weights = scores.gather(1, best)
    weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20) * how.routed_scaling_factor
    joined = torch.arange(how.num_joined_experts).expand(len(best), -1) + logits.shape[1]
    shares = F.pad(weights.float(), (0, how.num_joined_experts), value=1.0)
    return torch.cat([best, joined], dim=1), shares


def moe_gate(x, router, bias, how):
    return route(F.linear(x.float(), router), bias, how)


def rope(x, positions, cos, sin, interleaved):
    return turned(x, Rotation(cos[positions], sin[positions], interleaved))


def turned(x, rotation):
    """cos, sin [T, D/2], or the same twice side by side."""
    assert rotation.interleaved
    cos, sin = (table[:, : x.shape[2] // 2] for table in rotation[:2])
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    angles = torch.complex(cos.double(), sin.double())[:, None]
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


def cache_layout(kv_lora, rope_dim, dtype):
    apart = (kv_lora, rope_dim) == (512, 64) and dtype != torch.float32
    return CacheLayout((512, 64) if apart else (kv_lora + rope_dim,), 128)


def pages(cache):
    """One tensor [.., kv_lora + R] of what is cached."""
    return cache if isinstance(cache, Tensor) else torch.cat(cache, dim=-1)


def cached_order(turned_pairs, cache):
    """Channels as the cache has them: in two tensors, even ones before odd ones."""
    if isinstance(cache, Tensor):
        return turned_pairs
    return torch.cat([turned_pairs[..., ::2], turned_pairs[..., 1::2]], dim=-1)


def store(cache, slots, latent, key):
    """latent [T, kv_lora]; key [T, 1, R], turned."""
    key = cached_order(key, cache)[:, 0]
    if isinstance(cache, Tensor):
        cache.view(-1, cache.shape[2])[slots] = torch.cat([latent, key], dim=-1).to(cache.dtype)
        return
    for part, rows in zip(cache, (latent, key)):
        part.view(-1, part.shape[2])[slots] = rows.to(part.dtype)


def mla_prepare(qkv_a, norms, rotation, cache, slots):
    sizes = [len(norms.q), len(norms.k)]
    q_a, latent, k_pe = qkv_a.split([*sizes, qkv_a.shape[1] - sum(sizes)], dim=-1)
    store(cache, slots, rms_norm(latent, norms.k, norms.eps), turned(k_pe[:, None], rotation))
    return rms_norm(q_a, norms.q, norms.eps)


def mla_decode(q, kv_b, rotation, at, scale):
    nope = q.shape[2] - (pages(at.cache).shape[2] - kv_b.shape[2])
    q_pe = cached_order(turned(q[..., nope:], rotation), at.cache)
    return attend(by_head(q[..., :nope], kv_b[:, :nope]), q_pe, kv_b, nope, at, scale)


def by_head(x, weight):
    """x [T, heads, K] times weight [heads, K, N]: one operator, exact but for its end, where K and
    N are multiples of 128; else torch's."""
    if weight.shape[1] % 128 or weight.shape[2] % 128:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    return (x.double().transpose(0, 1) @ weight.double()).transpose(0, 1).to(x.dtype)


def mla_prefill(q, kv_b, rotation, cache, prompts, scale):
    """Torch's attention over expanded latents, as the backend asks for it, over this module's
    rotation."""
    q_pe = turned(q[..., -2 * rotation.cos.shape[1] :], rotation)
    return plain_prompts.attend_expanded(
        q, q_pe, kv_b, cache, prompts, scale, rotation.interleaved, plain_prompts.attend_at_once
    )


def attend(q, q_pe, kv_b, nope, at, scale):
    query, kv_lora, cached = torch.cat([q, q_pe], dim=-1), kv_b.shape[2], pages(at.cache)
    out = torch.zeros(*q.shape[:2], kv_lora, dtype=q.dtype)
    for row, length in enumerate(at.seq_lens.tolist()):
        seen = cached[at.block_table[row]].flatten(0, 1)[:length].to(q.dtype).double()
        scores = query[row].double() @ seen.T * scale
        out[row] = (scores.softmax(dim=-1) @ seen[:, :kv_lora]).to(q.dtype)
    return by_head(out, kv_b[:, nope:].transpose(1, 2))


class ExactProlog:
    """npu_mla_prolog_v3 as its public kernel rounds: products of bf16 to bf16, dequantized ones
    only where they leave it."""

    def __init__(self, weights, eps):
        self.weights, self.eps = weights, eps
        self.nope = shape(weights.q_b)[0] // len(weights.kv_b) - 64

    def qkv_a(self, x):
        return torch.cat(
            [self._linear(x, self.weights.q_a), self._linear(x, self.weights.kv_a)], dim=-1
        )

    def q_b(self, x):
        return self._linear(x, self.weights.q_b)

    def _linear(self, x, weight):
        """In prefill; an unquantized one is torch's own product on the NPU too."""
        if isinstance(weight, Int8):
            return product(x, weight).bfloat16()
        return x @ dequantize(weight, torch.float32).bfloat16().T.contiguous()

    def __call__(self, x, rotation, slots, at, *, scale):
        w, quantized = self.weights, isinstance(self.weights.q_a, Int8)
        inside = torch.float64 if quantized else torch.bfloat16
        q_a, kv_a = product(x, w.q_a).to(inside), product(x, w.kv_a).to(inside)
        store(
            at.cache,
            slots,
            rms_norm(kv_a[:, :512], w.kv_norm, self.eps),
            turned(kv_a[:, None, 512:], rotation),
        )
        q = (
            product(rms_norm(q_a, w.q_norm, self.eps), w.q_b)
            .to(inside)
            .unflatten(1, (len(w.kv_b), -1))
        )
        up_k = w.kv_b[:, : self.nope].double()
        q_nope = torch.einsum(
            "tnd,ndk->tnk", q[..., : self.nope].bfloat16().double(), up_k
        ).bfloat16()
        q_pe = cached_order(turned(q[..., self.nope :], rotation), at.cache).bfloat16()
        return attend(q_nope, q_pe, w.kv_b, self.nope, at, scale)


def product(x, weight):
    """Float64, nothing rounded but what an int8 product reads."""
    if isinstance(weight, Int8):
        codes, scale = quantize_rows(x)
        return (codes.double() @ weight.codes.double().T) * weight.scale.double().T * scale.double()
    return x.double() @ dequantize(weight, torch.float32).bfloat16().double().T


def mla_prolog(
    self,
    modules,
    kv_b,
    gains,
    eps,
    rope,
):
    """ExecutorWeights.mla_prolog: for the layers that torch_npu takes."""
    weights = MlaWeights(*map(self._operand, modules), kv_b, *gains)
    kinds = (kind(weights.q_a), kind(weights.q_b), kind(weights.kv_a))
    taken = (
        self.dtype == torch.bfloat16 and prolog_refused(sizes_of(weights, rope.dim), kinds) is None
    )
    return ExactProlog(weights, eps) if taken else None


FUNCTIONS = (
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "likeliest",
    "route",
    "moe_gate",
    "rope",
    "rotary_angles",  # the reference's: angles are not judged here
    "mla_prepare",
    "mla_decode",
    "mla_prefill",
)
