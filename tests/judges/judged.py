"""Tokens of an engine held against quantkit's: each position given the same tokens before it.

Where two tokens are as likely as BF16 can tell, by the figures of one or the other, either may come
first, and the position is not counted. Nor can BF16 tell two experts apart that the router scores
alike: positions are left out where quantkit's own choice of experts changes when the router's
weights move by a last place of BF16 (`routing_ties`).
"""

import json
from dataclasses import dataclass
from statistics import mean, median

import torch
from checkpoints import TINY_R1
from quantkit_kernels.cpu.units import has_unit
from tokenizers import Tokenizer

from quantkit.evaluation.distance.tracing import TracedModel
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext
from quantkit.models.mlp import MoeMlp

MAX_TOKENS = 24
# a gap of log-probabilities that BF16 may turn around, at least: twice what they differ by,
TIE = 0.15
INT8_TIE = 0.4  # and one that BF16 may where it changes how an activation rounds to int8
# Mean absolute difference of log-probabilities of the five likeliest tokens. Seen: 0.126 with AMX,
# 0.166 on a processor without BF16; controls 2.4 to 3.6.
TOLERANCE = 0.16 if has_unit(torch.bfloat16) else 0.2
# the same where activations round to int8, which models with a small residual stream, the tied
# ones, feel most
INT8_TOLERANCE = 0.25
SAME = 0.97  # of mixtures of experts: share of the counted positions with the same token,
MEDIAN = 0.1  # and median difference of the log-probabilities,
ROUNDED_MEDIAN = 0.2  # but where activations are rounded


@dataclass(frozen=True)
class Verdict:
    """compared: positions without a near tie; equal: those with the same token. difference: as
    TOLERANCE, and its median by position."""

    compared: int
    equal: int
    difference: float
    median: float

    def passed(self, *, int8):
        """Of a dense model: every token is the same."""
        limit = INT8_TOLERANCE if int8 else TOLERANCE
        return self.compared > 0 and self.equal == self.compared and self.difference < limit

    def mixture_passed(self, *, rounded, least=1):
        """Of a mixture of experts, of which at least so many positions are counted."""
        limit = ROUNDED_MEDIAN if rounded else MEDIAN
        enough = self.compared >= least and self.equal >= SAME * self.compared
        return enough and self.median < limit

    def __str__(self):
        return (
            f"{self.equal} of {self.compared} tokens, log-probabilities differ by "
            f"{self.median:.4f}, {self.difference:.4f} in the mean"
        )


def prompts_of(model):
    """Token ids: of text for the model that is trained."""
    if model != "tiny-r1":
        draw = torch.Generator().manual_seed(3)
        return [torch.randint(8, 320, (n,), generator=draw).tolist() for n in (5, 12, 20, 33)]
    tokenizer = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json"))
    lines = (TINY_R1 / "calibration.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:4]]
    return [tokenizer.encode(text).ids[:length] for text, length in zip(texts, (8, 16, 24, 40))]


@torch.inference_mode()
def log_probabilities(path, sequences):
    """quantkit's own, float32 [tokens, vocab] a sequence, computed whole."""
    loaded = load_model(path, device="cpu", dtype="bfloat16")
    flat = torch.tensor([token for sequence in sequences for token in sequence])
    lengths = [len(sequence) for sequence in sequences]
    hidden = loaded.model(flat, CausalContext(lengths))
    return list(loaded.model.logits(hidden).log_softmax(-1).split(lengths))


def judge(path, asked, answers, *, int8, mixture):
    """Of the checkpoint at `path`, of which the engine gave these answers."""
    sequences = [prompt + answer["tokens"] for prompt, answer in zip(asked, answers)]
    uncounted = routing_ties(path, sequences) if mixture else None
    differences = []
    gaps = []
    for number, table in enumerate(log_probabilities(path, sequences)):
        answer = answers[number]
        for step, token in enumerate(answer["tokens"]):
            position = len(asked[number]) - 1 + step
            if uncounted is not None and uncounted[number][position]:
                continue
            likely, told = table[position], answer["logprobs"][step]
            differences.append(mean(abs(float(likely[other]) - value) for other, value in told))
            theirs = sorted((value for _, value in told), reverse=True)[:2]
            gap = min(one - other for one, other in (likely.topk(2).values.tolist(), theirs))
            gaps.append((gap, int(likely.argmax()) == token))
    tie = max(INT8_TIE if int8 else TIE, 2 * min(mean(differences), TOLERANCE))
    counted = [is_equal for gap, is_equal in gaps if gap >= tie]
    return Verdict(len(counted), sum(counted), mean(differences), median(differences))


@torch.inference_mode()
def routing_ties(path, sequences):
    """bool [tokens] a sequence: where the experts of any layer change in FP32, or with router
    weights moved by a last place of BF16."""
    documents = [torch.tensor(sequence) for sequence in sequences]
    chosen = [_chosen(TracedModel(load_model(path, device="cpu", dtype="float32")), documents)]
    loaded = load_model(path, device="cpu", dtype="bfloat16")
    mixtures = [layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, MoeMlp)]
    routers = [mlp.router for mlp in mixtures]
    watched = TracedModel(loaded)
    chosen.append(_chosen(watched, documents))
    for seed in range(3):
        for mlp, router in zip(mixtures, routers):
            sign = torch.randn(router.shape, generator=torch.Generator().manual_seed(seed)).sign()
            mlp.router = router * (1 + sign * 2**-8)
        chosen.append(_chosen(watched, documents))
    changed = torch.stack([(other != chosen[0]).any(1) for other in chosen[1:]]).any(0)
    return list(changed.split([len(sequence) for sequence in sequences]))


def _chosen(watched, documents):
    """int64 [tokens, layers x experts a token]: the experts that each token gets, sorted in each
    layer."""
    experts = watched(documents).topk_ids
    return torch.cat([ids.sort(1).values for ids in experts.values()], dim=1)
