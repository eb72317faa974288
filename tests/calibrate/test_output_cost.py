"""The cost of an error in the residual stream is what it is said to be, and so is what it did to the
next token."""

import pytest
import torch
from tiny_models import write
from torch.nn import functional as F

from quantkit.calibrate.embed_and_head import TableEmbedAndHead
from quantkit.calibrate.output_cost import (
    BLOCK_ROWS,
    ResidualStream,
    compare_paths,
    cost_to_next_token,
    cost_to_readers,
)
from quantkit.calibrate.source_model import (
    ParameterReader,
    attend_unit,
    feed_forward_unit,
    units_of,
)
from quantkit.checkpoint.hub import find_model
from quantkit.checkpoint.reader import Checkpoint
from quantkit.models import deepseek_v3
from quantkit.models.stored_parameters import read_model

H, EPS = 8, 1e-6


@pytest.mark.parametrize("rows", [5, 100])
def test_draws_give_the_fisher_information(rows):
    """Against every token of the vocabulary, weighed by its probability, and autograd."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, H, generator=generator, dtype=torch.float64).repeat(3000, 1)
    gain, head = (
        torch.rand(H, generator=generator).double() + 0.5,
        2 * torch.randn(30, H, generator=generator, dtype=torch.float64),
    )
    exact = torch.zeros(H, H, dtype=torch.float64)
    for one in hidden[:2]:
        x = one.clone().requires_grad_()
        logs = (gain * x / (x.square().mean() + EPS).sqrt() @ head.t()).log_softmax(-1)
        for log in logs:
            (g,) = torch.autograd.grad(log, x, retain_graph=True)
            exact += log.detach().exp() * g[:, None] * g
    exact /= exact.trace()
    normed = F.rms_norm(hidden, (H,), gain, EPS).float()
    found = cost_to_next_token(hidden.float(), normed, gain.float(), EPS, head.float().split(rows))
    assert float((found.double() - exact).norm() / exact.norm()) < 0.03


def test_readers_count_alike_whatever_their_size():
    gain, a, b = torch.rand(H) + 0.5, torch.randn(20, H), torch.randn(3, H)
    found = cost_to_readers([(gain, a), (gain, 100 * b)])
    shares = [w * gain / (w * gain).norm() for w in (a, b)]
    torch.testing.assert_close(found, sum(w.t() @ w for w in shares) / 2)
    assert cost_to_readers([]) is None


def test_the_next_two_norms_of_the_model_read():
    checkpoint = Checkpoint.open(find_model("tiny-r1"))
    config = deepseek_v3.Config.from_dict(checkpoint.config)
    rows = deepseek_v3.parameters(config)
    groups = [
        group
        for layer in range(config.num_hidden_layers)
        for group in deepseek_v3.scale_groups(config, layer)
    ]
    units = units_of(rows, groups)
    source = ParameterReader(checkpoint, torch.device("cpu"))
    readers = ResidualStream(source, rows, groups, TableEmbedAndHead(source, rows, config))
    by_module = {
        row.module: source.dequantized(row)
        for row in rows
        if row.layer in (0, 1) and row.expert is None
    }
    head = readers.next_token_cost(torch.randn(50, config.hidden_size), EPS)

    last = feed_forward_unit(config.num_hidden_layers - 1)
    # nobody but the head reads what it writes
    torch.testing.assert_close(readers.cost(units[last], head), head)
    behind = {
        "model.layers.0.post_attention_layernorm": (
            "model.layers.0.mlp.gate_proj",
            "model.layers.0.mlp.up_proj",
        ),
        "model.layers.1.input_layernorm": (
            "model.layers.1.self_attn.q_a_proj",
            "model.layers.1.self_attn.kv_a_proj_with_mqa",
        ),
    }
    expected = cost_to_readers(
        (by_module[norm], by_module[reader])
        for norm, modules in behind.items()
        for reader in modules
    )
    torch.testing.assert_close(readers.cost(units[attend_unit(0)], head), head + expected)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41", "kimi_k3", "qwen4_exp"])
def test_what_is_dear_in_several_streams_moves_the_next_token(name, tmp_path):
    """Errors of one size that are added to every stream, along the dearest half of the directions
    and along the cheapest."""
    checkpoint = Checkpoint.open(write(tmp_path / name, name))
    model, generator = read_model(checkpoint), torch.Generator().manual_seed(1)
    config, source = model.config, ParameterReader(checkpoint, torch.device("cpu"))
    ends = TableEmbedAndHead(source, model.rows, config)
    stream = ResidualStream(source, model.rows, [], ends)
    count, width = config.stream_count, config.stream_count * config.hidden_size
    hidden = ends.embed([torch.arange(10, 300)])
    hidden[:, :width] += 0.3 * torch.randn(len(hidden), width, generator=generator)
    order = torch.linalg.eigh(stream.next_token_cost(hidden, config.rms_norm_eps))[1]
    halves = order.tensor_split(2, dim=1)

    def kl(directions):
        along = torch.randn(len(hidden), directions.shape[1], generator=generator)
        moved = hidden.clone()
        moved[:, :width] += 0.1 * (along @ directions.t()).repeat(1, count)
        before, after = (ends.final_norm(one) for one in (hidden, moved))
        return compare_paths(before, [after], source.blocks(stream.head, BLOCK_ROWS))[0].kl

    cheap, dear = map(kl, halves)
    assert dear > 1.3 * cheap


@pytest.mark.parametrize("rows", [7, 64, 1000])
def test_blocks_give_what_whole_logits_give(rows):
    generator = torch.Generator().manual_seed(0)
    original = 4 * torch.randn(50, 16, generator=generator)
    quantized = original + 0.3 * torch.randn(50, 16, generator=generator)
    head = torch.randn(333, 16, generator=generator)
    p, q = (
        (hidden.double() @ head.double().t()).log_softmax(-1) for hidden in (original, quantized)
    )
    (found,) = compare_paths(original, [quantized], head.split(rows))
    assert found.tokens == 50
    assert found.kl == pytest.approx(
        float(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()), rel=1e-5
    )
    assert found.top1_agree == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert 0 < found.top1_agree < 1
