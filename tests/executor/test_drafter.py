"""Guessing with the MTP layer changes how many tokens a step brings, and no token."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import make_model
import pytest
import torch

from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.decode_batch import DevicePositions, next_rows
from quantkit.executor.runner.runner import Runner
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.speculation.drafter import DeviceAcceptance, Drafter
from quantkit.executor.speculation.mtp_drafter import make_mtp_drafter
from quantkit.executor.speculation.speculation import Speculation

PROMPTS = [list(range(6 + i, 30 + 3 * i)) for i in range(6)]


def load(path: Path, **options: int) -> Engine:
    return Engine.load(
        path, device="cpu", dtype="float32", **{"max_batch": 4, "max_model_len": 128, **options}
    )


def tokens(engine: Engine, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [
        done.token_ids
        for done in sorted(engine.generate(PROMPTS, params), key=lambda done: done.index)
    ]


@pytest.mark.parametrize("draft_length", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_plain_decoding(
    easy_checkpoint: Path, draft_length: int, temperature: float
) -> None:
    params = [
        SamplingParams(
            max_new_tokens=20 + i, temperature=temperature, top_p=0.9, seed=i, ignore_eos=True
        )
        for i in range(6)
    ]
    drafting = load(easy_checkpoint, draft_length=draft_length)
    assert tokens(drafting, params) == tokens(load(easy_checkpoint), params)
    assert 0.2 < drafting.speculation.acceptance.rate < 1, (
        "all or no guesses are right: the test tests half"
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_are_the_same_however_they_are_computed(
    easy_checkpoint: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a host that waits for the first, as for an NPU; in one chain, which the host waits for
    once a step; over static buffers."""
    params = [
        SamplingParams(max_new_tokens=20 + 7 * i, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(6)
    ]
    found, waited = [], Counter[str]()
    agree = Parallel.agree

    def counted(self: Parallel, x: torch.Tensor) -> list[int]:
        waited[kind] += 1
        return agree(self, x)

    monkeypatch.setattr(Parallel, "agree", counted)
    for kind in ("waits", "chain", "captured"):
        engine = load(easy_checkpoint, draft_length=3)
        if kind == "captured":
            engine.runner = Runner(engine.loaded.model, engine.cache, lambda step, _: step)
            engine.speculation = Speculation(
                make_mtp_drafter(engine.loaded.mtp_layers, engine.runner, 3, engine.parallel), 0
            )
        drafter = engine.speculation.drafter
        assert isinstance(drafter, Drafter)
        assert not drafter.waits
        drafter.waits = kind == "waits"
        found.append((tokens(engine, params), vars(engine.speculation.acceptance)))
    assert found[0] == found[1] == found[2]
    assert waited["chain"] == waited["captured"] < 0.6 * waited["waits"]


def test_the_device_finds_what_the_host_will_keep(easy_checkpoint: Path) -> None:
    draw, tokenizer = random.Random(5), load(easy_checkpoint).tokenizer
    for _ in range(40):
        counts, chosen = [], list[int]()
        for index in range(draw.randrange(1, 5)):
            one = Sequence(
                index,
                [1] * draw.randrange(1, 9),
                SamplingParams(ignore_eos=True),
                tokenizer,
                64,
                streams=False,
            )
            one.drafts = [draw.randrange(2) for _ in range(draw.randrange(4))]
            counts.append((one, 1 + len(one.drafts)))
            chosen += [draw.randrange(2) for _ in range(counts[-1][1])]
        found, row = DeviceAcceptance.of(counts, torch.tensor(chosen)), 0
        for place, (one, count) in enumerate(counts):
            before = len(one.token_ids)
            kept = one.extend(chosen[row : row + count], 1.0)
            assert (int(found.accepted[place]), int(found.rows[place])) == (
                kept - 1,
                row + kept - 1,
            )
            assert int(found.newest[place]) == before + kept - 1 == len(one.token_ids) - 1
            row += count


def test_the_next_rows_are_those_that_the_host_would_make() -> None:
    """Every sequence's newest token, which was chosen behind its last right guess, and the new
    guesses, in its own blocks."""
    draw, size = random.Random(7), 4
    for _ in range(30):
        number, each = draw.randrange(1, 5), draw.randrange(1, 4)
        known, chosen, right, row = [], list[int](), [], 0
        guesses = [[draw.randrange(90) for _ in range(number)] for _ in range(each - 1)]
        for _ in range(number):
            count, length = draw.randrange(1, 4), draw.randrange(1, 9)
            known.append([row, length, *draw.sample(range(1, 50), 5)])
            chosen += [draw.randrange(90) for _ in range(count)]
            right.append(draw.randrange(count))
            row += count
        told = torch.tensor([*right, *(token for one in guesses for token in one)])
        found = next_rows(torch.tensor(known, dtype=torch.int32), torch.tensor(chosen), told, size)
        expected = []
        for one, (first, length, *blocks) in enumerate(known):
            tokens = [chosen[first + right[one]], *(own[one] for own in guesses)]
            places = [length + right[one] + i for i in range(each)]
            expected += [
                [token, at, blocks[at // size] * size + at % size]
                for token, at in zip(tokens, places)
            ]
        assert found.t().tolist() == expected


@pytest.mark.parametrize("captured", [False, True])
def test_behind_a_step_the_layer_goes_on_with_the_newest_rows_alone(
    easy_checkpoint: Path, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache gets all of them; experts and head are asked for one row of a sequence."""
    engine = load(easy_checkpoint, draft_length=2)
    if captured:
        engine.runner = Runner(engine.loaded.model, engine.cache, lambda step, _: step)
        engine.speculation = Speculation(
            make_mtp_drafter(engine.loaded.mtp_layers, engine.runner, 2, engine.parallel), 0
        )
    layer, seen = engine.loaded.mtp_layers[0], list[tuple[int, int]]()
    attention, mlp = type(layer.block).attention_part, type(layer.block).mlp_part

    def attended(self: Any, x: torch.Tensor, context: Any) -> torch.Tensor:
        if self is layer.block:
            seen.append((len(x), 0))
        return attention(self, x, context)

    def fed(self: Any, x: torch.Tensor) -> Any:
        if self is layer.block:
            seen[-1] = (seen[-1][0], len(x))
        return mlp(self, x)

    monkeypatch.setattr(type(layer.block), "attention_part", attended)
    monkeypatch.setattr(type(layer.block), "mlp_part", fed)
    sequences = [
        engine.submit(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True))
        for prompt in PROMPTS[:4]
    ]
    for _ in range(4):
        engine.step()
    rows = sum(1 + len(one.drafts) for one in sequences)
    assert rows == 12, "two guesses behind each"
    seen.clear()
    engine.step()
    # A captured step is padded to a power of two.
    assert seen == [(16, 4), (4, 4)] if captured else [(12, 4), (4, 4)]


def test_places_that_are_nobodys_lie_in_block_0() -> None:
    """Behind the last block, behind the blocks of a sequence, and from the reach on; and nothing is
    read beyond the tables."""
    tables = torch.tensor([[5, 7], [3, 0]], dtype=torch.int32)
    found = DevicePositions.of(torch.tensor([9, 3]), tables, 8, 1000)
    assert (found.positions.tolist(), found.slots.tolist()) == ([9, 3], [7 * 8 + 1, 3 * 8 + 3])
    found = DevicePositions.of(torch.tensor([17, 12]), tables, 8, 1000)
    assert (found.positions.tolist(), found.slots.tolist()) == ([15, 12], [1, 4])
    found = DevicePositions.of(torch.tensor([9, 6]), tables, 8, 6)
    assert (found.positions.tolist(), found.slots.tolist()) == ([5, 5], [1, 6])


def test_guesses_save_steps(easy_checkpoint: Path) -> None:
    engine = load(easy_checkpoint, draft_length=2)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    sequence = engine.submit(PROMPTS[0], params)
    steps = 0
    while not sequence.finish_reason:
        engine.step()
        steps += 1
    assert len(sequence.generated) == 40
    assert steps == 40 - engine.speculation.acceptance.accepted


def test_with_chunks_preemption_stops_and_the_end_of_the_context(easy_checkpoint: Path) -> None:
    plain = load(easy_checkpoint)
    long = SamplingParams(max_new_tokens=250, ignore_eos=True)
    expected = tokens(plain, long)
    tight = load(easy_checkpoint, draft_length=3, cache_tokens=320, chunk_tokens=7)
    assert tokens(tight, long) == expected
    assert tight.scheduler.num_preempted > 0
    assert tight.scheduler.allocator.num_free == tight.scheduler.allocator.num_blocks
    eos = frozenset({expected[0][11]})
    plain.tokenizer.eos_ids = tight.tokenizer.eos_ids = eos
    params = SamplingParams(max_new_tokens=30)
    assert tokens(tight, params) == tokens(plain, params)


def test_logprobs_belong_to_the_kept_tokens(easy_checkpoint: Path) -> None:
    params = SamplingParams(max_new_tokens=15, logprobs=1, ignore_eos=True)
    plain, drafting = (
        next(iter(load(easy_checkpoint, draft_length=n).generate(PROMPTS[:1], params)))
        for n in (0, 2)
    )
    assert drafting.logprobs is not None
    assert plain.logprobs is not None
    assert [one.token_id for one in drafting.logprobs] == drafting.token_ids
    for ours, theirs in zip(drafting.logprobs, plain.logprobs):
        assert abs(ours.logprob - theirs.logprob) < 1e-3


def test_guesses_follow_the_mtp_layer(tiny_checkpoint: Path) -> None:
    """The first guess is the argmax of a plain causal pass of the layer over the whole prompt."""
    from quantkit.models.context import CausalContext

    engine = load(tiny_checkpoint, draft_length=1)
    sequence = engine.submit(PROMPTS[2], SamplingParams(max_new_tokens=9, ignore_eos=True))
    engine.step()
    with torch.inference_mode():
        ids = torch.tensor(sequence.token_ids)
        context = CausalContext([len(ids) - 1])
        hidden = engine.loaded.mtp_layers[0](
            ids[1:], engine.loaded.model(ids[:-1], context), context
        )
        logits = engine.loaded.mtp_layers[0].logits(hidden)[-1]
    assert logits.max() - logits[sequence.drafts[0]] < 0.03


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    config = make_model.tiny_config(num_nextn_predict_layers=0)
    make_model.write_dense(tmp_path / "none", config, make_model.random_tensors(config))
    with pytest.raises(QuantkitError, match="no MTP layer"):
        load(tmp_path / "none", draft_length=1)
    make_model.write_dense(
        tmp_path / "dropped", make_model.tiny_config(), make_model.random_tensors(config)
    )
    with pytest.raises(
        QuantkitError,
        match="promises MTP layer 3, of which no tensor is stored: left out; run without drafts",
    ):
        load(tmp_path / "dropped", draft_length=1)
