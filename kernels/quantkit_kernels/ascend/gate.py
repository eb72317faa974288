"""The router and its choice: of few tokens the product in one launch, and whatever follows
npu_moe_gating_top_k in one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit_kernels import reference
from quantkit_kernels.ascend import launch
from quantkit_kernels.ascend.chip import FEW_TOKENS, ROUTER_TILE
from quantkit_kernels.routing import Routing
from quantkit_kernels.torch_npu.functional import choose
from quantkit_kernels.torch_npu.rule import HALVES


def moe_gate(
    x: Tensor, router: Tensor, bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    return route(_logits(x, router), bias, routing)


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """As torch_npu's, the joined experts' columns added in one launch."""
    if not routing.is_common:
        return reference.route(logits, bias, routing)
    ids, weights = choose(logits, bias, routing)
    if not routing.num_joined_experts:
        return ids, weights
    joined_ids = torch.empty(len(ids), routing.columns, dtype=torch.int32, device=ids.device)
    joined_weights = torch.empty(len(ids), routing.columns, dtype=torch.float32, device=ids.device)
    if len(ids):
        launch.run(
            launch.join(
                ids.to(torch.int32), weights, joined_ids, joined_weights, routing.n_routed_experts
            )
        )
    return joined_ids, joined_weights


def _logits(x: Tensor, router: Tensor) -> Tensor:
    if not 0 < len(x) <= FEW_TOKENS or x.dtype not in HALVES or x.shape[1] % ROUTER_TILE[1]:
        return F.linear(x.float(), router)
    out = torch.empty(len(x), len(router), dtype=torch.float32, device=x.device)
    launch.run(launch.router(x.contiguous(), router, out))
    return out
