"""Ranks that answer requests of their own and share the routed experts answer what one rank
answers."""

import math
import os
from dataclasses import replace

import good_checkpoints
import make_model
import pytest
import tiny_models
import torch
from forked_ranks import run_ranks
from refused import refused

from quantkit import Engine, SamplingParams
from quantkit.checkpoint.hub import find_model
from quantkit.executor.cache.cache import CachePlan
from quantkit.executor.memory_budget import plan_kv_cache
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.parallel import SINGLE, Parallel, join
from quantkit.executor.runner.runner import Runner
from quantkit.executor.sampling.grammar import regex
from quantkit.executor.scheduler.data_parallel import DataParallelScheduler, DpPadding
from quantkit.executor.scheduler.scheduler import Scheduler, StepBudget
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.weights.load import load_model
from quantkit.grids.schemes import find_scheme
from quantkit.models.stored_parameters import read_model
from quantkit.planning.options import PlanOptions
from quantkit.planning.plan import plan
from quantkit.tokenizer.chat import ChatTokenizer

PROMPTS = [list(range(10 + i, 40 + 20 * i)) for i in range(7)]
PLAIN = [
    SamplingParams(max_new_tokens=8 + 2 * i, temperature=(i % 2) * 0.8, seed=i, ignore_eos=True)
    for i in range(7)
]
PARAMS = [
    replace(PLAIN[0], logprobs=1),
    replace(PLAIN[1], min_p=0.01, stop_token_ids=(319,), min_new_tokens=3, prompt_logprobs=1),
    replace(PLAIN[2], presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((40, 2.0),)),
    replace(PLAIN[3], grammar=regex("[a-z]{12,}"), logprobs=0, prompt_logprobs=0),
    *PLAIN[4:],
]


def load(path, dp, **options):
    """Two requests together on a rank, whose cache holds no more."""
    cache = {
        "max_model_len": 192,
        "cache_tokens": 256 * dp,
        "prefix_cache": True,
        "prompt_lookup": 2,
    }
    return Engine.load(
        path,
        device="cpu",
        dtype="float32",
        max_batch=2 * dp,
        chunk_tokens=32 * dp,
        dp=dp,
        **cache,
        **options,
    )


def run(engine):
    return sorted(engine.generate(PROMPTS, PARAMS), key=lambda one: one.index)


def test_ranks_of_their_own_are_one(tmp_path):
    """Latent attention: greedy and sampled tokens, log-probabilities; somebody gives up early,
    beginnings are shared, guesses are looked up."""
    path = find_model("tiny-r1")
    alone = run(load(path, 1))
    engine = load(path, 2)
    stream = engine.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    stream.close()
    together, again = run(engine), run(engine)
    engine.close()
    assert (
        [one.token_ids for one in together]
        == [one.token_ids for one in again]
        == [one.token_ids for one in alone]
    )
    for ours, theirs in zip(together, alone):
        sides = [(one.prompt_logprobs or []) + (one.logprobs or []) for one in (ours, theirs)]
        assert all(
            abs(a.logprob - b.logprob) < 0.02 and len(a.top) == len(b.top)
            for a, b in zip(*sides, strict=True)
        )
    assert sum(one.cached_tokens for one in again) > 0, (
        "what was computed before is found at its home"
    )
    assert engine.speculation.acceptance.accepted > 0
    assert [one.allocator.num_free for one in engine.scheduler.ranks] == [
        engine.plan.num_blocks - 1
    ] * 2


def test_grouped_query_attention_with_experts_alone(tmp_path):
    """Qwen3-MoE, greedy; in the buffers of captured steps, and prompts in one pass with answers, as
    servers may have them."""
    config, tensors = good_checkpoints.models()["qwen3-moe"]
    path = make_model.write_dense(tmp_path / "qwen", config, tensors)
    greedy = [replace(one, temperature=0.0) for one in PLAIN]

    def answers(parallel):
        loaded = load_model(path, device="cpu", dtype="float32", expert_parallel=parallel)
        options = EngineOptions(path, max_batch=4, chunk_tokens=64)
        engine = Engine(loaded, ChatTokenizer(path), CachePlan(9, 64, 192), options)
        engine.runner = Runner(
            loaded.model, engine.cache, lambda step, _: step, experts=loaded.weights.expert_ranks
        )
        engine.scheduler.budget = StepBudget(64, 32, mixed=True)
        if parallel.rank:
            follow(engine)
            return []
        found = {one.index: one.token_ids for one in engine.generate(PROMPTS, greedy)}
        engine.leader.dismiss()
        return [found[index] for index in range(len(PROMPTS))]

    def rank(parallel):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        parallel._open_channel(torch.device("cpu"))
        return answers(parallel)

    assert run_ranks(2, tmp_path, rank) == [answers(SINGLE), []]


def test_states_are_kept_at_home(tmp_path):
    """Each rank's requests begin with states that it kept."""
    path = tiny_models.write(tmp_path / "model", "qwen3_next")
    prompts = [[20 + i % 2] * 150 + [7 + i] * 5 for i in range(4)]

    def answers(parallel, prefix_cache=True):
        loaded = load_model(path, device="cpu", dtype="float32", expert_parallel=parallel)
        asked = {"max_batch": 4, "max_model_len": 192, "dp": parallel.size}
        options = EngineOptions(path, **asked, prefix_cache=prefix_cache)
        engine = Engine(loaded, ChatTokenizer(path), plan_kv_cache(loaded, options), options)
        if parallel.rank:
            follow(engine)
            return []
        done = [one for _ in range(2) for one in engine.generate(prompts, PLAIN[0])]
        engine.leader.dismiss()
        done.sort(key=lambda one: one.index)
        return [one.token_ids for one in done], [one.cached_tokens for one in done]

    def rank(parallel):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        parallel._open_channel(torch.device("cpu"))
        return answers(parallel)

    (found, cached), _ = run_ranks(2, tmp_path, rank)
    assert found == answers(SINGLE, prefix_cache=False)[0]
    assert cached == [0, 128] * 4


def test_memory_is_counted_as_it_is_held(tiny_checkpoint):
    """A rank of two: half of the routed experts, the rest whole; and the box's cache is twice a
    rank's."""
    whole = load_model(tiny_checkpoint, device="cpu", dtype="float32")
    half = load_model(
        tiny_checkpoint, device="cpu", dtype="float32", expert_parallel=Parallel(1, 2)
    )
    experts = sum(
        math.prod(row.shape)
        for row in read_model(whole.checkpoint).rows
        if row.expert is not None and not row.mtp
    )
    assert whole.nbytes - half.nbytes == pytest.approx(experts * 4 / 2, rel=0.01), "float32"
    assert half.cache_token_bytes == whole.cache_token_bytes
    one, two = (
        plan(
            tiny_checkpoint, find_scheme("awq-w4a16"), PlanOptions(devices="2x64GiB", dp=dp)
        ).devices
        for dp in (1, 2)
    )
    assert one.cache_bytes_per_token == two.cache_bytes_per_token
    assert two.cache_tokens == pytest.approx(2 * (one.cache_tokens or 0), rel=0.01)
    assert two.weight_bytes > one.weight_bytes
    options = EngineOptions(tiny_checkpoint, max_batch=8, cache_tokens=1024, dp=2)
    assert plan_kv_cache(whole, options).tokens == 512


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp": 2}, "--dp 2 does not go with --tp"),
        (
            {"draft_length": 1, "count_experts": True},
            "--dp 2 does not go with --draft-length, --count-experts",
        ),
        ({"collectives": "int8"}, "--collectives int8 is for several ranks"),
    ],
)
def test_what_does_not_go_together_is_said_before_ranks_are_started(tiny_checkpoint, changes, told):
    with refused(told):
        join(EngineOptions(tiny_checkpoint, device="cpu", dp=2, **changes))


def test_models_whose_experts_cannot_be_shared(tiny_checkpoint, tmp_path):
    with refused("layer 1 has 8 routed experts, which 3 ranks cannot share evenly"):
        load_model(tiny_checkpoint, device="cpu", expert_parallel=Parallel(0, 3))
    with refused("layer 1 has 8 routed experts"):
        plan(tiny_checkpoint, find_scheme("awq-w4a16"), PlanOptions(devices="3x64GiB", dp=3))
    with refused("--dp 4 is for as many devices, and there are 2"):
        plan(tiny_checkpoint, find_scheme("awq-w4a16"), PlanOptions(devices="2x64GiB", dp=4))
    config, tensors = good_checkpoints.models()["qwen3"]
    dense = make_model.write_dense(tmp_path / "dense", config, tensors)
    with refused("no routed experts, which --dp 2 shares out"):
        load_model(dense, device="cpu", expert_parallel=Parallel(0, 2))


def test_a_request_goes_where_it_is_expected_soonest():
    """To the rank with the fewest requests; of those, to the one that knows its beginning."""
    plan = CachePlan(9, 4, 32)
    homes = DataParallelScheduler(
        3, lambda: Scheduler(plan, max_batch=2, chunk_tokens=8, prefix_cache=True)
    )

    def request(first):
        params, tokenizer = SamplingParams(max_new_tokens=4), ChatTokenizer(find_model("tiny-r1"))
        return Sequence(0, list(range(first, first + 9)), params, tokenizer, 32, streams=False)

    first, second, third = (request(number) for number in (10, 40, 70))
    for sequence in (first, second, third):
        homes.add(sequence)
    assert [one.dp_rank for one in (first, second, third)] == [0, 1, 2]
    assert (homes.waiting, homes.running) == ([first, second, third], [])
    step = homes.schedule()
    assert [step.of_rank(rank).prefill for rank in range(3)] == [
        [(one, 8)] for one in (first, second, third)
    ]
    assert DpPadding.of([step.of_rank(rank) for rank in range(3)]) == DpPadding(0, 0, 8)
    assert (homes.cache_usage, homes.max_batch, len(homes.running), homes.waiting) == (
        3 / 8,
        6,
        3,
        [],
    )
    for sequence in (first, second, third):
        sequence.num_cached = 8
        homes.remove(sequence)
    again, other = request(70), request(10)
    homes.add(again)
    homes.add(other)
    assert (again.dp_rank, other.dp_rank) == (2, 0)
