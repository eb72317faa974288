"""A forward over whole texts against transformers' own, or a statement of the release: logits, the
layers one by one as calibration walks them, and an MTP layer."""

from types import SimpleNamespace

import torch
from plain_weights import PlainWeights
from torch.nn import functional as F
from ulp_bound import assert_near, movement

from quantkit.models import find_architecture
from quantkit.models.context import CausalContext


def opened(config_dict, tensors):
    """An architecture, its config, and its weights in full precision."""
    architecture = find_architecture(config_dict)
    config = architecture.Config.from_dict(config_dict)
    return architecture, config, PlainWeights(tensors, config.mixture.linears)


@torch.no_grad()
def check_logits(peer, config_dict, tensors, lengths, token_ids=None):
    """Of texts of these lengths side by side: the logits are the peer's, and the table of
    parameters is what it stores. Returns the model, its hidden states and its logits."""
    if token_ids is None:
        seeded = torch.Generator().manual_seed(3)
        token_ids = torch.randint(1, 211, (sum(lengths),), generator=seeded)

    def stated():
        return torch.cat([peer(own[None]).logits[0] for own in token_ids.split(lengths)])

    architecture, config, weights = opened(config_dict, tensors)
    model = architecture.Model(config, weights)
    whole = model(token_ids, CausalContext(lengths))
    logits, expected = model.logits(whole), stated()
    assert expected.abs().max() > 1
    assert_near(logits, expected, movement(stated, peer.parameters()))
    check_layers(model, weights, token_ids, lengths, whole)
    check_table(architecture.parameters(config), tensors)
    return model, whole, logits


@torch.no_grad()
def check_layers(model, weights, token_ids, lengths, whole):
    """One after the other they give what the stack gives, each half by itself where texts may be so
    long: nothing is left in a context then."""
    config, streams, context = model.config, model.config.streams, CausalContext(lengths)

    def own_context():
        return CausalContext(lengths) if config.max_independent_tokens is None else context

    hidden = model.embedding[token_ids]
    if streams is not None:
        hidden = streams.first(hidden, token_ids)
    for layer in model.layers:
        hidden = layer.feed_forward(layer.attend(hidden, own_context()), own_context())
    end = hidden
    if streams is not None:
        end = streams.merged(hidden, weights, model.norm, config.rms_norm_eps)
    if len(model.norm) == end.shape[1]:
        end = F.rms_norm(end, model.norm.shape, model.norm, config.rms_norm_eps)
    assert (end - whole).abs().max() < 1e-4 * max(1, whole.abs().max())


class Statement:
    """A release's forward written out in a test, asked as a model of transformers is. A subclass
    has its tensors by name, `t`, and logits(token_ids [T]) -> [T, V]."""

    def __call__(self, token_ids):
        return SimpleNamespace(logits=self.logits(token_ids[0])[None])

    def parameters(self):
        return self.t.values()


def check_table(rows, tensors):
    """Every tensor has a row of its shape, and every row that must be there a tensor; a peer has no
    MTP layer, and a tied head is none of its own."""
    held = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    table = {row.name: row.shape for row in rows}
    needed = {row.name for row in rows if not (row.optional or row.mtp)}
    assert needed <= held.keys()
    assert {**table, **held} == {**held, **table}
    assert held.keys() - table.keys() <= {"lm_head.weight"}


def mtp_tensors(prefix, hidden, end):
    """Of an MTP layer, what is around its decoder layer. end: the name of its last norm."""
    own = {
        f"{prefix}.{norm}.weight": 1 + torch.randn(hidden) / 4 for norm in ("enorm", "hnorm", end)
    }
    return own | {f"{prefix}.eh_proj.weight": torch.randn(hidden, 2 * hidden) / hidden**0.5}


@torch.no_grad()
def check_mtp(peer, config_dict, tensors, prefix, end, block):
    """As vLLM has such layers: eh_proj of both norms side by side, `block` ([1, T, H]) of the
    peer's modules, a norm of its own, the main model's head. Returns the rows of the layer."""
    architecture, config, weights = opened(config_dict, tensors)
    token_ids, state = torch.randint(1, 211, (31,)), torch.randn(31, config.hidden_size)
    (embedding,) = (
        tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")
    )

    def normed(x, name):
        gain = tensors[f"{prefix}.{name}.weight"]
        return F.rms_norm(x, gain.shape, gain, config.rms_norm_eps)

    def stated():
        both = torch.cat((normed(embedding[token_ids], "enorm"), normed(state, "hnorm")), dim=-1)
        x = block(F.linear(both, tensors[f"{prefix}.eh_proj.weight"])[None])
        return F.linear(normed(x[0], end), tensors["lm_head.weight"])

    mtp = architecture.MtpLayer(config, weights)
    mtp.follow(SimpleNamespace(embedding=embedding, head=weights.linear("lm_head")))
    found = mtp.logits(mtp(token_ids, state, CausalContext([31])))
    assert_near(found, stated(), movement(stated, peer.parameters()))
    return {row.name for row in architecture.parameters(config) if row.mtp}


def causal(tokens):
    """What is added to scores of a text, [1, 1, T, T]."""
    return torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
