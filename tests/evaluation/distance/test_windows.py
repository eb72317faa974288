"""Windows over a text: every token scored once, as the usual recipe of transformers does it; and
texts that the source writes itself."""

import math

import pytest
import torch
from refused import refused

from quantkit.evaluation.distance.documents import sliding_windows
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.options import PerplexityOptions
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext
from quantkit.tokenizer.chat import ChatTokenizer


def scored(window):
    return window.ids[window.first :].tolist()


@pytest.mark.parametrize(
    ("tokens", "length", "stride"),
    [(100, 16, 5), (100, 16, 15), (33, 16, 8), (16, 16, 4), (5, 16, 4), (18, 16, 16)],
)
def test_windows_score_every_token_but_first_ones_once(tokens, length, stride):
    windows = list(sliding_windows(torch.arange(tokens), length, stride))
    seen = [token for window in windows for token in scored(window)]
    assert seen == [
        token for token in range(tokens) if token and (stride < length or token % length)
    ]
    assert all(len(window.ids) <= length for window in windows)
    for window in windows[1:]:
        assert stride == length or window.first >= length - stride


@pytest.mark.parametrize("stride", [0, 17])
def test_a_stride_that_does_not_fit_is_refused(stride):
    with refused("stride"):
        list(sliding_windows(torch.arange(20), 16, stride))


@torch.inference_mode()
@pytest.mark.parametrize("stride", [5, 12])
def test_perplexity_is_that_of_the_usual_recipe(stride, tiny_dense_checkpoint, tmp_path):
    """The loop of transformers' page on perplexity over the same logits: labels of what was scored
    before are -100."""
    length = 12
    (tmp_path / "text.txt").write_text(
        "1 + 1 = 2 and 2 + 2 = 4, while 7 * 8 = 56 and 30 goats are 12 sheep less"
    )
    told = measure(
        str(tiny_dense_checkpoint),
        tmp_path / "text.txt",
        PerplexityOptions(seq_len=length, stride=stride),
    )
    loaded = load_model(tiny_dense_checkpoint)
    ids = torch.tensor(
        ChatTokenizer(tiny_dense_checkpoint).encode((tmp_path / "text.txt").read_text())
    )
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        labels = ids[begin:end].clone()
        labels[: -(end - before)] = -100
        hidden = loaded.model(ids[begin:end], CausalContext([end - begin], loaded.device))
        logits = loaded.model.head(hidden).float()[:-1]
        losses = torch.nn.functional.cross_entropy(
            logits, labels[1:], reduction="none", ignore_index=-100
        )
        total, count, before = (
            total + float(losses.double().sum()),
            count + int((labels[1:] != -100).sum()),
            end,
        )
        if end == len(ids):
            break
    assert told.tokens == count
    assert told.ppl == pytest.approx(math.exp(total / count), rel=1e-5)


def test_distance_on_what_the_source_writes(tiny_checkpoint, tiny_dense_checkpoint):
    options = {"sampled": "tiny-math", "limit": 3, "max_tokens": 6, "device": "cpu"}
    same = measure(
        str(tiny_checkpoint), options=PerplexityOptions(baseline=str(tiny_checkpoint), **options)
    )
    assert (same.kl, same.greedy.same, same.greedy.prompts) == (pytest.approx(0, abs=1e-6), 1.0, 3)
    assert 3 <= same.tokens <= 18, "replies are scored, prompts are not"
    other = measure(
        str(tiny_checkpoint),
        options=PerplexityOptions(baseline=str(tiny_dense_checkpoint), **options),
    )
    assert other.kl > 0
    assert other.to_json()["greedy"]["prompts"] == 3


def test_what_is_asked_for_must_be_one_thing(tiny_checkpoint, tmp_path):
    with refused("either a text or a task"):
        measure(str(tiny_checkpoint))
    with refused("either a text or a task"):
        measure(str(tiny_checkpoint), tmp_path / "x.txt", PerplexityOptions(sampled="tiny-math"))
    with refused("needs a model that samples"):
        measure(str(tiny_checkpoint), options=PerplexityOptions(sampled="tiny-math"))
