"""DeepSeek-V4.1 against a statement of the release's public code (inference/model.py and engram.py)
in float32, token by token, for transformers has no such model; over a cache, however a text is cut;
and in the layout of the release."""

import json
import math
import random
from dataclasses import replace

import make_model
import numpy as np
import pytest
import torch
from cut_texts import furthest_from_whole
from engines import capture, check_same_answers, completions, load
from plain_weights import PlainWeights
from refused import refused
from small_recipe import SMALL as SMALL_RUN
from tiny_models import CASES as TABLES
from tiny_models import CONFIGS, random_tensors, rows_of, write
from torch.nn import functional as F
from ulp_bound import assert_near, movement

from quantkit.calibrate.recipe import Recipe
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.shards import Shards
from quantkit.common.errors import Interrupted
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.scheduler import StepBudget
from quantkit.executor.weights.load import load_model
from quantkit.grids.base import dequantize
from quantkit.grids.schemes import SCHEMES
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.deepseek_v4 import dspark as deepseek_v4
from quantkit.models.deepseek_v41.ahead_streams import AheadStreams
from quantkit.models.deepseek_v41.dspark import HEAD, head_parameters
from quantkit.models.dspark import Window
from quantkit.models.hyper_connections import (
    expand_streams,
    pack_streams,
    unpack_streams,
)
from quantkit.models.ngram_table import StoredNgramTable
from quantkit.quantization.run import quantize

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


def rotated(x, position, theta, dim, scaling=None, back=False):
    """The last `dim` channels of x [..., D] as complex pairs."""
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
    turn = torch.polar(torch.ones_like(freqs), freqs * position * (-1 if back else 1))
    pairs = torch.view_as_complex(x[..., -dim:].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-dim], turned), dim=-1)


class Statement:
    """One text, token by token."""

    pairs = ("embed", "head")

    def merged(self, h, pre, p):
        return (pre[..., None] * h).sum(1)

    def heads(self, q):
        return q

    def __init__(self, config_dict, tensors):
        self.c, self.t = config_dict["text_config"], tensors

    def normed(self, x, name):
        return F.rms_norm(x, x.shape[-1:], None, self.c["rms_norm_eps"]) * self.t[f"{name}.weight"]

    def turned(self, x, position, layer, back=False):
        c = self.c
        compressed = c["compress_ratios"][layer] > 0
        theta = c["compress_rope_theta"] if compressed else c["rope_theta"]
        scaling = c.get("rope_scaling") if compressed else None
        return rotated(x, position, theta, c["qk_rope_head_dim"], scaling, back)

    def logits(self, ids):
        c, n = self.c, self.c["hc_mult"]
        h = self.t["embed.weight"][ids][:, None].repeat(1, n, 1)
        pre = torch.zeros(len(ids), n)
        pre[:, 0] = 1
        self.entries, self.keys, self.chosen, self.blocks = [], [], None, None
        self.read = []
        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                h = self.with_engram(h, ids, layer)
            if layer in c["dspark_target_layer_ids"]:
                self.read.append(h.mean(1))
            p, chosen = f"layers.{layer}", c["num_experts_per_tok"]
            h, pre = self.block(h, pre, p, chosen, lambda x, at=layer: self.attention(x, at))
        x = self.normed((pre[..., None] * h).sum(1), "norm")
        return x @ self.t["head.weight"].T

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
        c, n, count = self.c, self.c["hc_mult"], self.c["dspark_block_size"]
        main = self.normed(read @ self.t["mtp.0.main_proj.weight"].T, "mtp.0.main_norm")
        block = torch.tensor([newest] + [c["dspark_noise_token_id"]] * (count - 1))
        h, pre = self.t["embed.weight"][block][:, None].repeat(1, n, 1), torch.zeros(count, n)
        pre[:, 0] = 1
        for stage in range(len(c["dspark_target_layer_ids"])):
            p, chosen = f"mtp.{stage}", c["dspark_num_experts_per_tok"]
            h, pre = self.block(
                h, pre, p, chosen, lambda x, a=f"{p}.attn": self.of_block(x, main, a)
            )
        x = self.normed(self.merged(h, pre, p), f"{p}.norm")
        before, after = (self.t[f"{p}.markov_head.{side}.weight"] for side in self.pairs)
        return x @ self.t["head.weight"].T, before @ after.T

    def of_block(self, x, main, a):
        """Every token of a block sees all of it, and the window of keys made of `main`."""
        first = max(0, len(main) - self.c["sliding_window"])
        both = torch.cat((main[first:], x))
        kv = self.normed(both @ self.t[f"{a}.wkv.weight"].T, f"{a}.kv_norm")
        read = torch.stack([self.turned(one, first + at, 0) for at, one in enumerate(kv)])
        low = self.normed(x @ self.t[f"{a}.wq_a.weight"].T, f"{a}.q_norm")
        return torch.stack(
            [self.attended(low[at], read, len(main) + at, 0, a) for at in range(len(x))]
        )

    def attended(self, low, read, at, layer, a):
        """The output of a token at position `at` that reads the vectors `read`."""
        c, d = self.c, self.c["head_dim"]
        q = self.heads((self.t[f"{a}.wq_b.weight"] @ low).view(-1, d))
        scores = self.turned(q, at, layer) @ read.T * d**-0.5
        sunk = torch.cat((scores, self.t[f"{a}.attn_sink"][:, None]), dim=1).softmax(1)
        o = self.turned(sunk[:, :-1] @ read, at, layer, back=True)
        parts = o.view(c["o_groups"], -1)
        weights = self.t[f"{a}.wo_a.weight"].view(c["o_groups"], c["o_lora_rank"], -1)
        low_out = torch.cat([weight @ part for weight, part in zip(weights, parts)])
        return self.t[f"{a}.wo_b.weight"] @ low_out

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
            comb = comb / (comb.sum(-1, keepdim=True) + c["hc_eps"])
            comb = comb / (comb.sum(-2, keepdim=True) + c["hc_eps"])
        return pre, post, comb

    def with_engram(self, h, ids, layer):
        c, p, used = self.c, f"layers.{layer}.engram", []
        size, heads = c["engram_max_ngram_size"], c["engram_n_heads"]
        tables = [
            [
                [primes_from(c["engram_vocab_size"], used) for _ in range(heads)]
                for _ in range(size - 1)
            ]
            for _ in c["engram_layer_ids"]
        ]
        sizes = tables[c["engram_layer_ids"].index(layer)]
        bound = (2**63 - 1) // c["engram_compressed_vocab_size"] // 2
        drawn = np.random.default_rng(10007 * layer).integers(0, bound, size, dtype=np.int64)
        factors = [2 * int(one) + 1 for one in drawn]
        pad = int(CLASSES[c["engram_pad_token_id"]])
        classes = [int(CLASSES[one]) for one in ids]
        out, n, hidden = [], c["hc_mult"], c["hidden_size"]
        for at in range(len(ids)):
            joined, rows, start = 0, [], 0
            for back in range(size):
                joined ^= (classes[at - back] if back <= at else pad) * factors[back]
                for prime in sizes[back - 1] if back else ():
                    rows.append(start + joined % prime)
                    start += prime
            kv = self.t[f"{p}.wkv.weight"] @ self.t[f"{p}.embed.weight"][rows].flatten()
            value, gates = kv[n * hidden :], []
            for stream in range(n):
                q, k = h[at, stream], kv[stream * hidden : (stream + 1) * hidden]
                q = F.rms_norm(q, q.shape, self.t[f"{p}.q_weight"][stream], c["rms_norm_eps"])
                k = F.rms_norm(k, k.shape, self.t[f"{p}.k_weight"][stream], c["rms_norm_eps"])
                dot = float(q @ k) / hidden**0.5
                gates.append(math.copysign(max(abs(dot), 1e-6) ** 0.5, dot))
            out.append(h[at] + torch.tensor(gates).sigmoid()[:, None] * value)
        return torch.stack(out)

    def attention(self, x, layer):
        c, a = self.c, f"layers.{layer}.attn"
        ratio, tokens = c["compress_ratios"][layer], range(len(x))
        low = self.normed(x @ self.t[f"{a}.wq_a.weight"].T, f"{a}.q_norm")
        kv = self.normed(x @ self.t[f"{a}.wkv.weight"].T, f"{a}.kv_norm")
        kv = [self.turned(kv[at], at, layer) for at in tokens]
        if layer in c["kv_source_layer_ids"]:
            self.compress(x, layer)
        if layer in c["index_source_layer_ids"]:
            self.select(x, low, layer)
        out = []
        for at in tokens:
            read = kv[max(0, at - c["sliding_window"] + 1) : at + 1]
            read = torch.stack(read + [self.entries[e] for e in (self.chosen[at] if ratio else ())])
            out.append(self.attended(low[at], read, at, layer, a))
        return torch.stack(out)

    def compress(self, x, layer):
        p, ratio = f"layers.{layer}.attn", self.c["compress_ratios"][layer]
        kv = x @ self.t[f"{p}.compressor.wkv.weight"].T
        if ratio > 1:
            groups = len(x) // ratio
            gate = x @ self.t[f"{p}.compressor.wgate.weight"].T
            kv, gate = (one[: groups * ratio].unflatten(0, (groups, ratio)) for one in (kv, gate))
            kv = (kv * gate.softmax(1)).sum(1)
        latents = self.normed(kv, f"{p}.compressor.norm")
        keys = self.normed(latents @ self.t[f"{p}.indexer.wk.weight"].T, f"{p}.indexer.k_norm")
        self.entries, self.keys = (
            [self.turned(one, number * ratio, layer) for number, one in enumerate(some)]
            for some in (latents, keys)
        )

    def select(self, x, low, layer):
        c, p = self.c, f"layers.{layer}.attn.indexer"
        heads, width, ratio = c["index_n_heads"], c["index_head_dim"], c["compress_ratios"][layer]
        size, chosen, blocks = c["candidate_block_size"], [], []
        for at in range(len(x)):
            q = self.turned((self.t[f"{p}.wq_b.weight"] @ low[at]).view(heads, width), at, layer)
            weights = self.t[f"{p}.weights_proj.weight"] @ x[at] * (width * heads) ** -0.5
            seen = range((at + 1) // ratio)
            score = {e: float((q @ self.keys[e]).relu() @ weights) for e in seen}
            if layer == c["candidate_source_layer_id"]:
                best = {}
                for e in seen:
                    last = e // size == (len(seen) - 1) // size
                    value = math.inf if last else score[e]
                    best[e // size] = max(best.get(e // size, -math.inf), value)
                blocks.append(sorted(best, key=best.get)[-c["candidate_topk_blocks"] :])
            elif 0 <= c["candidate_source_layer_id"] < layer:
                score = {e: one for e, one in score.items() if e // size in self.blocks[at]}
            chosen.append(sorted(score, key=score.get)[-c["index_topk"] :])
        self.chosen, self.blocks = chosen, blocks or self.blocks

    def experts(self, x, p, chosen):
        c = self.c

        def mlp(one, x):
            gate = (x @ self.t[f"{one}.w1.weight"].T).clamp(max=c["swiglu_limit"])
            up = (x @ self.t[f"{one}.w3.weight"].T).clamp(-c["swiglu_limit"], c["swiglu_limit"])
            return (F.silu(gate) * up) @ self.t[f"{one}.w2.weight"].T

        scores = F.softplus(x @ self.t[f"{p}.gate.weight"].T).sqrt()
        best = (scores + self.t[f"{p}.gate.bias"]).topk(chosen).indices
        out = []
        for at, own in enumerate(best):
            shares = scores[at, own] / scores[at, own].sum() * c["routed_scaling_factor"]
            routed = [s * mlp(f"{p}.experts.{e}", x[at]) for s, e in zip(shares, own.tolist())]
            out.append(sum(routed) + mlp(f"{p}.shared_experts", x[at]))
        return torch.stack(out)


class StatementV4(Statement):
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
        return F.rms_norm(q, q.shape[1:], None, self.c["rms_norm_eps"])

    def merged(self, h, pre, p):
        flat = F.rms_norm(h.flatten(1), (h[0].numel(),), None, self.c["rms_norm_eps"])
        fn, base, scale = (self.t[f"{p}.hc_head_{one}"] for one in ("fn", "base", "scale"))
        own = torch.sigmoid(flat @ fn.T * scale + base) + self.c["hc_eps"]
        return (own[..., None] * h).sum(1)


class Table:
    def __init__(self, table):
        self.table = table

    def classes(self):
        return CLASSES

    def rows(self, numbers):
        return self.table[numbers]


class Weights(PlainWeights):
    def ngram_table(self, module):
        return Table(self.tensors[f"{module}.weight"])


def case(changes):
    text = CONFIGS["deepseek_v41"]["text_config"] | TABLES["deepseek_v41"] | changes
    config_dict = {"model_type": "deepseek_v41", "text_config": text}
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = {name: one.float() for name, one in random_tensors(config_dict).items()}
    for name, one in tensors.items():
        if name.endswith(("_base", "_scale", "attn_sink", "gate.bias")):
            one.mul_(2)
    tensors = {name: one for name, one in tensors.items() if not name.endswith("embed.scale")}
    return architecture, config, config_dict, tensors


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_statement(name):
    """Of the whole stack, and layer by layer where texts are short enough for that."""
    architecture, config, config_dict, tensors = case(CASES[name])
    statement = Statement(config_dict, tensors)

    def stated():
        return torch.cat([statement.logits(own) for own in TOKEN_IDS.split(LENGTHS)])

    with torch.no_grad():
        expected, moved = stated(), movement(stated, tensors.values())
        model = architecture.Model(config, Weights(tensors, config.mixture.linears))
        found = model.logits(model(TOKEN_IDS, CausalContext(LENGTHS)))
    assert expected.abs().max() > 1
    assert_near(found, expected, moved)
    table = {row.name: row.shape for row in architecture.parameters(config) if not row.optional}
    assert table == {
        name: tuple(one.shape) for name, one in tensors.items() if "bias_vl" not in name
    }


def test_layers_one_by_one_are_the_stack():
    """Packed with the streams are their weights, the entries and the selection that layers share.
    Candidates are not: a text that has some is refused by its length."""
    architecture, config, _, tensors = case(CASES["odd"])
    assert config.max_independent_tokens is None
    model = architecture.Model(config, Weights(tensors, config.mixture.linears))
    with torch.no_grad():
        whole = model(TOKEN_IDS, CausalContext(LENGTHS))
        embedded = model.embedding[TOKEN_IDS]
        hidden = AheadStreams.first(embedded, TOKEN_IDS, config.streams).pack()
        for layer in model.layers:  # each alone: nothing is left in a context
            hidden = layer.attend(hidden, CausalContext(LENGTHS))
            hidden = layer.feed_forward(hidden, CausalContext(LENGTHS))
        merged = AheadStreams.unpack(hidden, config.streams).merged()
        end = F.rms_norm(merged, merged.shape[1:], model.norm, config.rms_norm_eps)
    assert (end - whole).abs().max() < 1e-4
    _, release, *_ = case({})
    assert release.max_independent_tokens == 3 * 2


def head_tensors(config):
    """Random ones of the DSpark head."""
    return rows_of(head_parameters(config), torch.Generator().manual_seed(12))


@pytest.mark.parametrize("name", CASES)
def test_the_dspark_head_is_the_published_one(name):
    """Texts longer and shorter than the window; a block sees all of itself."""
    architecture, config, config_dict, tensors = case(CASES[name])
    tensors |= {key: one.float() for key, one in head_tensors(config).items()}
    weights = Weights(tensors, config.mixture.linears)
    model, head = architecture.Model(config, weights), HEAD(config, weights)
    head.follow(model)
    statement = Statement(config_dict, tensors)
    for length in (30, 3):
        ids = TOKEN_IDS[:length]
        with torch.no_grad():
            base, pairs = statement.drafted(ids, 9)
            expected = base + pairs[17]
            keys = head.keys(model(ids, CausalContext([length])), torch.arange(length))
            there = min(length, head.window)
            window = torch.zeros(1, head.window, *keys.shape[1:])
            window[0, -there:] = keys[-there:]
            seen = torch.arange(head.window)[None] >= head.window - there
            hidden = head.hidden(torch.tensor([9]), torch.tensor([length]), Window(window, seen))
            found = [head.logits(hidden[:, at]) for at in range(head.block_size)]
            found = torch.cat(found) + head.pair_logits(torch.tensor([17]))
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_v4s_dspark_head_is_the_published_one():
    """As V4-Flash-0731 has it, by engines' sources: it reads the streams after its targets."""
    sizes = {"dspark_block_size": 4, "dspark_target_layer_ids": [1, 2], "dspark_noise_token_id": 5}
    config_dict = {**CONFIGS["deepseek_v4"], **sizes, "dspark_markov_rank": 24}
    config_dict |= {"num_nextn_predict_layers": 1, "model_type": "deepseek_v4"}
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    tensors = random_tensors(config_dict) | rows_of(
        deepseek_v4.head_parameters(config), torch.Generator().manual_seed(12)
    )
    tensors = {key: one.float() if one.is_floating_point() else one for key, one in tensors.items()}
    weights = Weights(tensors, config.mixture.linears)
    model, head = architecture.Model(config, weights), deepseek_v4.HEAD(config, weights)
    plain = architecture.Model(config, weights)
    head.follow(model)
    ids, hidden_size = TOKEN_IDS[:30], config.hidden_size
    stated = {"rope_theta": 10000, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20}
    stated |= {"swiglu_limit": 10.0, "routed_scaling_factor": 1.5, "dspark_num_experts_per_tok": 2}
    statement = StatementV4({"text_config": stated | config_dict}, tensors)
    with torch.no_grad():
        whole = model(ids, CausalContext([30]))
        state = pack_streams(expand_streams(plain.embedding[ids], 4), ids)
        for number, layer in enumerate(plain.layers):
            state = layer.feed_forward(layer.attend(state, CausalContext([30])), None)
            if number in sizes["dspark_target_layer_ids"]:
                part = whole[:, number * hidden_size : (number + 1) * hidden_size]
                assert (part - unpack_streams(state, 4)[0].mean(1)).abs().max() < 1e-4
        base, pairs = statement.of_head(whole[:, hidden_size:], 9)
        keys = head.keys(whole, torch.arange(30))[None, -head.window :]
        window = Window(keys, torch.ones(1, head.window, dtype=torch.bool))
        block = head.hidden(torch.tensor([9]), torch.tensor([30]), window)[0]
    assert (head.logits(block) - base).abs().max() < 1e-4 * base.abs().max()
    assert (head.pair_logits(torch.tensor([17])) - pairs[17]).abs().max() < 1e-4


SMALL = {"candidate_topk_blocks": 8}


def changed(**fields):
    return {"text_config": CONFIGS["deepseek_v41"]["text_config"] | fields}


def test_a_text_is_the_same_however_it_is_cut(tmp_path):
    """With more entries than are selected and than their best blocks hold; ids before a chunk are
    those of its own text."""
    path = write(tmp_path / "model", "deepseek_v41", **changed(**SMALL))
    loaded = load_model(path, device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(4)) < 1e-4


PROMPTS = [[7 + i] * 3 + [*range(20, 20 + length)] for i, length in enumerate((1, 9, 100, 30, 70))]
PARAMS = SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=0)


def test_answers_do_not_depend_on_how_they_are_computed(tmp_path):
    """Prompts in chunks and beside steps, requests that make way for others, guesses, captured."""
    path = write(tmp_path / "model", "deepseek_v41", **changed(**SMALL))
    more = [(captured, {"prompt_lookup": 2}) for captured in (False, True)]
    check_same_answers(path, *more, (True, {}), atol=1e-3)
    with refused("--prefix-cache"):
        load(path, prefix_cache=True)


def _fp8(weight):
    """E4M3 codes in blocks of 32 x 32, a power of two for each."""
    rows, columns = weight.shape
    powers = torch.randint(-9, -5, (-(-rows // 32), -(-columns // 32))).float().exp2()
    wide = powers.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :columns]
    codes = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, powers.to(torch.float8_e8m0fnu), codes.float() * wide


def _fp4(weight):
    """E2M1 codes two to a byte, the first in the low bits, and a power of two for 32."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    powers = torch.randint(-6, -2, (len(weight), weight.shape[1] // 32)).float().exp2()
    wide = powers.repeat_interleave(32, 1)
    codes = ((weight.float() / wide)[..., None] - grid).abs().argmin(-1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, powers.to(torch.float8_e8m0fnu), grid[codes] * wide


def with_head(path, easy=False):
    """A model with a DSpark head, and, if easy, one that guesses right: sublayers add nothing, and
    pairs say what follows."""
    config_dict = {**CONFIGS["deepseek_v41"], **changed(**SMALL)}
    config = find_architecture(config_dict).Config.from_dict(config_dict)
    tensors = random_tensors(config_dict) | head_tensors(config)
    if easy:
        for name, one in tensors.items():
            if name.endswith((".wo_b.weight", ".w2.weight", ".engram.wkv.weight")):
                one.zero_()
        normed = F.rms_norm(tensors["embed.weight"].float(), (256,)) * tensors["norm.weight"]
        tensors["mtp.1.norm.weight"].zero_()
        tensors["mtp.1.markov_head.embed.weight"] = normed.bfloat16()
        tensors["mtp.1.markov_head.head.weight"] = tensors["head.weight"].clone()
    return make_model.write_dense(path, config_dict, tensors)


@pytest.mark.parametrize(
    "options", [{}, {"tp": 2}, {"prompt_lookup": 6}, {"temperature": 0.8}, {"captured": True}]
)
def test_drafts_of_the_head_change_no_token(options, tmp_path):
    """Guesses at random, and right ones, of which all are accepted; greedy and drawn; by captured
    steps."""
    options = {**options}
    params = replace(PARAMS, temperature=options.pop("temperature", 0.0), max_new_tokens=20, seed=3)
    captured = options.pop("captured", False)
    for easy in (False, True):
        path = with_head(tmp_path / str(easy), easy)
        answers = []
        for draft_length in (0, 3):
            engine = load(path, max_model_len=128, draft_length=draft_length, **options)
            if captured and draft_length:
                capture(engine)
            if "tp" not in options:  # the other ranks have their own
                engine.scheduler.budget = StepBudget(24, 8, mixed=True)
            answers.append([one.token_ids for one in completions(engine, PROMPTS, params)])
            acceptance = engine.speculation.acceptance
            engine.close()
        assert answers[0] == answers[1]
        assert acceptance.drafted > 50
        if easy and not options and not params.temperature:
            assert acceptance.accepted == acceptance.drafted


_PLAIN = ("compressor.", "weights_proj", "indexer.wk.", "gate.", "norm")
_OTHERS = {
    "mtp.1.confidence_head.proj.weight": (1, 512),
    "vision.blocks.0.attn.qkv.weight": (96, 32),
    "aligner.weight": (32, 32),
    "image_start": (256,),
    "layers.0.ffn.gate.bias_vl": (4,),
}


def as_released(path, **fields):
    """The checkpoint in the release's layout, and what each tensor stands for."""
    text = changed(**fields)["text_config"]
    config = {**CONFIGS["deepseek_v41"], "text_config": text}
    tensors = random_tensors(config)
    tensors |= head_tensors(find_architecture(config).Config.from_dict(config))
    tensors |= {name: torch.randn(shape).bfloat16() for name, shape in _OTHERS.items()}
    stored, expected = {}, {}
    for name, one in tensors.items():
        linear = name.endswith(".weight") and one.dim() == 2 and ".engram.embed." not in name
        inside = name.startswith(("layers.", "mtp.")) and not any(part in name for part in _PLAIN)
        if not linear or not inside or "_head." in name:
            stored[name] = expected[name] = one
            continue
        pack = _fp4 if ".experts." in name else _fp8
        scale = f"{name.removesuffix('weight')}scale"
        stored[name], stored[scale], expected[name] = pack(one)
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    config["quantization_config"] = block | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    return make_model.write_dense(path, config, stored), expected


def test_the_release_is_read_to_the_bit_and_its_tables_by_rows(tmp_path, monkeypatch):
    """Calibrated, with tables that are never read whole; tables, vision and the DSpark head are
    kept, and the head drafts."""
    source, expected = as_released(tmp_path / "source")
    read = Shards.read

    def watched(self, info, *others, **more):
        assert "engram.embed" not in info.name, "a table was read whole"
        return read(self, info, *others, **more)

    monkeypatch.setattr(Shards, "read", watched)
    checkpoint = Checkpoint.open(source)
    for name, one in expected.items():
        module = name.removesuffix(".weight")
        if module in checkpoint.linears:
            assert torch.equal(dequantize(checkpoint.weight(module)), one), name
        elif "engram.embed" not in name:
            assert torch.equal(checkpoint.read(name), one), name
    table = StoredNgramTable(checkpoint, "layers.1.engram.embed")
    numbers = torch.tensor([7, 239, 7, 0])
    scale = expected["layers.1.engram.embed.scale"].float().repeat_interleave(32, dim=1)
    rows = expected["layers.1.engram.embed.weight"].float() * scale
    assert torch.equal(table.rows(numbers), rows[numbers])
    recipe = Recipe(scheme="awq-w4a16", **SMALL_RUN)
    quantize(source, tmp_path / "out", SCHEMES["awq-w4a16"], "auto", recipe, device="cpu")
    for model in (source, tmp_path / "out"):
        answers = []
        for draft_length in (0, 2):
            engine = load(model, max_model_len=128, draft_length=draft_length)
            answers.append([one.token_ids for one in completions(engine, PROMPTS, PARAMS)])
            engine.close()
        assert answers[0] == answers[1]
    monkeypatch.setattr(Shards, "read", read)
    out = Checkpoint.open(tmp_path / "out")
    for name, one in expected.items():
        if "engram.embed" in name:
            assert torch.equal(out.read(name).view(torch.uint8), one.view(torch.uint8)), name
        elif name.startswith(("mtp.", "vision.", "aligner.", "image_")):
            assert torch.equal(out.read(name).float(), one.float()), name
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())["tensors"]
    assert manifest["layers.3.engram.embed.weight"]["status"] == "copied"


def test_a_run_that_was_killed_goes_on(tmp_path):
    """Tables are units outside the layers, of which a restart skips none by mistake; what the head
    read before is kept."""
    source, _ = as_released(tmp_path / "source")
    recipe = Recipe(scheme="awq-w4a16", **SMALL_RUN)

    def stop(event):
        if getattr(event, "unit", "") == "layers.3.attend":
            raise KeyboardInterrupt

    arguments = (SCHEMES["awq-w4a16"], "auto", recipe)
    with pytest.raises(Interrupted):
        quantize(source, tmp_path / "out", *arguments, device="cpu", on_event=stop)
    quantize(source, tmp_path / "out", *arguments, device="cpu")
    quantize(source, tmp_path / "again", *arguments, device="cpu")
    first, second = (Checkpoint.open(tmp_path / name) for name in ("out", "again"))
    for name in first.tensors:
        one, other = first.read(name), second.read(name)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    told = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("out", "again")]
    assert "accepted_length" in told[0]["held_out"]
    assert told[0]["held_out"] == told[1]["held_out"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    path = write(tmp_path / "model", "deepseek_v41", **changed(engram_compressed_vocab_size=280))
    with refused("normalized texts"):
        load(path, max_model_len=128)
    recipe = Recipe(scheme="awq-w4a16", **SMALL_RUN)
    with refused("normalized texts"):
        quantize(path, tmp_path / "out", SCHEMES["awq-w4a16"], "auto", recipe, device="cpu")
