# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
"""Which experts a token goes to: the group-limited choice of the best. A program per token;
arithmetic is float32."""

import triton
import triton.language as tl

from quantkit_kernels.triton.weights_kernel import wait_for_input


@triton.jit
def scored(logit, SCORING: tl.constexpr):
    """The experts' scores: softmax, sigmoid, or the square root of softplus."""
    if SCORING == 1:
        score = 1.0 / (1.0 + tl.exp(-logit))
    elif SCORING == 2:
        score = tl.sqrt(softplus(logit))
    else:
        power = tl.exp(logit - tl.max(logit, 0))
        score = power / tl.sum(power, 0)
    return score


@triton.jit
def softplus(x):
    """log(1 + e^x), as exact where x is far below 0: there it is e^x (1 - e^x / 2)."""
    power = tl.exp(-tl.abs(x))
    small = tl.where(power < 1e-3, power * (1.0 - 0.5 * power), tl.log(1.0 + power))
    return tl.maximum(x, 0.0) + small


@triton.jit
def weigh(
    logits, ids, weights, experts, factor,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, SCORING: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights of experts that were chosen otherwise."""
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    number, column = tl.arange(0, EXPERTS), tl.arange(0, COLUMNS)
    logit = tl.load(logits + token * experts + number, mask=number < experts, other=float("-inf"))
    score = scored(logit.to(tl.float32), SCORING)
    chosen = tl.load(ids + token * TOP_K + column, mask=column < TOP_K, other=0).to(tl.int32)
    weight = tl.where(column < TOP_K, tl.gather(score, chosen, 0), 0.0)
    if NORMED:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + token * TOP_K + column, weight * factor, mask=column < TOP_K)


@triton.jit
def route(
    logits, bias, ids, weights, experts, factor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOPK_GROUP: tl.constexpr, TOP_K: tl.constexpr,
    JOINED: tl.constexpr, COLUMNS: tl.constexpr,
    SCORING: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """EXPERTS, COLUMNS: powers of two, at least the experts and the columns; with fewer than all
    groups, exactly the experts. GATED: a token has one more logit, of the joined expert's gate.

    Among equals the lower number is better.
    """
    wait_for_input(PDL)
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, EXPERTS)
    inside = number < experts
    logits += token * (experts + GATED)
    logit = tl.load(logits + number, mask=inside, other=float("-inf")).to(tl.float32)
    score = scored(logit, SCORING)
    wanted = score
    if BIASED:
        wanted += tl.load(bias + number, mask=inside, other=0.0)
    wanted = tl.where(inside, wanted, float("-inf"))
    if TOPK_GROUP < GROUPS:
        of_group = tl.reshape(wanted, (GROUPS, EXPERTS // GROUPS))
        place = tl.arange(0, EXPERTS // GROUPS)
        best = tl.max(of_group, 1)
        at = tl.argmax(of_group, 1, tie_break_left=True)
        both = best + tl.max(tl.where(place[None, :] == at[:, None], float("-inf"), of_group), 1)
        group = tl.arange(0, GROUPS)
        across = tl.sum(
            tl.where(group[:, None] == group[None, :], both[:, None], 0.0), 0
        )  # both, along the other dimension
        better = (across[None, :] > both[:, None]) | (
            (across[None, :] == both[:, None]) & (group[None, :] < group[:, None])
        )
        kept = tl.sum(better.to(tl.int32), 1) < TOPK_GROUP
        wanted = tl.reshape(tl.where(kept[:, None], of_group, float("-inf")), (EXPERTS,))
    column = tl.arange(0, COLUMNS)
    # Numbers in the order of floats, and below them those of experts, so that the largest is the
    # best and among equals the first.
    bits = wanted.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = ordered * 65536 + (65535 - number).to(tl.int64)
    chosen = tl.where(column >= TOP_K, experts + column - TOP_K, 0)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
        chosen = tl.where(column == i, 65535 - (best & 65535).to(tl.int32), chosen)
    weight = tl.where(column < TOP_K, tl.gather(score, tl.minimum(chosen, EXPERTS - 1), 0), 0.0)
    if NORMED:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    joined = 1.0
    if GATED:
        joined = tl.sigmoid(tl.load(logits + experts).to(tl.float32))
    weight = tl.where(column < TOP_K, weight * factor, joined)
    to = token * (TOP_K + JOINED) + column
    tl.store(ids + to, chosen.to(tl.int64), mask=column < TOP_K + JOINED)
    tl.store(weights + to, weight, mask=column < TOP_K + JOINED)
