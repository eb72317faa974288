"""Which experts each token goes to: the rule as one value, and the operators that follow it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_kernels import backends
from quantkit_kernels.arguments import FLOAT_DTYPES, check_tensor, require

SCORINGS = ("sigmoid", "softmax", "sqrtsoftplus")


@dataclass(frozen=True)
class Routing:
    """How a token chooses its experts. The names are those of DeepSeek's config.json; Mixtral's and
    Qwen3-MoE's routers fit as well.

    The score of an expert is the sigmoid of its logit, the square root of its softplus, or the
    softmax over all experts. Experts
    come in n_group groups of n_routed_experts / n_group. A group's score is the sum of its best two
    experts' scores; only the best topk_group groups stay, and among their experts the best
    num_experts_per_tok are chosen. An expert's weight is its score, divided by the sum of the
    chosen ones' scores (+ 1e-20) with norm_topk_prob, times routed_scaling_factor.

    num_joined_experts: shared experts that are stored after the routed ones, as numbers
    n_routed_experts, n_routed_experts + 1, ... Every token goes to them too, with weight 1; with
    joined_gate to the only one with the sigmoid of a logit of its own, the last.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    num_joined_experts: int = 0
    joined_gate: bool = False

    @property
    def columns(self) -> int:
        """Experts that a token goes to, those that all tokens go to included."""
        return self.num_experts_per_tok + self.num_joined_experts

    @property
    def num_logits(self) -> int:
        """Logits of a token: of the routed experts, then of the gate."""
        return self.n_routed_experts + self.joined_gate

    @property
    def is_common(self) -> bool:
        """Whether every backend's `route` follows this rule; others than the reference and Triton
        leave them another one."""
        return self.scoring_func != "sqrtsoftplus" and not self.joined_gate


def route(
    logits: Tensor, bias: Tensor | None, routing: Routing, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Choose by the router's logits.

    logits float [T, num_logits]; bias float32 [n_routed_experts] or None (e_score_correction_bias):
    it is added to the scores for the choice, and is no part of the weights. Returns topk_ids int32
    or int64 [T, columns], as the backend finds them, and topk_weights float32 [T, columns], the
    best choice first, joined experts last.
    """
    check_tensor("logits", logits, (None, routing.num_logits), FLOAT_DTYPES)
    _check(routing, bias)
    ids, weights = backends.find("route", backend, logits.device).route(logits, bias, routing)
    return ids, weights


def route_chosen(logits: Tensor, ids: Tensor, routing: Routing, *, backend: str = "auto") -> Tensor:
    """Weights float32 [T, k] of experts that were chosen otherwise, ids int64 [T, k], with logits
    float [T, n_routed_experts]."""
    check_tensor("logits", logits, (None, routing.n_routed_experts), FLOAT_DTYPES)
    _check(routing, None)
    check_tensor("ids", ids, (len(logits), routing.num_experts_per_tok), (torch.int64,))
    found = backends.find("route_chosen", backend, logits.device)
    result: Tensor = found.route_chosen(logits, ids, routing)
    return result


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`route` by the logits x @ router.T. x float [T, H]; router float32 [num_logits, H]; the product
    is float32."""
    check_tensor("x", x, (None, None), FLOAT_DTYPES)
    check_tensor("router", router, (routing.num_logits, x.shape[1]), (torch.float32,))
    _check(routing, bias)
    ids, weights = backends.find("moe_gate", backend, x.device).moe_gate(x, router, bias, routing)
    return ids, weights


def _check(r: Routing, bias: Tensor | None) -> None:
    experts = r.n_routed_experts
    if bias is not None:
        check_tensor("bias", bias, (experts,), (torch.float32,))
    require(
        r.scoring_func in SCORINGS,
        f"scoring_func: {r.scoring_func!r}, expected {' or '.join(SCORINGS)}",
    )
    require(
        r.n_group >= 1 and experts % r.n_group == 0,
        f"n_group: {experts} experts do not split into {r.n_group} groups",
    )
    require(1 <= r.topk_group <= r.n_group, f"topk_group: {r.topk_group}, expected 1..{r.n_group}")
    require(
        r.n_group == 1 or experts // r.n_group >= 2,
        f"n_group: groups of {experts // r.n_group} expert, expected at least 2",
    )
    kept, k = experts // r.n_group * r.topk_group, r.num_experts_per_tok
    require(
        1 <= k <= kept,
        f"num_experts_per_tok: {k}, expected 1..{kept} (the experts of {r.topk_group} of "
        f"{r.n_group} groups)",
    )
    require(
        r.num_joined_experts >= 0,
        f"num_joined_experts: {r.num_joined_experts}, expected at least 0",
    )
    require(
        not r.joined_gate or r.num_joined_experts == 1,
        f"joined_gate: of one joined expert, not of {r.num_joined_experts}",
    )
