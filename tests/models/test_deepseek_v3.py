"""The forward against transformers, and the parameter table against a checkpoint written by
hand."""

import make_model
import pytest
import torch
from quantkit_kernels import rms_norm
from ulp_bound import assert_near, movement

from quantkit.executor.weights.load import load_model
from quantkit.models import deepseek_v3
from quantkit.models.context import CausalContext

PROMPTS = [list(range(7, 60)), [5, 5, 5], list(range(300, 100, -3))]


def our_logits(loaded, prompts):
    with torch.inference_mode():
        hidden = loaded.model(
            torch.tensor([token for prompt in prompts for token in prompt]),
            CausalContext([len(prompt) for prompt in prompts]),
        )
        return loaded.model.logits(hidden)


@pytest.fixture(scope="module")
def loaded(tiny_dense_checkpoint):
    return load_model(tiny_dense_checkpoint, device="cpu", dtype="float32")


def test_logits_equal_transformers(tiny_dense_checkpoint, loaded):
    """Interleaved yarn rope, group-limited routing with biases, shared expert: all sequences of a
    flat batch at once."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(tiny_dense_checkpoint, dtype=torch.float32)

    def stated():
        return torch.cat([peer(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])

    with torch.no_grad():
        expected, moved = stated(), movement(stated, peer.parameters())
    assert expected.std() > 0.3, "the logits say nothing"
    assert_near(our_logits(loaded, PROMPTS), expected, moved)


def test_routing_uses_bias_and_groups(loaded):
    """The test above would also pass if the biases did nothing: here they change the result."""
    before = our_logits(loaded, PROMPTS)
    mlp = loaded.model.layers[1].mlp
    bias = mlp.bias
    mlp.bias = torch.zeros_like(bias)
    after = our_logits(loaded, PROMPTS)
    mlp.bias = bias
    assert (after - before).abs().max() > 1e-2


def test_fp8_checkpoint_computes_its_decoded_values(tiny_checkpoint, tmp_path):
    config = make_model.tiny_config()
    values = make_model.fp8_values(make_model.random_tensors(config))
    decoded = make_model.write_dense(
        tmp_path / "decoded", config, {name: value.float() for name, value in values.items()}
    )
    ours = our_logits(load_model(tiny_checkpoint, device="cpu", dtype="float32"), PROMPTS)
    expected = our_logits(load_model(decoded, device="cpu", dtype="float32"), PROMPTS)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_parameters_are_the_tensors_of_the_checkpoint():
    config = make_model.tiny_config()
    rows = deepseek_v3.parameters(deepseek_v3.Config.from_dict(config))
    assert {row.name: row.shape for row in rows} == make_model.tensor_shapes(config)
    assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in rows if row.role in ("linear", "kv_b")} == {
        n for n in make_model.tensor_shapes(config) if make_model.is_fp8(n)
    }


def test_a_layer_is_its_two_halves(loaded):
    """What the stack computes in fused steps is what calibration walks, to the bit."""
    hidden = torch.randn(7, loaded.config.hidden_size, generator=torch.Generator().manual_seed(0))
    gain = torch.rand(loaded.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for layer in loaded.model.layers[:2]:
            context = CausalContext([7])
            halves = layer.feed_forward(layer.attend(hidden, context), context)
            normed, residual = layer(
                rms_norm(hidden, layer.input_norm, layer.eps), hidden, CausalContext([7]), gain
            )
            assert torch.equal(residual, halves)
            assert torch.equal(normed, rms_norm(halves, gain, layer.eps))


def test_mtp_layer_predicts_from_hidden_and_next_token(loaded):
    """Written out: the decoder layer over eh_proj([enorm(embed(next)), hnorm(hidden)]), its own
    norm and head."""
    from torch.nn.functional import embedding, linear, rms_norm

    tensors = {
        name: tensor.float()
        for name, tensor in make_model.random_tensors(make_model.tiny_config()).items()
    }
    prompt = torch.tensor(PROMPTS[0])
    p, eps = "model.layers.3", 1e-6
    with torch.inference_mode():
        mtp = deepseek_v3.MtpLayer(loaded.config, loaded.weights)
        hidden = loaded.model(prompt, CausalContext([len(prompt)]))[:-1]
        context = CausalContext([len(prompt) - 1])
        ours = mtp.logits(mtp(prompt[1:], hidden, context))
        embedded = embedding(prompt[1:], tensors[f"{p}.embed_tokens.weight"])
        parts = [
            rms_norm(x, (256,), tensors[f"{p}.{name}.weight"], eps)
            for x, name in ((embedded, "enorm"), (hidden, "hnorm"))
        ]
        attended = mtp.block.attend(
            linear(torch.cat(parts, dim=-1), tensors[f"{p}.eh_proj.weight"]), context
        )
        block = mtp.block.feed_forward(attended, context)
        expected = linear(
            rms_norm(block, (256,), tensors[f"{p}.shared_head.norm.weight"], eps),
            tensors[f"{p}.shared_head.head.weight"],
        )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
