"""The interface through which a model's forward accesses its weights.

The executor implements it with prepared kernels, calibration with observed full-precision linears
and experts streamed one at a time. So one forward serves both, and no forward knows about files,
schemes or devices.
"""

from collections.abc import Callable
from typing import Any, Protocol

from quantkit_kernels import SILU, Gating, UnsummedPairs
from torch import Tensor

from quantkit.models.rope import Rope

LinearOp = Callable[[Tensor], Tensor]
"""x [..., K] -> [..., N] in x's dtype."""

ExpertsOp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, H], topk_ids [T, k] int32 or int64, topk_weights [T, k] float32 -> weighted sum over the
chosen experts [T, H] in x's dtype."""


class PrologOp(Protocol):
    """Latent attention of a decode step from the layer's normed input on as one operator, and its
    first linears for passes that need keys and values."""

    def __call__(self, x: Tensor, *where: Any, **how: Any) -> Tensor:
        """As `quantkit_kernels.MlaProlog`."""

    def qkv_a(self, x: Tensor) -> Tensor: ...

    def q_b(self, x: Tensor) -> Tensor: ...


class NgramTable(Protocol):
    """A table of which rows are read as they are needed (ngram_table.py)."""

    def classes(self) -> Tensor:
        """int64 [tokens]: the class of each token (tokenizer/token_classes.py)."""

    def rows(self, numbers: Tensor) -> Tensor:
        """numbers int64 [n] -> float32 [n, D], on the host."""


class Weights(Protocol):
    def tensor(self, name: str) -> Tensor:
        """A tensor used directly (norm gain, bias, embedding, router) in the compute dtype; router
        tensors in float32."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor, for optional parts such as a router bias."""

    def input_rotation(self, module: str) -> int:
        """Rows of the block Hadamard matrix by which what this linear reads is to be multiplied
        (`quantkit_kernels.block_hadamard`), as the checkpoint says; 0 for none."""

    def linear(self, module: str) -> LinearOp:
        """The linear called `module`; under tensor parallelism this rank's shard."""

    def fused_linear(self, modules: tuple[str, ...]) -> LinearOp:
        """Linears with the same input as one operator; outputs are concatenated in the given
        order."""

    def mla_prolog(
        self,
        modules: tuple[str, str, str],
        kv_b: Tensor,
        gains: tuple[Tensor, Tensor],
        eps: float,
        rope: Rope,
    ) -> PrologOp | None:
        """The linears q_a, q_b and kv_a of one latent attention as one operator of a decode step;
        None where there is no such operator.

        kv_b [heads, nope + v, kv_lora]; gains of the norms after q_a and of the latent.
        """

    def dequantized(self, module: str) -> Tensor:
        """The weight [N, K] of a linear in the compute dtype, dequantized."""

    def ngram_table(self, module: str) -> NgramTable:
        """The table `module`, which stays in its file."""

    def experts(self, prefix: str, num_experts: int, gating: Gating = SILU) -> ExpertsOp:
        """The routed experts `prefix`.0 .. `prefix`.{num_experts-1}: gated MLPs, whose linears and
        biases the model's table names."""

    def experts_with_shared(self, prefix: str, num_experts: int, shared: str) -> ExpertsOp | None:
        """As `experts`, with the shared expert `shared` as number `num_experts`; None where they
        are better run separately."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of the ranks' partial outputs; x itself on one device."""

    def add_rms_norm(
        self, x: Tensor | UnsummedPairs, residual: Tensor, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`quantkit_kernels.add_rms_norm` of `all_reduce(x)`; x may be unsummed outputs of these
        experts."""
