"""DeepSeek-V4.1 against a statement of the release's public code (inference/model.py and engram.py)
in float32, token by token, for transformers has no such model; and in the layout of the release."""

import json
import math
from functools import partial

import make_model
import numpy as np
import plain_weights
import pytest
import torch
from block_heads import MODELS, block_after, write_with_head
from engines import capture, load, note, tokens
from quantized import quantized, stop_when
from refused import refused
from releases import check_read, fp4, fp8, packed
from small_recipe import SMALL
from stated_logits import Statement, check_logits, opened
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, random_tensors, rows_of, write
from torch.nn import functional as F

from quantkit import SamplingParams
from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import Shards
from quantkit.common.errors import Interrupted
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.models import find_architecture, find_block_head
from quantkit.models.context import CausalContext
from quantkit.models.hyper_connections import unpack_streams
from quantkit.models.ngram_table import StoredNgramTable

CASES = TABLES["deepseek_v41_cases"]
LENGTHS = [40, 7, 1]
"""Texts with more entries than are selected, and than their best blocks hold; fewer; none."""
TOKEN_IDS = torch.randint(1, 211, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
CLASSES = torch.arange(320) * 7 % 300


def primes_from(start, used):
    while start in used or any(start % one == 0 for one in range(2, start)):
        start += 1
    used.append(start)
    return start


def rotated(x, positions, theta, dim, scaling=None, back=False):
    """The last `dim` channels of x [T, ..., D] as complex pairs."""
    freqs = 1 / theta ** (torch.arange(0, dim, 2).double() / dim)
    if scaling:
        old = scaling["original_max_position_embeddings"]
        at = [
            dim * math.log(old / (2 * math.pi * scaling[beta])) / (2 * math.log(theta))
            for beta in ("beta_fast", "beta_slow")
        ]
        low, high = max(math.floor(at[0]), 0), min(math.ceil(at[1]), dim - 1)
        ramp = ((torch.arange(dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        freqs = freqs / scaling["factor"] * ramp + freqs * (1 - ramp)
    angles = torch.outer(positions, freqs) * (-1 if back else 1)
    turn = torch.polar(torch.ones_like(angles), angles)
    turn = turn.unflatten(0, (len(x), *[1] * (x.dim() - 2)))
    pairs = torch.view_as_complex(x[..., -dim:].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-dim], turned), dim=-1)


class Stated(Statement):
    """One text; every matrix spelled out, and what a token sees as a mask."""

    pairs = ("embed", "head")

    def __init__(self, config_dict, tensors):
        self.c, self.t = config_dict["text_config"], tensors

    def linear(self, x, name):
        return x @ self.t[f"{name}.weight"].T

    def normed(self, x, name):
        return F.rms_norm(x, x.shape[-1:], None, self.c["rms_norm_eps"]) * self.t[f"{name}.weight"]

    def merged(self, h, pre, p):
        return (pre[..., None] * h).sum(1)

    def heads(self, q):
        return q

    def turned(self, x, positions, layer, back=False):
        c = self.c
        compressed = c["compress_ratios"][layer] > 0
        theta = c["compress_rope_theta"] if compressed else c["rope_theta"]
        scaling = c.get("rope_scaling") if compressed else None
        return rotated(x, positions, theta, c["qk_rope_head_dim"], scaling, back)

    def streams(self, ids):
        """Of the tokens, and the weights with which the first sublayer reads them."""
        pre = torch.zeros(len(ids), self.c["hc_mult"])
        pre[:, 0] = 1
        return self.t["embed.weight"][ids][:, None].repeat(1, self.c["hc_mult"], 1), pre

    def logits(self, ids):
        c, (h, pre) = self.c, self.streams(ids)
        self.read = []
        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                h = self.with_engram(h, ids, layer)
            if layer in c["dspark_target_layer_ids"]:
                self.read.append(h.mean(1))
            attention, chosen = partial(self.attention, layer=layer), c["num_experts_per_tok"]
            h, pre = self.block(h, pre, f"layers.{layer}", chosen, attention)
        return self.linear(self.normed((pre[..., None] * h).sum(1), "norm"), "head")

    def block(self, h, pre, p, chosen, attention):
        for part in ("attn", "ffn"):
            after, post, comb = self.mixes(h, f"{p}.hc_{part}")
            x = self.normed((pre[..., None] * h).sum(1), f"{p}.{part}_norm")
            out = attention(x) if part == "attn" else self.experts(x, f"{p}.ffn", chosen)
            h = post[..., None] * out[:, None] + torch.einsum("tij,tid->tjd", comb, h)
            pre = after
        return h, pre

    def drafted(self, ids, newest):
        """Logits of the block after the text `ids` and the token `newest`, and of pairs."""
        self.logits(ids)
        return self.of_head(torch.cat(self.read, dim=1), newest)

    def of_head(self, read, newest):
        """read [T, targets H] of the main model."""
        c = self.c
        main = self.normed(self.linear(read, "mtp.0.main_proj"), "mtp.0.main_norm")
        noise = [c["dspark_noise_token_id"]] * (c["dspark_block_size"] - 1)
        h, pre = self.streams(torch.tensor([newest, *noise]))
        for stage in range(len(c["dspark_target_layer_ids"])):
            p, chosen = f"mtp.{stage}", c["dspark_num_experts_per_tok"]
            attention = partial(self.of_block, main=main, a=f"{p}.attn")
            h, pre = self.block(h, pre, p, chosen, attention)
        x = self.normed(self.merged(h, pre, p), f"{p}.norm")
        before, after = (self.t[f"{p}.markov_head.{side}.weight"] for side in self.pairs)
        return self.linear(x, "head"), before @ after.T

    def of_block(self, x, main, a):
        """Every token of a block sees all of it, and the window of keys made of `main`."""
        at = torch.arange(len(main) + len(x))
        kv = self.normed(self.linear(torch.cat((main, x)), f"{a}.wkv"), f"{a}.kv_norm")
        near = (at >= len(main) - self.c["sliding_window"]).expand(len(x), -1)
        low = self.normed(self.linear(x, f"{a}.wq_a"), f"{a}.q_norm")
        return self.attended(low, self.turned(kv, at, 0), near, at[len(main) :], 0, a)

    def attended(self, low, read, seen, positions, layer, a):
        """Outputs of tokens, each of which sees some of the vectors `read`: seen [T, R]."""
        c, d = self.c, self.c["head_dim"]
        q = self.heads(self.linear(low, f"{a}.wq_b").unflatten(1, (-1, d)))
        scores = self.turned(q, positions, layer) @ read.T * d**-0.5
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        sink = self.t[f"{a}.attn_sink"].expand(len(low), -1)[..., None]
        shares = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        o = self.turned(shares @ read, positions, layer, back=True)
        parts = o.flatten(1).unflatten(1, (c["o_groups"], -1))
        weights = self.t[f"{a}.wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        return self.linear(torch.einsum("tgi,goi->tgo", parts, weights).flatten(1), f"{a}.wo_b")

    def mixes(self, h, p):
        c, n = self.c, self.c["hc_mult"]
        flat = F.rms_norm(h.flatten(1), (h[0].numel(),), None, c["rms_norm_eps"])
        mixes, scale, base = flat @ self.t[f"{p}_fn"].T, self.t[f"{p}_scale"], self.t[f"{p}_base"]
        pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + c["hc_eps"]
        post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n))
        comb = comb.softmax(-1) + c["hc_eps"]
        comb = comb / (comb.sum(-2, keepdim=True) + c["hc_eps"])
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            for dim in (-1, -2):
                comb = comb / (comb.sum(dim, keepdim=True) + c["hc_eps"])
        return pre, post, comb

    def with_engram(self, h, ids, layer):
        c, p, used = self.c, f"layers.{layer}.engram", []
        size, heads = c["engram_max_ngram_size"], c["engram_n_heads"]
        for _ in range((size - 1) * heads * len(c["engram_layer_ids"])):
            primes_from(c["engram_vocab_size"], used)
        own = c["engram_layer_ids"].index(layer) * (size - 1) * heads
        bound = (2**63 - 1) // c["engram_compressed_vocab_size"] // 2
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size, dtype=np.int64)
        factors = [2 * int(one) + 1 for one in drawn]
        pad, classes = int(CLASSES[c["engram_pad_token_id"]]), CLASSES[ids].tolist()
        rows = []
        for at in range(len(ids)):
            joined, start, left = 0, 0, iter(used[own:])
            for back in range(size):
                joined ^= (classes[at - back] if back <= at else pad) * factors[back]
                for _ in range(heads if back else 0):
                    prime = next(left)
                    rows.append(start + joined % prime)
                    start += prime
        n, hidden, eps = c["hc_mult"], c["hidden_size"], c["rms_norm_eps"]
        read = self.t[f"{p}.embed.weight"][rows].view(len(ids), -1)
        k, value = self.linear(read, f"{p}.wkv").split([n * hidden, hidden], dim=1)
        q, k = (
            F.rms_norm(one, (hidden,), None, eps) * self.t[f"{p}.{side}_weight"]
            for side, one in (("q", h), ("k", k.unflatten(1, (n, hidden))))
        )
        dot = (q * k).sum(-1) / hidden**0.5
        gates = dot.abs().clamp(min=1e-6).sqrt().copysign(dot).sigmoid()
        return h + gates[..., None] * value[:, None]

    def attention(self, x, layer):
        c, a, at = self.c, f"layers.{layer}.attn", torch.arange(len(x))
        low = self.normed(self.linear(x, f"{a}.wq_a"), f"{a}.q_norm")
        read = self.turned(self.normed(self.linear(x, f"{a}.wkv"), f"{a}.kv_norm"), at, layer)
        back = at[:, None] - at
        seen = (back >= 0) & (back < c["sliding_window"])
        if layer in c["kv_source_layer_ids"]:
            self.compress(x, layer)
        if layer in c["index_source_layer_ids"]:
            self.select(x, low, layer)
        if c["compress_ratios"][layer]:
            read, seen = torch.cat((read, self.entries)), torch.cat((seen, self.chosen), dim=1)
        return self.attended(low, read, seen, at, layer, a)

    def compress(self, x, layer):
        p, ratio = f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        kv = self.linear(x, f"{p}.compressor.wkv")
        if ratio > 1:
            whole = len(x) // ratio * ratio
            gate = self.linear(x, f"{p}.compressor.wgate")
            kv, gate = (one[:whole].unflatten(0, (-1, ratio)) for one in (kv, gate))
            kv = (kv * gate.softmax(1)).sum(1)
        latents = self.normed(kv, f"{p}.compressor.norm")
        keys = self.normed(self.linear(latents, f"{p}.indexer.wk"), f"{p}.indexer.k_norm")
        at = torch.arange(len(kv)) * ratio
        self.entries, self.keys = (self.turned(one, at, layer) for one in (latents, keys))

    def select(self, x, low, layer):
        """chosen [T, E]: which entries are read; blocks [T, E]: of which blocks they may be."""
        c, p, at = self.c, f"layers.{layer}.attn.indexer", torch.arange(len(x))
        heads, width, ratio = c["index_n_heads"], c["index_head_dim"], c["compress_ratios"][layer]
        q = self.turned(self.linear(low, f"{p}.wq_b").view(-1, heads, width), at, layer)
        weights = self.linear(x, f"{p}.weights_proj") * (width * heads) ** -0.5
        score = ((q @ self.keys.T).relu() * weights[..., None]).sum(1)
        count = (at + 1) // ratio
        score[torch.arange(len(self.keys)) >= count[:, None]] = -math.inf
        source, size = c["candidate_source_layer_id"], c["candidate_block_size"]
        block = torch.arange(len(self.keys)) // size
        if layer == source:
            last = (count[:, None] - 1) // size
            raised = score.masked_fill((block == last) & score.isfinite(), math.inf)
            best = raised.new_full((len(x), -(-len(block) // size)), -math.inf)
            best = best.scatter_reduce(1, block.expand_as(raised), raised, "amax")
            self.blocks = largest(best, c["candidate_topk_blocks"])[:, block]
        elif 0 <= source < layer:
            score = score.masked_fill(~self.blocks, -math.inf)
        self.chosen = largest(score, c["index_topk"])

    def experts(self, x, p, chosen):
        limit = self.c["swiglu_limit"]

        def mlp(one):
            gate = self.linear(x, f"{one}.w1").clamp(max=limit)
            up = self.linear(x, f"{one}.w3").clamp(-limit, limit)
            return self.linear(F.silu(gate) * up, f"{one}.w2")

        scores = F.softplus(self.linear(x, f"{p}.gate")).sqrt()
        shares = scores * largest(scores + self.t[f"{p}.gate.bias"], chosen)
        shares = shares / shares.sum(1, keepdim=True) * self.c["routed_scaling_factor"]
        routed = [share[:, None] * mlp(f"{p}.experts.{e}") for e, share in enumerate(shares.T)]
        return sum(routed) + mlp(f"{p}.shared_experts")


def largest(scores, count):
    """A mask of the largest finite ones of each row, at most `count`."""
    best = scores.topk(min(count, scores.shape[1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True) & (scores > -math.inf)


class StatedV4(Stated):
    """Of V4's head: sublayers weigh the streams for themselves, queries are normed by heads, a
    merge of its own."""

    pairs = ("markov_w1", "markov_w2")

    def block(self, h, pre, p, chosen, attention):
        for part in ("attn", "ffn"):
            own, post, comb = self.mixes(h, f"{p}.hc_{part}")
            x = self.normed((own[..., None] * h).sum(1), f"{p}.{part}_norm")
            out = attention(x) if part == "attn" else self.experts(x, f"{p}.ffn", chosen)
            h = post[..., None] * out[:, None] + torch.einsum("tij,tid->tjd", comb, h)
        return h, pre

    def heads(self, q):
        return F.rms_norm(q, q.shape[-1:], None, self.c["rms_norm_eps"])

    def merged(self, h, pre, p):
        flat = F.rms_norm(h.flatten(1), (h[0].numel(),), None, self.c["rms_norm_eps"])
        fn, base, scale = (self.t[f"{p}.hc_head_{one}"] for one in ("fn", "base", "scale"))
        own = torch.sigmoid(flat @ fn.T * scale + base) + self.c["hc_eps"]
        return (own[..., None] * h).sum(1)


@pytest.fixture(autouse=True)
def classes(monkeypatch):
    """Tokens that a table takes for others."""
    monkeypatch.setattr(plain_weights, "TOKENS", CLASSES)


def case(changes):
    text = CONFIGS["deepseek_v41"]["text_config"] | TABLES["deepseek_v41"] | changes
    config_dict = {"model_type": "deepseek_v41", "text_config": text}
    tensors = {name: one.float() for name, one in random_tensors(config_dict).items()}
    for name, one in tensors.items():
        if name.endswith(("_base", "_scale", "attn_sink", "gate.bias")):
            one.mul_(2)
    return config_dict, {
        name: tensors[name] for name in tensors if not name.endswith("embed.scale")
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_statement(name):
    """Where there are candidates, which are not packed with the streams, a text that is computed
    layer by layer has none: it is no longer than their blocks."""
    config_dict, tensors = case(CASES[name])
    model, *_ = check_logits(Stated(config_dict, tensors), config_dict, tensors, LENGTHS)
    assert model.config.max_independent_tokens == (None if name == "odd" else 3 * 2)


def with_head(config_dict, tensors):
    """The tensors, with random ones of a DSpark head; the model that it follows, and the head."""
    found = find_block_head(config_dict)
    config = find_architecture(config_dict).Config.from_dict(config_dict)
    own = rows_of(found.head_parameters(config), torch.Generator().manual_seed(12))
    tensors = tensors | {name: one.float() for name, one in own.items()}
    architecture, config, weights = opened(config_dict, tensors)
    model, head = architecture.Model(config, weights), found.HEAD(config, weights)
    head.follow(model)
    return tensors, model, head


def drafted(head, whole):
    """Logits of the block after a text, of which the model handed out `whole`, and the token 9;
    with those of pairs after 17."""
    keys = head.keys(whole, torch.arange(len(whole)))
    block = block_after(head, keys, len(whole), torch.tensor([9]))
    return head.logits(block) + head.pair_logits(torch.tensor([17]))


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_dspark_head_is_the_published_one(name):
    """Texts longer and shorter than the window; a block sees all of itself."""
    config_dict, tensors = case(CASES[name])
    tensors, model, head = with_head(config_dict, tensors)
    for ids in (TOKEN_IDS[:30], TOKEN_IDS[:3]):
        base, pairs = Stated(config_dict, tensors).drafted(ids, 9)
        found = drafted(head, model(ids, CausalContext([len(ids)])))
        assert (found - base - pairs[17]).abs().max() < 1e-4 * base.abs().max()


@torch.no_grad()
def test_v4s_dspark_head_is_the_published_one():
    """As V4-Flash-0731 has it, by engines' sources: it reads the streams after its targets."""
    sizes = {"dspark_block_size": 4, "dspark_target_layer_ids": [1, 2], "dspark_noise_token_id": 5}
    config_dict = {**CONFIGS["deepseek_v4"], **sizes, "dspark_markov_rank": 24}
    config_dict |= {"num_nextn_predict_layers": 1, "model_type": "deepseek_v4"}
    tensors = random_tensors(config_dict)
    tensors = {key: one.float() if one.is_floating_point() else one for key, one in tensors.items()}
    tensors, model, head = with_head(config_dict, tensors)
    stated = {"rope_theta": 10000, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    stated |= {"swiglu_limit": 10.0, "routed_scaling_factor": 1.5, "dspark_num_experts_per_tok": 2}
    ids, size, context = TOKEN_IDS[:30], model.config.hidden_size, CausalContext([30])
    whole = model(ids, context)
    state = model.config.streams.first(model.embedding[ids], ids)
    for number, layer in enumerate(model.layers):
        state = layer.feed_forward(layer.attend(state, context), None)
        if number in sizes["dspark_target_layer_ids"]:
            part = whole[:, number * size : (number + 1) * size]
            assert (part - unpack_streams(state, 4)[0].mean(1)).abs().max() < 1e-4
    base, pairs = StatedV4({"text_config": stated | config_dict}, tensors).of_head(
        whole[:, size:], 9
    )
    assert (drafted(head, whole) - base - pairs[17]).abs().max() < 1e-4 * base.abs().max()


PROMPTS = [[7 + i] * 3 + [*range(20, 20 + length)] for i, length in enumerate((1, 9, 100, 30, 70))]


def answers(path, draft_length, captured=False, **options):
    """Greedy and drawn, and the engine's acceptance."""
    engine = load(path, max_model_len=128, draft_length=draft_length, **options)
    if captured and draft_length:
        capture(engine)
    if "tp" not in options:  # the other ranks have their own
        engine.scheduler.budget = StepBudget(24, 8, mixed=True)
    params = [
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(5)
    ]
    found = tokens(engine, PROMPTS, params)
    engine.close()
    return found, engine.speculation.acceptance


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"prompt_lookup": 6, "captured": True}])
def test_drafts_of_the_head_change_no_token(options, tmp_path):
    path = write_with_head(tmp_path / "model", MODELS["deepseek_v41"])
    (expected, _), (found, acceptance) = (answers(path, count, **options) for count in (0, 3))
    assert found == expected
    assert 0 < acceptance.accepted < acceptance.drafted
    assert acceptance.drafted > 50


_PLAIN = ("compressor.", "weights_proj", "indexer.wk.", "gate.", "norm", ".engram.embed.", "_head.")
_OTHERS = {
    "mtp.1.confidence_head.proj.weight": (1, 512),
    "vision.blocks.0.attn.qkv.weight": (96, 32),
    "aligner.weight": (32, 32),
    "image_start": (256,),
    "layers.0.ffn.gate.bias_vl": (4,),
}


def packer(name, tensor):
    inside = name.startswith(("layers.", "mtp.")) and not any(part in name for part in _PLAIN)
    if not inside or not name.endswith(".weight") or tensor.dim() != 2:
        return None
    return fp4 if ".experts." in name else partial(fp8, tall=32, wide=32)


_KEPT = ("mtp.0.main_", "mtp.1.markov_head", "vision.", "aligner.", "image_")


def as_released(path):
    """The checkpoint in the release's layout, and what each tensor stands for."""
    plain = Checkpoint.open(write_with_head(path.with_name("plain"), MODELS["deepseek_v41"]))
    tensors = {name: plain.read(name) for name in plain.tensors}
    tensors |= {name: torch.randn(shape).bfloat16() for name, shape in _OTHERS.items()}
    stored, worth = packed(tensors, packer)
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    block |= {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return make_model.write_dense(
        path, plain.config | {"quantization_config": block}, stored
    ), worth


def test_the_release_is_read_to_the_bit_and_its_tables_by_rows(tmp_path, monkeypatch):
    """Calibrated, with tables that are never read whole, in a run that is stopped and goes on and
    in one that is not; tables, vision and what is around the head's stages are kept; it drafts."""
    source, worth = as_released(tmp_path / "source")
    out, again = tmp_path / "out", tmp_path / "again"
    with monkeypatch.context() as watched:

        def seen(shards, info, *_, **__):
            assert "engram.embed" not in info.name, "a table was read whole"

        note(watched, Shards, "read", seen)
        checkpoint = Checkpoint.open(source)
        check_read(checkpoint, {name: worth[name] for name in worth if "engram.embed" not in name})
        table, numbers = "layers.1.engram.embed", torch.tensor([7, 239, 7, 0])
        scale = worth[f"{table}.scale"].float().repeat_interleave(32, dim=1)
        rows = worth[f"{table}.weight"].float() * scale
        assert torch.equal(StoredNgramTable(checkpoint, table).rows(numbers), rows[numbers])
        recipe = Recipe(scheme="awq-w4a16", **SMALL)

        for unit in ("layers.3.attend", "layers.6.feed_forward"):  # the second of the head
            stop = stop_when(lambda event, unit=unit: getattr(event, "unit", "") == unit)
            with pytest.raises(Interrupted):
                quantized(source, out, recipe, on_event=stop)
        for path in (out, again):
            quantized(source, path, recipe)
        for path in (source, out):
            assert answers(path, 2)[0] == answers(path, 0)[0]
    written, whole = Checkpoint.open(out), Checkpoint.open(again)
    for name in written.tensors:
        one, other = (found.read(name).view(torch.uint8) for found in (written, whole))
        assert torch.equal(one, other), name
    for name, one in worth.items():
        if "engram.embed" in name or name.startswith(_KEPT):
            assert torch.equal(written.read(name).float(), one.float()), name
    told = [json.loads((path / "report.json").read_text())["held_out"] for path in (out, again)]
    assert told[0] == told[1]
    assert "accepted_length" in told[0]
    manifest = json.loads((out / "manifest.json").read_text())["tensors"]
    assert manifest["layers.3.engram.embed.weight"]["status"] == "copied"


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    text = CONFIGS["deepseek_v41"]["text_config"] | {"engram_compressed_vocab_size": 280}
    path = write(tmp_path / "model", "deepseek_v41", text_config=text)
    with refused("normalized texts"):
        load(path, max_model_len=128)
    with refused("normalized texts"):
        quantized(path, tmp_path / "out", Recipe(scheme="awq-w4a16", **SMALL))
