"""Small models that others guess for, and what is asked of them: of tests of draft models and
heads."""

import os

import engines
import torch
from forked_ranks import run_ranks
from tied_model import TIED

from quantkit import Engine, SamplingParams
from quantkit.executor.memory_budget import plan_kv_cache
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import follow
from quantkit.executor.speculation.draft_model import load_draft
from quantkit.executor.weights.load import load_model
from quantkit.tokenizer.chat import ChatTokenizer

LLAMA = TIED | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}
PROMPTS = [list(range(6 + i, 30 + 9 * i)) for i in range(6)]
MIXED = [
    SamplingParams(
        max_new_tokens=14 + i, temperature=0.8 * (i % 2), top_p=0.9, seed=i, ignore_eos=True
    )
    for i in range(6)
]


def load(path, draft=None, **options):
    return engines.load(path, draft, **{"max_model_len": 128, **options})


def tokens(engine, params, prompts=PROMPTS):
    return engines.tokens(engine, prompts, params)


def measured(engine):
    """The share of guesses that were kept since it was asked last."""
    acceptance = engine.speculation.acceptance
    assert acceptance.drafted > 15
    rate = acceptance.rate
    acceptance.drafted = acceptance.accepted = 0
    return rate


def ranked(parallel, options):
    """The engine of a forked rank, which has a draft model whole."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    parallel._open_channel(torch.device("cpu"))
    settings = {"device": "cpu", "dtype": "float32", "cache": options.cache, "parallel": parallel}
    loaded = load_model(options.model_path, **settings)
    draft = load_draft(options.draft, loaded, options) if options.draft else None
    tokenizer, cache = ChatTokenizer(options.model_path), plan_kv_cache(loaded, options, draft)
    return Engine(loaded, tokenizer, cache, options, draft)


def ask_ranks(size, folder, path, ask, **options):
    """What ask(engine) gives on rank 0 of ranks that are forks of this process; processes of their
    own are tests/executor/test_parallel.py's."""

    def rank(parallel):
        settings = {"device": "cpu", "dtype": "float32", "max_batch": 4, **options}
        engine = ranked(parallel, EngineOptions(path, **settings))
        if parallel.rank:
            follow(engine)
            return []
        found = ask(engine)
        engine.leader.dismiss()
        return found

    return run_ranks(size, folder, rank)[0]


def beyond_the_backlog(engine, drafts, unread):
    """An old and a recent request, of which the old one has more tokens than a drafter keeps to
    read later, and the recent one `unread`: for six steps with guesses the recent one alone gets some."""
    asked = SamplingParams(max_new_tokens=60, ignore_eos=True)
    engine.speculation.set_lengths(0, 0)
    old = engine.submit(PROMPTS[0], asked)
    while len(old.generated) < 12:
        engine.step()
    recent = engine.submit(PROMPTS[1], asked, 1)
    while len(recent.generated) < unread:
        engine.step()
    engine.speculation.set_lengths(drafts, 0)
    for _ in range(6):
        engine.step()
        assert (bool(old.drafts), bool(recent.drafts)) == (False, True)
    return old, recent
