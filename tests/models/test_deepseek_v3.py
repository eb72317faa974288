"""The forward against transformers, and the parameter table against a checkpoint written by
hand."""

import make_model
import torch
from stated_logits import check_logits
from torch.nn.functional import embedding, linear, rms_norm
from transformers import AutoModelForCausalLM

from quantkit.executor.weights.load import load_model
from quantkit.models import deepseek_v3
from quantkit.models.context import CausalContext

CONFIG = make_model.tiny_config()
TENSORS = {name: one.float() for name, one in make_model.random_tensors(CONFIG).items()}
PROMPTS = [list(range(7, 60)), [5, 5, 5], list(range(300, 100, -3))]
IDS = [token for prompt in PROMPTS for token in prompt]


def test_logits_equal_transformers(tiny_dense_checkpoint):
    """Interleaved yarn rope, group-limited routing with biases, shared expert: all sequences of a
    flat batch at once. As engines load it, too: linears fused, the shared expert one of the others."""
    peer = AutoModelForCausalLM.from_pretrained(tiny_dense_checkpoint, dtype=torch.float32)
    lengths, token_ids = [*map(len, PROMPTS)], torch.tensor(IDS)
    _, _, logits = check_logits(peer, CONFIG, TENSORS, lengths, token_ids)
    model = load_model(tiny_dense_checkpoint, device="cpu", dtype="float32").model
    with torch.inference_mode():
        found = model.logits(model(token_ids, CausalContext(lengths)))
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-4)


def test_parameters_are_the_tensors_of_the_checkpoint():
    rows, shapes = (
        deepseek_v3.parameters(deepseek_v3.Config.from_dict(CONFIG)),
        make_model.tensor_shapes(CONFIG),
    )
    assert {row.name: row.shape for row in rows} == shapes
    assert len({row.name for row in rows}) == len(rows)
    assert {row.name for row in rows if row.role in ("linear", "kv_b")} == {
        name for name in shapes if make_model.is_fp8(name)
    }


def test_mtp_layer_predicts_from_hidden_and_next_token(tiny_dense_checkpoint):
    """Written out: the decoder layer over eh_proj([enorm(embed(next)), hnorm(hidden)]), its own
    norm and head."""
    loaded = load_model(tiny_dense_checkpoint, device="cpu", dtype="float32")
    prompt = torch.tensor(PROMPTS[0])
    p, eps = "model.layers.3", 1e-6
    with torch.inference_mode():
        mtp = deepseek_v3.MtpLayer(loaded.config, loaded.weights)
        hidden = loaded.model(prompt, CausalContext([len(prompt)]))[:-1]
        context = CausalContext([len(prompt) - 1])
        ours = mtp.logits(mtp(prompt[1:], hidden, context))
        embedded = embedding(prompt[1:], TENSORS[f"{p}.embed_tokens.weight"])
        parts = [
            rms_norm(x, (256,), TENSORS[f"{p}.{name}.weight"], eps)
            for x, name in ((embedded, "enorm"), (hidden, "hnorm"))
        ]
        attended = mtp.block.attend(
            linear(torch.cat(parts, dim=-1), TENSORS[f"{p}.eh_proj.weight"]), context
        )
        block = mtp.block.feed_forward(attended, context)
        expected = linear(
            rms_norm(block, (256,), TENSORS[f"{p}.shared_head.norm.weight"], eps),
            TENSORS[f"{p}.shared_head.head.weight"],
        )
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
