import json
import math
import random
import shutil
import warnings

import pytest
import torch
from commands import command
from edited import edited
from refused import refused
from safetensors.torch import load_file, save_file

from quantkit.evaluation.distance.documents import read_documents
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.distance.quality import Sums, summarize
from quantkit.evaluation.options import PerplexityOptions
from quantkit.executor.weights.load import load_model
from quantkit.models.context import CausalContext
from quantkit.tokenizer.chat import ChatTokenizer

TEXTS = [
    "1 + 1 = 2 and 2 + 2 = 4",
    "7 * 8 = 56",
    "a much longer line of words about 12 sheep and 30 goats",
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXTS))
    return path


@pytest.fixture(scope="module")
def changed(tiny_dense_checkpoint, tmp_path_factory):
    """The dense model with one layer's attention output made a little larger."""
    copy = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(tiny_dense_checkpoint, copy)
    name = "model.layers.1.self_attn.o_proj.weight"
    shard = (
        copy / json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"][name]
    )
    tensors = load_file(shard)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, shard, metadata={"format": "pt"})
    return copy


def compared(model, baseline, text, **options):
    return measure(str(model), text, PerplexityOptions(baseline=str(baseline), **options))


def test_a_perplexity_of_texts_that_are_too_long_says_so(tiny_dense_checkpoint, text, tmp_path):
    short = tmp_path / "model"
    shutil.copytree(tiny_dense_checkpoint, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 16, "rope_scaling": None})
    )
    with pytest.warns(UserWarning, match="give --seq-len 16"):
        measure(str(short), text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure(str(short), text, PerplexityOptions(seq_len=16))


def test_a_model_is_no_distance_from_itself(tiny_dense_checkpoint, text):
    told = compared(tiny_dense_checkpoint, tiny_dense_checkpoint, text)
    assert (told.kl, told.top1_agree, told.expert_agree) == (0.0, 1.0, 1.0)
    assert told.baseline_ppl == told.ppl
    assert told.layer_errors == [0.0] * len(told.layer_errors)


def test_a_model_that_computes_no_numbers_fails(tiny_dense_checkpoint, text, tmp_path):
    """Its perplexity was nan, or null in JSON, and the command succeeded."""
    broken = shutil.copytree(tiny_dense_checkpoint, tmp_path / "broken")
    (shard,) = broken.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] = float("nan")
    save_file(tensors, shard)
    for models in ((broken, tiny_dense_checkpoint), (tiny_dense_checkpoint, broken)):
        told = command(
            "ppl", str(models[0]), "--baseline", str(models[1]), "--text", str(text), "--json"
        )
        assert told.code == 1
        assert told.json["kl"] is None
        assert (
            told.error == f"error: the logits of {broken} are NaN; quantkit check names the "
            "damaged tensor"
        )


def test_distance_is_what_the_definitions_say(tiny_dense_checkpoint, changed, text):
    models = [load_model(path) for path in (changed, tiny_dense_checkpoint)]
    tokenizer = ChatTokenizer(changed)
    kl, nll, same, right, tokens = 0.0, 0.0, 0, 0, 0
    for line in TEXTS:
        ids = torch.tensor(tokenizer.encode(line))
        with torch.inference_mode():
            ours, base = (
                one.model.logits(one.model(ids, CausalContext([len(ids)])))[:-1].log_softmax(-1)
                for one in models
            )
        kl += float((base.exp() * (base - ours)).sum())
        nll -= float(ours.gather(1, ids[1:, None]).sum())
        same += int((base.argmax(-1) == ours.argmax(-1)).sum())
        right += int((ours.argmax(-1) == ids[1:]).sum())
        tokens += len(ids) - 1
    told = compared(changed, tiny_dense_checkpoint, text)
    assert (told.tokens, told.ppl) == (tokens, pytest.approx(math.exp(nll / tokens), rel=1e-3))
    assert told.kl == pytest.approx(kl / tokens, rel=2e-2)
    assert told.kl > 0
    alone = measure(str(changed), text)
    assert (alone.ppl, alone.accuracy) == (told.ppl, told.accuracy)
    assert set(alone.to_json()) == {"ppl", "tokens", "documents", "accuracy", "intervals"}
    assert told.accuracy == pytest.approx(right / tokens, abs=1.5 / tokens)
    assert told.top1_agree == pytest.approx(same / tokens, abs=1.5 / tokens)
    assert 0 < told.expert_agree <= 1
    assert told.layer_errors[0] == 0.0
    assert all(error > 1e-3 for error in told.layer_errors[1:])
    assert told.kl_stderr is not None
    ratio = told.ppl / told.baseline_ppl
    assert told.intervals["ppl_ratio"][0] < ratio < told.intervals["ppl_ratio"][1]
    assert [one.first for one in told.positions] == [1, 65, 129, 257][: len(told.positions)]
    assert sum(one.tokens for one in told.positions) == told.tokens
    for name in ("kl", "top1_agree"):
        along = sum(getattr(one, name) * one.tokens for one in told.positions)
        assert along == pytest.approx(getattr(told, name) * told.tokens)


def test_short_passes_give_the_same_figures_as_long_ones(tiny_dense_checkpoint, changed, text):
    longest = max(map(len, TEXTS))
    one, other = (
        compared(changed, tiny_dense_checkpoint, text, seq_len=length) for length in (2048, longest)
    )
    assert other.tokens == one.tokens
    assert other.kl == pytest.approx(one.kl, rel=2e-2)


def test_documents(tiny_dense_checkpoint, tmp_path, text):
    tokenizer = ChatTokenizer(tiny_dense_checkpoint)
    assert [len(ids) for ids in read_documents(text, tokenizer, seq_len=5)] == [5, 5, 5]
    assert len(read_documents(text, tokenizer, seq_len=99, limit=2)) == 2
    plain = tmp_path / "text.txt"
    plain.write_text(" ".join(TEXTS))
    pieces = read_documents(plain, tokenizer, seq_len=8)
    assert torch.cat(pieces).tolist() == tokenizer.encode(" ".join(TEXTS))[: sum(map(len, pieces))]
    chat = tmp_path / "chat.jsonl"
    chat.write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "1 + 1?"},
                    {"role": "assistant", "content": "2"},
                ]
            }
        )
        + "\n"
    )
    assert len(read_documents(chat, tokenizer, seq_len=99)) == 1


def test_a_conversation_is_plain_text_to_a_model_without_a_template(
    tiny_dense_checkpoint, tmp_path
):
    base = shutil.copytree(tiny_dense_checkpoint, tmp_path / "base")
    with edited(base / "tokenizer_config.json") as settings:
        del settings["chat_template"]
    tokenizer, chat = ChatTokenizer(base), tmp_path / "chat.jsonl"
    said = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "reasoning_content": "easy", "content": "2"},
    ]
    chat.write_text(json.dumps({"messages": said}) + "\n")
    assert read_documents(chat, tokenizer, seq_len=99)[0].tolist() == tokenizer.encode(
        "1 + 1?\n\neasy\n\n2"
    )
    chat.write_text(json.dumps({"messages": [{"role": "user"}]}) + "\n")
    with refused(r":1 is not a conversation: messages\[0\] has no content"):
        read_documents(chat, tokenizer, seq_len=99)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "nothing to predict"),
        ("{}\n", ":1 has neither"),
        ("{\n", ":1 is not JSON"),
        ('{"text": ""}\n', "nothing to predict"),
    ],
)
def test_unusable_text_is_named(tiny_dense_checkpoint, tmp_path, content, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with refused(told):
        measure(str(tiny_dense_checkpoint), path)
    with refused("cannot be read"):
        measure(str(tiny_dense_checkpoint), tmp_path / "missing.txt")


def test_models_with_other_tokenizers_are_not_compared(tiny_dense_checkpoint, text):
    with refused("different tokenizers"):
        measure("tiny-r1", text, PerplexityOptions(baseline=str(tiny_dense_checkpoint)))


def test_intervals_hold_the_mean_as_often_as_they_say():
    """Documents of 5 to 60 tokens, whose own means differ."""
    draw, held = random.Random(7), {"ppl": 0, "accuracy": 0, "ppl_ratio": 0, "accuracy_change": 0}
    truth = {"ppl": math.exp(2.0), "accuracy": 0.4, "ppl_ratio": math.exp(0.05)}
    for _ in range(400):
        sums = Sums()
        for _ in range(40):
            tokens, own, share = draw.randint(5, 60), draw.gauss(2.0, 0.3), draw.uniform(0.2, 0.6)
            hits = [draw.random() < share for _ in range(tokens)]
            base = [hit != (draw.random() < 0.02) for hit in hits]
            more = draw.gauss(0.05, 0.05)
            columns = {"nll": [own] * tokens, "base_nll": [own - more] * tokens, "right": hits}
            columns |= {"base_right": base, "kl": [0] * tokens, "same": [1] * tokens}
            sums.documents.append(
                {name: torch.tensor(row).double() for name, row in columns.items()}
            )
        change = 0.4 - (0.4 * 0.98 + 0.6 * 0.02)
        for name, (low, high) in summarize(sums).intervals.items():
            held[name] += low < (truth | {"accuracy_change": change})[name] < high
    assert all(0.91 < times / 400 < 0.98 for times in held.values()), held


def test_kl_along_the_text_is_that_of_the_documents_which_reach_so_far():
    """Three documents whose KL grows with the token's number, the last of 200 tokens."""
    sums = Sums()
    for length in (10, 100, 200):
        places = torch.arange(length, dtype=torch.float64)
        rest = dict.fromkeys(("nll", "base_nll", "right", "base_right"), torch.zeros(length))
        sums.documents.append({"kl": places, "same": (places < 128).double()} | rest)
    first, second, third = summarize(sums).positions
    assert (first.first, first.last, first.tokens) == (1, 64, 138)
    assert (second.first, second.last, second.tokens) == (65, 128, 36 + 64)
    assert second.kl == pytest.approx((sum(range(64, 100)) + sum(range(64, 128))) / 100)
    assert (third.first, third.last, third.tokens, third.kl_stderr) == (129, 200, 72, None)
    assert (first.top1_agree, third.top1_agree) == (1.0, 0.0)
