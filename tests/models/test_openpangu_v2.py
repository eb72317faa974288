"""openPangu-2.0 against a statement of its description, in float32 on tiny random models; over a
cache, however a text is cut."""

import random
from pathlib import Path
from typing import Any

import make_model
import pytest
import torch
from cut_texts import furthest_from_whole
from guessed_models import in_place
from plain_weights import PlainWeights
from scaled_groups import drawn_scale
from torch import Tensor
from torch.nn import functional as F

from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.runner.graphs import DecodeSteps
from quantkit.executor.runner.runner import Runner
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.speculation.mtp_drafter import MultiMtpDrafter
from quantkit.executor.speculation.speculation import Speculation
from quantkit.executor.weights.load import LoadedModel, load_model
from quantkit.models import find_architecture
from quantkit.models.context import CausalContext
from quantkit.models.hyper_connections import expand_streams, pack_streams

TINY: dict[str, Any] = {
    "model_type": "openpangu_v2",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-3,
    "rope_theta": 6400000.0,
    "max_position_embeddings": 4096,
    "use_mhc": True,
    "mhc_use_gamma": True,
    "mhc_num_stream": 4,
    "mhc_recur_norm": 20,
    "sandwich_norm": True,
    "use_mome": True,
    "router_sliding_window": 3,
    "param_sink_number": 5,
    "dsa_layers": [0, 3],
    "swa_layers": [1, 2, 5, 6, 7],
    "sliding_window_list": [4, 9, 6, 5, 7],
    "block_post_layernorm_idx": [0, 2],
    "index_topk": 7,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "num_nextn_predict_layers": 3,
}
CASES: dict[str, dict[str, Any]] = {
    "release": {},
    "odd": {
        "mhc_num_stream": 3,
        "mhc_recur_norm": 2,
        "router_sliding_window": 4,
        "rope_interleave": True,
        "first_k_dense_replace": 0,
        "index_n_heads": 24,
    },
    "plain": {
        "param_sink_number": 0,
        "dsa_layers": None,
        "swa_layers": [0, 4],
        "sliding_window_list": None,
        "sliding_window": 6,
    },
}


def random_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    architecture, generator = find_architecture(config), torch.Generator().manual_seed(5)
    tensors = {}
    for row in architecture.parameters(architecture.Config.from_dict(config)):
        noise = torch.randn(row.shape, generator=generator)
        gain = row.role == "norm" or row.name.endswith("norm_gamma")
        tensors[row.name] = (
            1 + 0.3 * noise
            if gain
            else noise * (0.5 if len(row.shape) == 1 else row.shape[-1] ** -0.5)
        )
    return tensors


def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Statement:
    """One text through the model as the vendor's description has it, every matrix spelled out;
    nothing of quantkit."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.c, self.t = config, tensors

    def logits(self, token_ids: Tensor) -> Tensor:
        return (
            norm(self.merged(token_ids), self.t["model.norm.weight"], self.c["rms_norm_eps"])
            @ self.t["lm_head.weight"].T
        )

    def merged(self, token_ids: Tensor) -> Tensor:
        n, eps = self.c["mhc_num_stream"], self.c["rms_norm_eps"]
        x = self.t["model.embed_tokens.weight"][token_ids].repeat(1, n)
        for layer in range(self.c["num_hidden_layers"]):
            x = self.layer(x, layer)
        merge = "model.merge_mhc_module"
        made = norm(x, self.t[f"{merge}.norm_gamma"], eps) @ self.t[f"{merge}.phi.weight"].T
        counts = (
            torch.sigmoid(
                made * self.t[f"{merge}.branch_alpha_pre"] + self.t[f"{merge}.branch_beta_pre"]
            )
            + 1e-6
        )
        return torch.einsum("tn,tnh->th", counts, x.unflatten(1, (n, -1)))

    def guessed(self, number: int, next_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What an MTP layer makes of states [T, H] that were not normed, and its logits."""
        layer, eps = self.c["num_hidden_layers"] + number, self.c["rms_norm_eps"]
        p = f"model.layers.{layer}"

        def normed(name: str, y: Tensor) -> Tensor:
            return norm(y, self.t[f"{p}.{name}.weight"], eps)

        embedded = normed("enorm", self.t[f"{p}.embed_tokens.weight"][next_ids])
        x = torch.cat((embedded, normed("hnorm", states)), dim=-1) @ self.t[f"{p}.eh_proj.weight"].T
        x = x + normed(
            "post_attention_layernorm", self.attention(normed("input_layernorm", x), layer)
        )
        x = x + normed(
            "post_mlp_layernorm", self.feed_forward(normed("pre_mlp_layernorm", x), layer)
        )
        return x, normed("shared_head.norm", x) @ self.t[f"{p}.shared_head.head.weight"].T

    def layer(self, x: Tensor, layer: int) -> Tensor:
        p, eps = f"model.layers.{layer}", self.c["rms_norm_eps"]

        def normed(name: str, y: Tensor) -> Tensor:
            return norm(y, self.t[f"{p}.{name}.weight"], eps)

        for module, half, before, after in (
            ("attn_mhc_module", self.attention, "input_layernorm", "post_attention_layernorm"),
            ("mlp_mhc_module", self.feed_forward, "pre_mlp_layernorm", "post_mlp_layernorm"),
        ):
            collapsed, post, mixing = self.connection(x, f"{p}.{module}")
            made = normed(after, half(normed(before, collapsed), layer))
            streams = x.unflatten(1, (self.c["mhc_num_stream"], -1))
            x = (
                post[..., None] * made[:, None] + torch.einsum("tij,tih->tjh", mixing, streams)
            ).flatten(1)
        return (
            normed("block_post_layernorm", x) if layer in self.c["block_post_layernorm_idx"] else x
        )

    def connection(self, x: Tensor, p: str) -> tuple[Tensor, Tensor, Tensor]:
        n = self.c["mhc_num_stream"]
        made = (
            norm(x, self.t[f"{p}.norm_gamma"], self.c["rms_norm_eps"]) @ self.t[f"{p}.phi.weight"].T
        )
        alpha, beta = self.t[f"{p}.branch_alpha"], self.t[f"{p}.branch_beta"]
        pre = torch.sigmoid(made[:, :n] * alpha[0] + beta[:n]) + 1e-6
        post = 2 * torch.sigmoid(made[:, n : 2 * n] * alpha[1] + beta[n : 2 * n])
        mixing = ((made[:, 2 * n :] * alpha[2] + beta[2 * n :]).view(-1, n, n)).softmax(-1) + 1e-6
        for step in range(self.c["mhc_recur_norm"]):
            mixing = mixing if step == 0 else mixing / (mixing.sum(-1, keepdim=True) + 1e-6)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + 1e-6)
        return torch.einsum("tn,tnh->th", pre, x.unflatten(1, (n, -1))), post, mixing

    def short_convolve(self, x: Tensor, name: str) -> Tensor:
        kernel, out = self.t[f"{name}.weight"][:, 0], x.clone()
        width = kernel.shape[1]
        for token in range(width - 1, len(x)):
            out[token] += (x[token - width + 1 : token + 1].T * kernel).sum(1)
        return out

    def turned(self, x: Tensor) -> Tensor:
        """x [T, heads, R] of tokens 0 .. T - 1."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * self.c["rope_theta"] ** (
            -torch.arange(half) / half
        )
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        if self.c.get("rope_interleave"):
            return torch.view_as_real(
                torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * turn
            ).flatten(-2)
        made = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat((made.real, made.imag), dim=-1)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        a, c, eps, count = f"model.layers.{layer}.self_attn", self.c, self.c["rms_norm_eps"], len(x)
        heads, nope, rotary, rank = (
            c[key]
            for key in (
                "num_attention_heads",
                "qk_nope_head_dim",
                "qk_rope_head_dim",
                "kv_lora_rank",
            )
        )
        q_a = self.short_convolve(x @ self.t[f"{a}.q_a_proj.weight"].T, f"{a}.qa_conv")
        q_a = norm(q_a, self.t[f"{a}.q_a_layernorm.weight"], eps)
        q = (q_a @ self.t[f"{a}.q_b_proj.weight"].T).view(count, heads, -1)
        q = torch.cat((q[..., :nope], self.turned(q[..., nope:])), dim=-1)
        kv = x @ self.t[f"{a}.kv_a_proj_with_mqa.weight"].T
        latent, key = (
            self.short_convolve(kv[:, :rank], f"{a}.compresskv_conv"),
            self.turned(kv[:, None, rank:])[:, 0],
        )
        sinks = c["param_sink_number"]
        if sinks:
            latent = torch.cat((self.t[f"{a}.param_sink_compressed_kv"], latent))
            key = torch.cat((self.t[f"{a}.param_sink_k_pe"], key))
        wide = (
            norm(latent, self.t[f"{a}.kv_a_layernorm.weight"], eps)
            @ self.t[f"{a}.kv_b_proj.weight"].T
        )
        wide = wide.view(len(latent), heads, -1)
        k = torch.cat((wide[..., :nope], key[:, None].expand(-1, heads, -1)), dim=-1)
        scores = torch.einsum("thd,shd->hts", q, k) * (nope + rotary) ** -0.5
        seen = torch.cat(
            (torch.ones(count, sinks, dtype=torch.bool), self.seen(x, q_a, layer)), dim=1
        )
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,shv->thv", shares, wide[..., nope:]).flatten(1)
        return self.short_convolve(out, f"{a}.o_conv") @ self.t[f"{a}.o_proj.weight"].T

    def seen(self, x: Tensor, q_a: Tensor, layer: int) -> Tensor:
        c, count = self.c, len(x)
        at = torch.arange(count)
        causal = at[:, None] >= at
        if layer in c["swa_layers"]:
            window = (c["sliding_window_list"] or [c.get("sliding_window")] * 9)[
                c["swa_layers"].index(layer)
            ]
            return causal & (at[:, None] - at < window)
        if layer not in (c["dsa_layers"] or []) or count <= c["index_topk"]:
            return causal
        p, rotary, dim = (
            f"model.layers.{layer}.self_attn.indexer",
            c["qk_rope_head_dim"],
            c["index_head_dim"],
        )
        q = (q_a @ self.t[f"{p}.wq_b.weight"].T).view(count, -1, dim)
        k = norm(x @ self.t[f"{p}.wk.weight"].T, self.t[f"{p}.k_norm.weight"], 1e-6)[:, None]
        q, k = (
            torch.cat((self.turned(side[..., :rotary]), side[..., rotary:]), dim=-1)
            for side in (q, k)
        )
        products = torch.relu(torch.einsum("thd,sd->ths", q, k[:, 0]))
        scores = torch.einsum(
            "ths,th->ts", products, x @ self.t[f"{p}.weights_proj.weight"].T
        ).masked_fill(~causal, -torch.inf)
        return causal & torch.zeros_like(causal).scatter_(
            1, scores.topk(c["index_topk"]).indices, True
        )

    def feed_forward(self, x: Tensor, layer: int) -> Tensor:
        p, c = f"model.layers.{layer}.mlp", self.c
        if layer < c["first_k_dense_replace"]:
            return self.mlp(x, p)
        scores = torch.sigmoid(x @ self.t[f"{p}.gate.weight"].T)
        chosen = (
            (scores + self.t[f"{p}.gate.e_score_correction_bias"])
            .topk(c["num_experts_per_tok"])
            .indices
        )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        routed = [
            sum(w * self.mlp(row, f"{p}.experts.{int(e)}") for e, w in zip(*one))
            for row, one in zip(x, zip(chosen, weights))
        ]
        return torch.stack(routed) + self.mlp(x, f"{p}.shared_experts")

    def mlp(self, x: Tensor, p: str) -> Tensor:
        gate, up, down = (self.t[f"{p}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_description(case: str) -> None:
    """Texts shorter and longer than windows, kernels and what is selected; layer by layer as
    well."""
    config_dict, lengths = {**TINY, **CASES[case]}, [33, 7, 1, 2, 18]
    architecture, tensors = find_architecture(config_dict), random_tensors(config_dict)
    config: Any = architecture.Config.from_dict(config_dict)
    token_ids = torch.randint(0, 211, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    expected = torch.cat(
        [Statement(config_dict, tensors).logits(own) for own in token_ids.split(lengths)]
    )
    assert expected.abs().max() > 1
    with torch.no_grad():
        model = architecture.Model(config, PlainWeights(tensors))
        whole = model(token_ids, CausalContext(lengths))
        assert (model.logits(whole) - expected).abs().max() < 1e-4 * expected.abs().max()
        hidden = pack_streams(
            expand_streams(tensors["model.embed_tokens.weight"][token_ids], config.mhc_num_stream),
            token_ids,
        )
        for layer in model.layers:
            hidden = layer.feed_forward(
                layer.attend(hidden, CausalContext(lengths)), CausalContext(lengths)
            )
        end = model.end(hidden[:, :-1].unflatten(-1, (config.mhc_num_stream, -1)))
        assert (
            norm(end, model.norm, config.rms_norm_eps) - whole
        ).abs().max() < 1e-4 * whole.abs().max()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("draft_length", "captured", "paused"), [(1, False, False), (3, True, False), (3, True, True)]
)
def test_guesses_are_those_of_the_description(
    draft_length: int, captured: bool, paused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer computed anew over the whole text, one behind the other, gives the guesses that
    the engine makes over its caches, in static buffers too, as graphs have them, and where none
    were wanted for some steps; some of them are right, for the next token follows from the last
    one; and no token is another than without them."""
    monkeypatch.setattr(LoadedModel, "cache_dtype", torch.float32)
    config = {**TINY, "vocab_size": 320}
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith(("post_attention_layernorm.weight", "post_mlp_layernorm.weight")):
            tensors[name] = tensors[name] * 0.1
        elif name.endswith("shared_head.head.weight"):
            tensors[name] = tensors["lm_head.weight"].clone()
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = tensors["model.embed_tokens.weight"] * (
                8 if name == "model.embed_tokens.weight" else 1
            )
        elif name.endswith("enorm.weight") or "shared_head.norm" in name:
            tensors[name] = (
                tensors["model.norm.weight"].clone() if "shared" in name else torch.ones(64)
            )
        elif name.endswith("eh_proj.weight"):
            tensors[name] = torch.cat((torch.eye(64), tensors[name][:, 64:] * 0.1), dim=1)
    source, params = (
        make_model.write_dense(tmp_path / "model", config, tensors),
        SamplingParams(max_new_tokens=14, ignore_eos=True),
    )
    engine = Engine.load(
        source,
        device="cpu",
        dtype="float32",
        max_batch=3,
        max_model_len=128,
        draft_length=draft_length,
        chunk_tokens=25,
    )
    if captured:
        engine.runner = Runner(engine.loaded.model, engine.cache, in_place)
        engine.speculation = Speculation(
            heads := MultiMtpDrafter(
                engine.loaded.mtp_layers, engine.runner, draft_length, engine.parallel
            ),
            0,
        )
    statement, compared = Statement(config, tensors), 0
    prompts = [list(range(10 + i, 14 + 15 * i)) for i in range(3)]
    sequences = [engine.submit(one, params, i) for i, one in enumerate(prompts)]
    steps, unread = 0, 0
    while engine.has_work:
        steps += 1
        if paused:
            engine.speculation.set_lengths(0 if steps % 7 in (0, 3, 4, 5) else draft_length, 0)
        engine.step()
        unread += bool(heads._backlog) if captured else 0
        for one in sequences:
            if one.finish_reason is None and one.drafts:
                ids = torch.tensor([*one.token_ids, *one.drafts])
                states = statement.merged(ids[: len(one.token_ids) - 1])
                for number, guess in enumerate(one.drafts):
                    states, logits = statement.guessed(
                        number, ids[1 + number :][: len(states)], states
                    )
                    assert logits[-1].max() - logits[-1, guess] < 1e-3
                    compared += 1
    assert compared > (10 if paused else 20)
    assert (unread > 5) == paused
    assert 0.1 < engine.speculation.acceptance.rate < 0.95
    plain = Engine.load(source, device="cpu", dtype="float32", max_batch=3, max_model_len=128)
    drawn = [
        SamplingParams(max_new_tokens=14, temperature=0.6 * i, seed=i, ignore_eos=True)
        for i in range(3)
    ]
    expected = {one.index: one.token_ids for one in plain.generate(prompts, drawn)}
    assert {one.index: one.token_ids for one in engine.generate(prompts, drawn)} == expected
    if captured:
        assert [
            (bool(steps._steps), steps.failure)
            for steps in heads.steps
            if isinstance(steps, DecodeSteps)
        ] == [(True, "")] * 3


@pytest.mark.parametrize("case", ["release", "odd"])
def test_folding_a_group_keeps_the_logits(case: str) -> None:
    """Each group lists every reader of its producer, indexers too."""
    config_dict, token_ids = {**TINY, **CASES[case]}, torch.arange(3, 33)
    architecture, tensors = find_architecture(config_dict), random_tensors(config_dict)
    config: Any = architecture.Config.from_dict(config_dict)
    expected, folded = Statement(config_dict, tensors).logits(token_ids), dict(tensors)
    for layer in range(config.num_hidden_layers):
        for group in architecture.scale_groups(config, layer):
            producer = folded[f"{group.producer}.weight"]
            # Powers of two where an indexer reads: nothing is rounded, so no choice can flip.
            by, scale = drawn_scale(
                group, len(producer), lambda count: 2.0 ** torch.randint(-2, 3, (count,))
            )
            folded[f"{group.producer}.weight"] = producer / by.view(-1, *[1] * (producer.dim() - 1))
            for consumer in group.consumers:
                folded[f"{consumer}.weight"] = folded[f"{consumer}.weight"] * scale
    assert (Statement(config_dict, folded).logits(token_ids) - expected).abs().max() < 1e-4


def written(path: Path, **changes: Any) -> Path:
    config = {**TINY, **changes}
    return make_model.write_dense(path, config, random_tensors(config))


def test_a_text_is_the_same_however_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, learned tokens, what is selected and the convolutions' last inputs, over blocks of a
    cache and its states."""
    monkeypatch.setattr(
        LoadedModel, "cache_dtype", torch.float32
    )  # a cache of 16 bits would round what a whole text does not
    loaded = load_model(written(tmp_path / "model", vocab_size=320), device="cpu", dtype="float32")
    assert furthest_from_whole(loaded, random.Random(7)) < 1e-4


def test_steps_that_are_captured_give_the_same_tokens(tmp_path: Path) -> None:
    """Over static buffers, padded in rows and tables, as graphs have them."""
    source, params = (
        written(tmp_path / "model", vocab_size=320),
        SamplingParams(max_new_tokens=6, ignore_eos=True),
    )
    prompts = [list(range(10 + i, 20 + 9 * i)) for i in range(3)]
    engine = Engine.load(source, device="cpu", dtype="float32", max_batch=2, max_model_len=128)
    eager = {one.index: one.token_ids for one in engine.generate(prompts, params)}
    engine.runner = Runner(engine.loaded.model, engine.cache, lambda step, _: step)
    assert {one.index: one.token_ids for one in engine.generate(prompts, params)} == eager
    assert engine.runner.why_eager == ""
    with pytest.raises(QuantkitError, match="--prefix-cache"):
        Engine.load(source, device="cpu", max_batch=1, max_model_len=64, prefix_cache=True)


def test_what_is_not_computed_is_refused() -> None:
    architecture = find_architecture(TINY)
    others: dict[str, Any] = {
        "use_mhc": False,
        "mhc_use_gamma": False,
        "sandwich_norm": False,
        "use_mome": False,
        "param_sink_with_value": True,
        "attn_groupnorm": True,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "hidden_act": "gelu",
        "scoring_func": "softmax",
        "n_group": 2,
        "router_sliding_window": 1,
        "dsa_layers": [0, 0],
        "block_post_layernorm_idx": "all",
        "swa_layers": [0, 1],
        "sliding_window_list": [4],
        "layer_types": ["full_attention"] * 5,
        "index_head_dim": 4,
        "rope_theta": None,
        "mhc_num_stream": 0,
    }
    for key, value in others.items():
        with pytest.raises(QuantkitError, match=key):
            architecture.Config.from_dict({**TINY, key: value})
