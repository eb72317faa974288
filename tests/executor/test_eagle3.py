"""A head of EAGLE-3 guesses what its published forward guesses, and changes no token."""

import json
import math

import make_model
import pytest
import torch
from engines import in_place
from guessed_models import MIXED, PROMPTS, QWEN3, load, measured, tokens
from refused import refused
from safetensors.torch import save_file
from tied_model import tied_tensors
from torch.nn import functional as F

from quantkit import SamplingParams
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines.memory import draft_sizes
from quantkit.executor.options import EngineOptions
from quantkit.executor.runner import prefill_graphs
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.runner.runner import Runner
from quantkit.executor.speculation.eagle_head import load_eagle_head
from quantkit.executor.speculation.speculation import Speculation
from quantkit.models.context import CausalContext
from quantkit.models.eagle3 import HeadConfig

TARGET = QWEN3 | {"num_hidden_layers": 8}
HIDDEN, HEADS, DRAFT = 64, 4, 304
HEAD = json.loads("""{
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 320,
    "draft_vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16"}""")


def target_tensors():
    """Layers change little: the next token depends on the last one."""
    small = ("o_proj.weight", "down_proj.weight")
    scales = {"lm_head.weight": 6.0, "model.embed_tokens.weight": 4.0}
    return {
        name: tensor * (0.004 if name.endswith(small) else scales.get(name, 1.0))
        for name, tensor in tied_tensors(TARGET).items()
    }


def random_head(seed=5):
    """Every tensor as it is published, at random."""
    generator = torch.Generator().manual_seed(seed)
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes = {f"{attention}.{side}_proj": (HIDDEN, 2 * HIDDEN) for side in "qkv"}
    shapes |= {f"{attention}.o_proj": (HIDDEN, HIDDEN), "fc": (HIDDEN, 3 * HIDDEN)}
    shapes |= {f"{mlp}.{side}_proj": (96, HIDDEN) for side in ("gate", "up")}
    shapes |= {f"{mlp}.down_proj": (HIDDEN, 96), "lm_head": (DRAFT, HIDDEN)}
    found = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 1.5 / math.sqrt(shape[1])
        for name, shape in shapes.items()
    }
    norms = [
        f"midlayer.{name}"
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    ]
    for name in (*norms, "norm"):
        found[f"{name}.weight"] = 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
    ids = torch.randperm(320, generator=generator)[:DRAFT].sort().values
    mask = torch.zeros(320, dtype=torch.bool).index_fill_(0, ids, True)
    found = {name: tensor.bfloat16() for name, tensor in found.items()}
    return found | {"d2t": ids - torch.arange(DRAFT), "t2d": mask}


def knowing_head():
    """Knows that the next token follows from the last one: attends to the token itself, and has the
    target's norm and head."""
    target, head = target_tensors(), random_head()
    eye, nothing = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    for side, scale in (("q", 3.0), ("k", 3.0), ("v", 1.0)):
        head[f"midlayer.self_attn.{side}_proj.weight"] = torch.cat(
            (scale * eye, nothing), dim=1
        ).bfloat16()
    head["midlayer.self_attn.o_proj.weight"] = (8 * eye).bfloat16()
    head["midlayer.input_layernorm.weight"] = torch.ones(HIDDEN).bfloat16()
    for name in ("midlayer.mlp.down_proj.weight", "fc.weight"):
        head[name] = head[name] * 0.1
    ids = head["d2t"] + torch.arange(DRAFT)
    return head | {
        "norm.weight": target["model.norm.weight"],
        "lm_head.weight": target["lm_head.weight"][ids].contiguous(),
    }


def write_head(path, tensors, **changes):
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(HEAD | changes))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    target = make_model.write_dense(folder / "target", TARGET, target_tensors())
    found = {"target": target, "random": write_head(folder / "random", random_head())}
    for name, head in (("normed", random_head()), ("knowing", knowing_head())):
        found[name] = write_head(folder / name, head, norm_before_residual=True)
    return found


@pytest.fixture(scope="module")
def plain(models):
    return tokens(load(models["target"]), MIXED)


def rms(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def rotated(x):
    """x [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def published_forward(head, embedding, next_ids, depths, *, normed_residual):
    """Logits over the target's tokens, by the definition: llama_eagle3 of SGLang and vLLM. depths
    [T, 3 H]."""
    w = {
        name.removesuffix(".weight").removeprefix("midlayer."): tensor.float()
        for name, tensor in head.items()
    }
    hidden = F.linear(depths, w["fc"])
    x = torch.cat(
        (rms(embedding[next_ids], w["input_layernorm"]), rms(hidden, w["hidden_norm"])), dim=-1
    )
    q, k, v = (
        F.linear(x, w[f"self_attn.{side}_proj"]).unflatten(-1, (HEADS, -1)) for side in "qkv"
    )
    attended = F.scaled_dot_product_attention(
        *(side.transpose(0, 1) for side in (rotated(q), rotated(k), v)), is_causal=True
    )
    hidden = x[:, HIDDEN:] if normed_residual else hidden
    hidden = hidden + F.linear(attended.transpose(0, 1).flatten(1), w["self_attn.o_proj"])
    normed = rms(hidden, w["post_attention_layernorm"])
    hidden = hidden + F.linear(
        F.silu(F.linear(normed, w["mlp.gate_proj"])) * F.linear(normed, w["mlp.up_proj"]),
        w["mlp.down_proj"],
    )
    logits = torch.full((len(hidden), 320), float("-inf"))
    logits[:, torch.arange(DRAFT) + head["d2t"]] = F.linear(rms(hidden, w["norm"]), w["lm_head"])
    return logits


@pytest.mark.parametrize("head", ["random", "normed"])
@torch.inference_mode()
def test_the_first_guess_is_that_of_the_published_forward(models, head):
    """Two prompts, one of them in chunks; layers 2, 4 and 5 of eight are read, as their inputs
    come."""
    engine = load(
        models["target"], models[head], draft_length=1, chunk_tokens=50, max_model_len=256
    )
    tensors, model = random_head(), engine.loaded.model
    assert model.aux_layers == (2, 4, 5)
    for prompt in (PROMPTS[0], PROMPTS[5] * 2):
        sequence = engine.submit(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))
        while not sequence.drafts:
            engine.step()
        ids = torch.tensor(sequence.token_ids)
        context, depths = CausalContext([len(ids) - 1]), []
        hidden = F.embedding(ids[:-1], model.embedding)
        for number, layer in enumerate(model.layers):
            if number in (2, 4, 5):
                depths.append(hidden.float())
            hidden = layer.feed_forward(layer.attend(hidden, context), context)
        embedding, read = model.embedding.float(), torch.cat(depths, dim=-1)
        logits = published_forward(
            tensors, embedding, ids[1:], read, normed_residual=head == "normed"
        )[-1]
        assert logits.max() - logits[sequence.drafts[0]] < 0.03, "the cache is bfloat16"
        engine.cancel(sequence)


def test_tokens_are_those_of_plain_decoding(models, plain):
    """Greedy and sampled, prompts in chunks beside answers, prefixes found, the cache too small, of
    which the head's is planned."""
    options = {"draft_length": 3, "chunk_tokens": 29, "prefix_cache": True}
    engine = load(models["target"], models["knowing"], cache_tokens=320, **options)
    sizes = draft_sizes(Checkpoint.open(models["knowing"]))
    assert sizes.token_bytes == 2 * 2 * HIDDEN
    assert sizes.weight_bytes == sum(tensor.nbytes for tensor in knowing_head().values())
    held = engine.speculation.drafter.steps.cache.nbytes
    assert held == engine.plan.num_blocks * 64 * sizes.token_bytes
    for _ in range(2):
        assert tokens(engine, MIXED) == plain
        assert 0.4 < measured(engine) < 0.99
    rarely = load(models["target"], models["random"], draft_length=3)
    assert tokens(rarely, MIXED[:2], PROMPTS[:2]) == plain[:2]
    assert measured(rarely) < 0.1


def test_further_guesses_read_its_own_output(models, plain, monkeypatch):
    """In static buffers, as graphs have them, its own and the model's, guesses are as good as
    without, and as many right in a row."""
    monkeypatch.setattr(prefill_graphs, "RUNS_BEFORE_CAPTURE", 1)
    eager, static = (load(models["target"], models["knowing"], draft_length=3) for _ in range(2))
    head = load_eagle_head(models["knowing"], static.loaded, EngineOptions(models["target"]))
    static.runner = Runner(static.loaded.model, static.cache, in_place)
    drafter = head.drafter(static.plan, static.runner, 3, static.parallel, in_place)
    static.speculation = Speculation(drafter, 0)
    assert tokens(eager, MIXED) == tokens(static, MIXED) == plain
    assert static.runner.prefill_runner._graphs
    assert isinstance(drafter.steps, DecodeSteps)
    right = eager.speculation.controller.rates["drafter"].accepted
    assert right[2] > 3
    assert static.speculation.controller.rates["drafter"].accepted == right


def test_its_config_is_read(models):
    assert HeadConfig.from_dict(HEAD).aux_layers(36) == (2, 18, 33)
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}
    assert HeadConfig.from_dict(HEAD | layers).aux_layers(36) == (1, 17, 32), "inputs of layers"
    assert HeadConfig.from_dict(HEAD | {"eagle_config": layers}).aux_layers(36) == (2, 18, 33), (
        "outputs of layers"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 2}, "one layer"),
        ({"target_hidden_size": 128}, "reads hidden states of 128, the model's have 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "reads layers .* the model has 8"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "another head"),
        ({"draft_vocab_size": 305}, "lm_head"),
    ],
)
def test_another_models_head_is_refused(models, tmp_path, changes, told):
    with refused(told):
        load(models["target"], write_head(tmp_path / "head", random_head(), **changes))
