"""A double of the Ascend Triton kernels: what each launch writes, in float64 from the packed tiles
themselves, rounded where it is stored.

`installed()` is a context: within it backend ascend runs on the CPU, beside the double of
torch_npu. A launch is one operator of torch, so that whoever counts operators counts launches.
tests/ascend/lowered executes the kernels' own IR.
"""

import contextlib

import torch
from ascend import npu_double
from quantkit_kernels import ascend, backends
from quantkit_kernels.ascend import chip, launch
from quantkit_kernels.ascend.layout import FP4_RESCALE, unpack_nibbles
from quantkit_kernels.linear import quantize_rows
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


@contextlib.contextmanager
def installed():
    """Yields the list to which each launch adds its kernel's name."""
    library = torch.library.Library("ascend_double", "DEF")
    called = []
    plain, refused = launch.run, ascend.unusable
    by_number = []

    def compute(operands, number):
        one = by_number[number]
        called.append(one.kernel)
        RESULTS[one.kernel.partition("_")[2] or one.kernel](one)

    library.define("launch(Tensor[] operands, int number) -> ()")
    library.impl("launch", compute, "CPU")

    def run(one):
        check(one)
        by_number.append(one)
        torch.ops.ascend_double.launch(
            [arg for arg in one.args if isinstance(arg, Tensor)], len(by_number) - 1
        )

    launch.run = run
    ascend.unusable = lambda operator, device, dtype, shapes: next(
        (
            reason
            for reason in (ascend.refused(operator, dtype, shape) for shape in shapes or (None,))
            if reason
        ),
        None,
    )
    backends.forget()
    try:
        with npu_double.installed():
            yield called
    finally:
        library._destroy()
        launch.run, ascend.unusable = plain, refused
        backends.forget()


def check(one):
    """What every launch keeps to: something to do, operands in one piece, whole numbers of 32 bits
    but for counts."""
    operands = [arg for arg in one.args if isinstance(arg, Tensor)]
    assert one.programs > 0, one.kernel
    assert all(arg.is_contiguous() for arg in operands), f"{one.kernel} reads runs"
    assert sum(arg.dtype == torch.int64 for arg in operands) == (one.kernel == "assign"), one.kernel


def _columns(tiles, n):
    """[tiles, X, BN] -> [n, X]."""
    return tiles.transpose(1, 2).flatten(0, 1)[:n]


def weight_of(kind, tensors, expert, n, group, has_zero):
    """Of one expert W[n, k], float64, and of int8 its codes beside the scale of each row; else a
    scale of ones."""
    codes, scale, *rest = (one[expert] for one in tensors)
    ones = torch.ones(n, dtype=torch.float64)
    if kind == "int8":
        return _columns(codes.flatten(1, 2), n).double(), scale.flatten()[:n].double()
    nibbles = unpack_nibbles(codes, n).long()
    if kind == "int4":
        zero = _columns(rest[0], n).double() if has_zero else torch.zeros(1, 1, dtype=torch.float64)
        groups = ((nibbles ^ 8) - 8).double().unflatten(1, (-1, group)) - zero.unsqueeze(-1)
        return (groups * _columns(scale, n).double().unsqueeze(-1)).flatten(1), ones
    values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    scales = _columns(scale, n).contiguous().view(torch.float8_e4m3fn).double()
    row = rest[0].flatten()[:n].double() / FP4_RESCALE
    return (values.unflatten(1, (-1, 16)) * scales.unsqueeze(-1)).flatten(1) * row.unsqueeze(
        -1
    ), ones


class Packed:
    """The operands of a launch over packed tiles, by name."""

    def __init__(self, one, leading, trailing):
        self.kind = one.kernel.partition("_")[0]
        tensors = [arg for arg in one.args if isinstance(arg, Tensor)]
        self.leading, self.tensors, self.trailing = (
            tensors[:leading],
            tuple(tensors[leading:-trailing]),
            tensors[-trailing:],
        )
        self.numbers = [arg for arg in one.args if isinstance(arg, int)]
        self.group, self.has_zero = (
            one.constants.get("GROUP", 0),
            one.constants.get("HAS_ZERO", False),
        )

    def times(self, x, expert, n):
        """x [M, k], float or codes, by W[expert].T: float64 [M, n]."""
        weight, scale = weight_of(self.kind, self.tensors, expert, n, self.group, self.has_zero)
        return x.double() @ weight.T * scale

    def quantized_times(self, x, expert, n):
        if self.kind != "int8":
            return self.times(x, expert, n)
        codes, scale = quantize_rows(x)
        return self.times(codes, expert, n) * scale.double()


def _rows(one):
    p = Packed(one, 1, 2)
    (x,), (experts, out) = p.leading, p.trailing
    assert p.numbers[0] == len(out) * p.tensors[0].shape[1]
    for row, expert in enumerate(experts.tolist()):
        out[row] = p.times(x[row : row + 1], expert, p.numbers[1])[0].to(out.dtype)


def _gate_up(one):
    p = Packed(one, 1, 2)
    (x,), (experts, out), (items, n, *_, top_k) = p.leading, p.trailing, p.numbers
    assert items == len(out) * p.tensors[0].shape[1] // 2
    for row, expert in enumerate(experts.tolist()):
        gate, up = p.quantized_times(x[row // top_k][None], expert, n)[0].chunk(2)
        out[row] = (gate / (1 + (-gate).exp()) * up).to(out.dtype)


def _down(one):
    p = Packed(one, 1, 3)
    (x,), (experts, weights, out), (items, n, *_, top_k) = p.leading, p.trailing, p.numbers
    assert items == len(out) * p.tensors[0].shape[1]
    products = torch.stack(
        [
            p.quantized_times(x[row][None], expert, n)[0]
            for row, expert in enumerate(experts.tolist())
        ]
    )
    out.copy_((products * weights.double().unsqueeze(1)).unflatten(0, (-1, top_k)).sum(dim=1))


def _blocks(one):
    p = Packed(one, 2 if one.kernel.startswith("int8") else 1, 4)
    x, (experts, first, last, out) = p.leading[0], p.trailing
    assert one.constants.get("BK", chip.SPAN) == chip.SPAN, (
        "the tile that fits, as the weight is laid out"
    )
    for expert, start, end in zip(experts.tolist(), first.tolist(), last.tolist()):
        if expert >= 0:
            assert start < end <= start + one.constants["BM"], (start, end)
            product = p.times(x[start:end], expert, p.numbers[1])
            out[start:end] = (
                product * p.leading[1][start:end].double().unsqueeze(1)
                if len(p.leading) > 1
                else product
            ).to(out.dtype)


def _assign(one):
    counts, experts, first, last, *_ = one.args
    ends = counts.cumsum(0).tolist()
    found = [
        (expert, row, min(row + one.constants["BM"], end))
        for expert, (start, end) in enumerate(zip([0, *ends], ends))
        for row in range(start, end, one.constants["BM"])
    ]
    experts.fill_(-1)
    for values, into in zip(zip(*found), (experts, first, last)):
        into[: len(found)] = torch.tensor(values, dtype=torch.int32)


def _router(one):
    x, weight, out, items, *sizes = one.args
    assert items == len(x) * -(-len(weight) // one.constants["BN"])
    assert sizes[1] % one.constants["BK"] == 0
    out.copy_(x.double() @ weight.double().T)


def _join(one):
    ids, weights, joined_ids, joined_weights, tokens, top_k, columns, first = one.args
    assert joined_ids.shape == (tokens, columns)
    assert {ids.dtype, joined_ids.dtype} == {torch.int32}
    width = one.constants["BK"]
    assert columns <= width == 1 << (width - 1).bit_length(), "Triton's ranges are powers of two"
    joined_ids.copy_(
        torch.cat(
            [ids, torch.arange(first, first + columns - top_k).int().expand(len(ids), -1)], dim=1
        )
    )
    joined_weights.copy_(torch.nn.functional.pad(weights, (0, columns - top_k), value=1.0))


RESULTS = {
    "rows": _rows,
    "gate_up": _gate_up,
    "down": _down,
    "blocks": _blocks,
    "assign": _assign,
    "router": _router,
    "join": _join,
}
