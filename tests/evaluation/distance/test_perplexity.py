"""Perplexity, and distance from a baseline: what the definitions say, on texts, on windows over a text
as the usual recipe of transformers takes them, and on what the source writes itself."""

import json
import math
import random
import shutil
import warnings

import pytest
import torch
from commands import typed
from edited import edited, edited_tensor
from refused import refused

from quantkit.evaluation.distance import perplexity
from quantkit.evaluation.distance.documents import read_documents, sliding_windows
from quantkit.evaluation.distance.perplexity import measure
from quantkit.evaluation.distance.quality import Sums, summarize
from quantkit.evaluation.distance.replies import read_replies
from quantkit.evaluation.distance.tracing import open_traced
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
    copy = shutil.copytree(tiny_dense_checkpoint, tmp_path_factory.mktemp("changed") / "model")
    with edited_tensor(copy, "model.layers.1.self_attn.o_proj.weight") as weight:
        weight *= 1.5
    return copy


def compared(model, baseline, text, **options):
    return measure(str(model), text, PerplexityOptions(baseline=str(baseline), **options))


def test_a_perplexity_of_texts_that_are_too_long_says_so(tiny_dense_checkpoint, text, tmp_path):
    short = shutil.copytree(tiny_dense_checkpoint, tmp_path / "model")
    with edited(short / "config.json") as config:
        config |= {"max_position_embeddings": 16, "rope_scaling": None}
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
    with edited_tensor(broken, "model.layers.1.self_attn.o_proj.weight") as weight:
        weight[0, 0] = float("nan")
    for one, other in ((broken, tiny_dense_checkpoint), (tiny_dense_checkpoint, broken)):
        told = typed(f"ppl {one} --baseline {other} --text {text} --json")
        assert (told.code, told.json["kl"]) == (1, None)
        assert f"the logits of {broken} are NaN; quantkit check names the damaged" in told.error


def test_distance_is_what_the_definitions_say(tiny_dense_checkpoint, changed, text):
    models = [load_model(path).model for path in (changed, tiny_dense_checkpoint)]
    tokenizer, ours, base, next_ids = ChatTokenizer(changed), [], [], []
    for ids in (torch.tensor(tokenizer.encode(line)) for line in TEXTS):
        next_ids.append(ids[1:])
        for model, found in zip(models, (ours, base), strict=True):
            with torch.inference_mode():
                logits = model.logits(model(ids, CausalContext([len(ids)])))
            found.append(logits[:-1].log_softmax(-1))
    ours, base, next_ids = map(torch.cat, (ours, base, next_ids))
    nll, tokens = -float(ours.gather(1, next_ids[:, None]).mean()), len(next_ids)
    told = compared(changed, tiny_dense_checkpoint, text)
    assert (told.tokens, told.ppl) == (tokens, pytest.approx(math.exp(nll), rel=1e-3))
    kl = float((base.exp() * (base - ours)).sum(-1).mean())
    assert 0 < told.kl == pytest.approx(kl, rel=2e-2)
    alone = measure(str(changed), text)
    assert (alone.ppl, alone.accuracy) == (told.ppl, told.accuracy)
    assert set(alone.to_json()) == {"ppl", "tokens", "documents", "accuracy", "intervals"}
    for found, same in ((told.accuracy, next_ids), (told.top1_agree, base.argmax(-1))):
        share = (ours.argmax(-1) == same).double().mean()
        assert found == pytest.approx(float(share), abs=1.5 / tokens)
    assert 0 < told.expert_agree <= 1
    assert told.layer_errors[0] == 0.0
    assert all(error > 1e-3 for error in told.layer_errors[1:])
    assert told.kl_stderr is not None
    low, high = told.intervals["ppl_ratio"]
    assert low < told.ppl / told.baseline_ppl < high
    assert sum(one.tokens for one in told.positions) == told.tokens
    for name in ("kl", "top1_agree"):
        along = sum(getattr(one, name) * one.tokens for one in told.positions)
        assert along == pytest.approx(getattr(told, name) * told.tokens)


def test_layers_of_a_long_text_are_compared_at_its_beginning(
    tiny_dense_checkpoint, changed, monkeypatch
):
    """Of documents of 20 tokens, one in a pass: the second begins after the first 20 tokens."""
    texts = [torch.arange(5, 25), torch.arange(30, 50)]
    whole = compared(changed, tiny_dense_checkpoint, texts, seq_len=20)
    begun = compared(changed, tiny_dense_checkpoint, texts[:1], seq_len=20)
    monkeypatch.setattr(perplexity, "_TRACED_TOKENS", 20)
    told = compared(changed, tiny_dense_checkpoint, texts, seq_len=20)
    assert (told.kl, told.tokens) == (whole.kl, whole.tokens)
    assert told.layer_errors == begun.layer_errors != whole.layer_errors
    assert told.expert_agree == begun.expert_agree


def test_documents(tiny_dense_checkpoint, tmp_path, text):
    tokenizer = ChatTokenizer(tiny_dense_checkpoint)
    assert [len(ids) for ids in read_documents(text, tokenizer, seq_len=5)] == [5, 5, 5]
    assert len(read_documents(text, tokenizer, seq_len=99, limit=2)) == 2
    plain, chat = tmp_path / "text.txt", tmp_path / "chat.jsonl"
    plain.write_text(" ".join(TEXTS))
    pieces = torch.cat(read_documents(plain, tokenizer, seq_len=8))
    assert pieces.tolist() == tokenizer.encode(" ".join(TEXTS))[: len(pieces)]
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    chat.write_text(json.dumps({"messages": said}) + "\n")
    assert len(read_documents(chat, tokenizer, seq_len=99)) == 1
    table = tmp_path / "texts.csv"
    table.write_text('id,text\n1,"one, two"\n2,three\n')
    found = [ids.tolist() for ids in read_documents(table, tokenizer, seq_len=99)]
    assert found == [tokenizer.encode("one, two"), tokenizer.encode("three")]


def test_a_conversation_is_plain_text_to_a_model_without_a_template(
    tiny_dense_checkpoint, tmp_path
):
    base = shutil.copytree(tiny_dense_checkpoint, tmp_path / "base")
    with edited(base / "tokenizer_config.json") as settings:
        del settings["chat_template"]
    tokenizer, chat = ChatTokenizer(base), tmp_path / "chat.jsonl"
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    said[1]["reasoning_content"] = "easy"
    chat.write_text(json.dumps({"messages": said}) + "\n")
    (found,) = read_documents(chat, tokenizer, seq_len=99)
    assert found.tolist() == tokenizer.encode("1 + 1?\n\neasy\n\n2")
    chat.write_text(json.dumps({"messages": [{"role": "user"}]}) + "\n")
    with refused(r":1 is not a conversation: messages\[0\] has no content"):
        read_documents(chat, tokenizer, seq_len=99)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "nothing to predict"),
        ("{}\n", ":1 has neither"),
        ("{\n", ":1 is not JSON"),
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
    draw = random.Random(7)
    truth = {"ppl": math.exp(2.0), "accuracy": 0.4, "ppl_ratio": math.exp(0.05)}
    truth["accuracy_change"] = 0.4 - (0.4 * 0.98 + 0.6 * 0.02)
    held = dict.fromkeys(truth, 0)
    for _ in range(400):
        sums = Sums()
        for _ in range(40):
            tokens, own, share = draw.randint(5, 60), draw.gauss(2.0, 0.3), draw.uniform(0.2, 0.6)
            hits = [draw.random() < share for _ in range(tokens)]
            base = [hit != (draw.random() < 0.02) for hit in hits]
            nll, more = torch.full((tokens,), own).double(), draw.gauss(0.05, 0.05)
            columns = {"nll": nll, "base_nll": nll - more, "kl": nll * 0, "same": nll * 0 + 1}
            columns |= {"right": torch.tensor(hits).double()}
            sums.documents.append(columns | {"base_right": torch.tensor(base).double()})
        for name, (low, high) in summarize(sums).intervals.items():
            held[name] += low < truth[name] < high
    assert all(0.91 < times / 400 < 0.98 for times in held.values()), held


def test_kl_along_the_text_is_that_of_the_documents_which_reach_so_far():
    """Three documents whose KL grows with the token's number, the last of 200 tokens."""
    sums = Sums()
    for length in (10, 100, 200):
        places = torch.arange(length, dtype=torch.float64)
        rest = dict.fromkeys(("nll", "base_nll", "right", "base_right"), torch.zeros(length))
        sums.documents.append({"kl": places, "same": (places < 128).double()} | rest)
    found = summarize(sums).positions
    counted = [(one.first, one.last, one.tokens) for one in found]
    ends = [(1, 16, 42), (17, 32, 32), (33, 64, 64), (65, 128, 36 + 64), (129, 200, 72)]
    assert counted == ends
    assert found[3].kl == pytest.approx((sum(range(64, 100)) + sum(range(64, 128))) / 100)
    assert [found[0].top1_agree, found[4].top1_agree] == [1.0, 0.0]
    assert [one.documents for one in found] == [3, 2, 2, 2, 1]
    low, high = found[3].intervals["kl"]
    assert low < found[3].kl < high
    assert (found[4].kl_stderr, found[4].intervals) == (None, {})


def store(folder, replies):
    """A results folder with these samples: of problem p0, p1, ..., or of the `problem` given."""
    folder.mkdir()
    told = {
        "task": "t",
        "repeat": 0,
        "correct": True,
        "reason": "right",
        "answer": "1",
        "detail": "",
    }
    rows = [
        {"problem": f"p{n}", "completion_tokens": 1} | told | one for n, one in enumerate(replies)
    ]
    asked = {"task": "t", "prompt": [{"role": "user", "content": "1 + 1?"}]}
    prompts = [asked | {"problem": name} for name in sorted({row["problem"] for row in rows})]
    for name, lines in (("samples", rows), ("prompts", prompts)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_models_own_chains_show_where_damage_begins(tiny_dense_checkpoint, tmp_path, monkeypatch):
    """Replies of 5 to 100 tokens; the model is disturbed from token 33 of each on."""
    tokenizer = ChatTokenizer(tiny_dense_checkpoint)
    prompt = len(tokenizer.encode_chat([{"role": "user", "content": "1 + 1?"}]))
    whole = [" ".join(map(str, range(count))) for count in (3, 20, 40)]
    replies = [{"text": one, "prompt_tokens": prompt} for one in whole]
    more = [{"text": "", "reason": "error"}, {"text": "again", "problem": "p0", "repeat": 1}]
    folder, opened = store(tmp_path / "run", replies + more), list[str]()

    def disturbed(*given):
        opened.append(given[0])
        traced = open_traced(*given)
        if len(opened) == 1:
            return traced

        class Late:
            device, head = traced.device, staticmethod(traced.head)

            def __call__(self, documents):
                trace, start = traced(documents), 0
                for ids in documents:
                    trace.final[start + prompt - 1 + 32 : start + len(ids)] *= -1
                    start += len(ids)
                return trace

        return Late()

    monkeypatch.setattr(perplexity, "open_traced", disturbed)
    told = compared(tiny_dense_checkpoint, tiny_dense_checkpoint, folder, out=tmp_path / "out")
    lengths = [len(tokenizer.encode_rendered(one)) for one in whole]
    assert max(lengths) > 64
    assert (told.tokens, told.documents) == (sum(lengths), 3)
    for one in told.positions:
        assert one.tokens == sum(max(0, min(n, one.last) - one.first + 1) for n in lengths)
        assert (one.kl > 0.1, one.top1_agree < 0.5) == (one.first > 32,) * 2
    assert json.loads((tmp_path / "out/ppl.json").read_text())["positions"][0]["kl"] == 0
    page = (tmp_path / "out/ppl.html").read_text()
    assert page.count("<svg") == 3
    assert '<td class="n">33 to 64</td>' in page


def test_reasoning_that_a_server_kept_apart_is_put_back(tiny_dense_checkpoint, tmp_path):
    """The template opens <think>, so a reply begins inside; one was cut there, one has no reasoning."""
    replies = [{"reasoning": "1 + 1 = 2.\n", "text": "\n2", "finish_reason": "stop"}]
    replies += [
        {"reasoning": "1 +", "text": "", "finish_reason": "length"},
        {"text": "2</think>\n"},
    ]
    tokenizer = ChatTokenizer(tiny_dense_checkpoint)
    windows = read_replies(store(tmp_path / "run", replies), tokenizer, None)
    written = ["1 + 1 = 2.\n</think>\n\n2", "1 +", "2</think>\n"]
    assert [scored(one) for one in windows] == [tokenizer.encode_rendered(one) for one in written]


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        ([{"text": ""}], "has no reply with a text"),
        ([{"text": "2", "prompt_tokens": 999}], "p0 had 999 tokens and has"),
        ([{"text": 2}], "samples.jsonl:1"),
    ],
)
def test_replies_that_cannot_be_scored_are_named(tiny_dense_checkpoint, tmp_path, replies, told):
    folder = store(tmp_path / "run", replies)
    with refused(told):
        measure(str(tiny_dense_checkpoint), folder)
    (folder / "prompts.jsonl").unlink()
    with refused(r"has no prompts\.jsonl"):
        measure(str(tiny_dense_checkpoint), folder)
    with refused("scored whole"):
        measure(str(tiny_dense_checkpoint), folder, PerplexityOptions(stride=5))


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
    length, text = 12, tmp_path / "text.txt"
    text.write_text("1 + 1 = 2 and 2 + 2 = 4, while 7 * 8 = 56 and 30 goats are 12 sheep less")
    options = PerplexityOptions(seq_len=length, stride=stride)
    told = measure(str(tiny_dense_checkpoint), text, options)
    model = load_model(tiny_dense_checkpoint).model
    ids = torch.tensor(ChatTokenizer(tiny_dense_checkpoint).encode(text.read_text()))
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        labels = ids[begin:end].clone()
        labels[: -(end - before)] = -100
        logits = model.head(model(ids[begin:end], CausalContext([end - begin]))).float()[:-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum"))
        count, before = count + int((labels[1:] != -100).sum()), end
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
