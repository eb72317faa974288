"""What answers held to a schema cost on R1's shapes: one rank of four on one card, without guesses
and with one.

    python benchmarks/r1_constrained.py [--rank-of 4] [--layers 31] [--users 32] [--tokens 96]
    [--rounds 4] [--out FILE.json]
    torchrun --nproc-per-node 4 benchmarks/r1_constrained.py --ranks --layers 61         all ranks of a box
    python benchmarks/r1_constrained.py --tiny                                           on a CPU in seconds: a test of the script

Layers, cache, graphs, draws and masks are the engine's; one rank alone has the whole head, for a
grammar chooses among all tokens. Weights are made up (r1_synthetic.py), so answers are noise that
fits the schema. The vocabulary has R1's 129,280 entries, most of them words: those of tiny-r1, and
pieces of the words of this project's pages. Half of the layers take half of R1's time, so what
masks cost shows twice. Every user's answer has so many tokens, drawn at temperature 0.8: free, or
by a schema whose arrays are long enough. Kinds take turns; milliseconds of a step, medians of the
rounds, and the median of the rounds' ratios.

Whether a guess is right is drawn as r1_guesses.py draws it; in a held answer a guess that the
grammar does not let come is wrong, so held
answers keep fewer: steps are compared, not tokens.
"""

import argparse
import json
import os
import random
import re
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from constrained import SCHEMA
from made_engine import joined_ranks, led, made_engine, report_of_ranks
from r1_box import build
from r1_grid import one_rank
from r1_guesses import PUBLISHED, DraftingEngine
from r1_synthetic import R1, TINY, SyntheticWeights

from quantkit.checkpoint.hub import find_model
from quantkit.common.devices import to_device
from quantkit.executor.engine import Engine
from quantkit.executor.ranks.parallel import SINGLE
from quantkit.executor.runner.graphs import SamplingGraph
from quantkit.executor.runner.logits_processor import GrammarMasks
from quantkit.executor.runner.runner import ForwardPass
from quantkit.executor.runner.sampler import SampledTokens, Sampler
from quantkit.executor.sampling.grammar import json_schema
from quantkit.executor.sampling.params import SamplingParams
from quantkit.executor.scheduler.sequence import Sequence
from quantkit.executor.weights.load import LoadedModel
from quantkit.models import deepseek_v3
from quantkit.tokenizer.chat import ChatTokenizer


class KeptMasks(GrammarMasks):
    """The last step's are still there for who asks."""

    last: tuple[dict[Sequence, int], np.ndarray | None] = ({}, None)

    def _wait(self) -> tuple[dict[Sequence, int], np.ndarray | None]:
        self.last = super()._wait()
        return self.last


class HeldSampler(Sampler):
    """As `r1_guesses.DrawnSampler`, but a guess that a grammar does not let come is wrong, and what
    was drawn stays in its place."""

    def __init__(self, engine: DraftingEngine) -> None:
        super().__init__(
            engine.loaded.config.vocab_size, engine.loaded.device, lambda: engine.tokenizer.eos_ids
        )
        self._engine, self._masks = engine, KeptMasks()

    def sample(self, done: ForwardPass, draw: SamplingGraph) -> SampledTokens:
        """As `Sampler.sample`, but behind every token before a guess."""
        chosen, wanted = super().sample(done, draw), list[int]()
        if not any(sequence.drafts for sequence, _ in done.counts):
            return chosen
        first, bits = self._masks.last if isinstance(self._masks, KeptMasks) else ({}, None)
        for sequence, count in done.counts:
            for i, guess in enumerate(sequence.drafts[: count - 1]):
                right = (
                    random.Random(sequence.seed + len(sequence.token_ids) + i).random()
                    < self._engine.acceptance
                )
                if sequence.guide is None:
                    wanted.append(guess if right else (guess + 1) % self._vocab)
                else:
                    assert bits is not None, "masks of a held answer"
                    may_come = (
                        int(bits.view(np.uint32)[first[sequence] + i, guess >> 5]) >> (guess & 31)
                        & 1
                    )
                    wanted.append(guess if right and may_come else -1)
            wanted.append(-1)
        told = to_device(wanted, chosen.token_ids.device)
        return chosen._replace(token_ids=torch.where(told < 0, chosen.token_ids, told))


class WholeHead(SyntheticWeights):
    """One rank's, but the heads are whole: grammars choose among all tokens."""

    def __init__(self, config: deepseek_v3.Config, tp: int, device: torch.device) -> None:
        super().__init__(config, tp, device)
        whole = (config.vocab_size, config.hidden_size)
        self._shapes |= {
            name: (role, whole) for name, (role, _) in self._shapes.items() if role == "head"
        }


def large_tokenizer(vocab: int, folder: Path) -> ChatTokenizer:
    """tiny-r1's with more tokens, pieces of words, up to `vocab` in all where the pages have as
    many."""
    source = find_model("tiny-r1")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (folder / name).write_text((source / name).read_text())
    written = json.loads((source / "tokenizer.json").read_text())
    known: dict[str, int] = written["model"]["vocab"]
    root = Path(__file__).parents[1]
    pages = sorted(
        [
            *(root / "docs").rglob("*.md"),
            *(root / "quantkit").rglob("*.py"),
            *(root / "tests").rglob("*.py"),
        ]
    )
    words = dict.fromkeys(
        word for page in pages for word in re.findall(r" ?[A-Za-z]+", page.read_text())
    )
    for size in range(2, 13):
        for word in words:
            for begin in range(max(len(word) - size + 1, 0)):
                piece = word[begin : begin + size].replace(" ", "\u0120")
                if len(known) < vocab and "\u0120" not in piece[1:]:
                    known.setdefault(piece, len(known))
    (folder / "tokenizer.json").write_text(json.dumps(written))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab}))
    return ChatTokenizer(folder)


def steps(
    engine: Engine, options: argparse.Namespace, grammar: str | None
) -> tuple[list[float], int]:
    """Milliseconds of every step of one round in which all answers run and no prompt is computed,
    and the tokens kept in them."""
    generator = random.Random(options.users)
    prompts = [
        [generator.randrange(6, 500) for _ in range(options.input_len)]
        for _ in range(options.users)
    ]
    asked = [
        SamplingParams(
            max_new_tokens=options.tokens,
            temperature=0.8,
            seed=user,
            grammar=grammar,
            ignore_eos=True,
        )
        for user in range(options.users)
    ]
    sequences = [
        engine.sequence(prompt, one, index, streams=False)
        for index, (prompt, one) in enumerate(zip(prompts, asked))
    ]
    for sequence in sequences:
        engine.add(sequence)
    times, tokens = list[float](), 0
    while engine.has_work:
        before = _lengths(sequences)
        all_answer = all(
            one.num_cached >= one.prompt_len and one.finish_reason is None for one in sequences
        )
        began = time.perf_counter()
        engine.step()
        if all_answer:
            times.append((time.perf_counter() - began) * 1e3)
            tokens += sum(_lengths(sequences)) - sum(before)
    faults = [str(one.fault) for one in sequences if one.fault is not None]
    assert not faults, faults[0]
    assert all(len(one.token_ids) == options.input_len + options.tokens for one in sequences), (
        "an answer ended early"
    )
    return times, tokens


def _lengths(sequences: list[Sequence]) -> list[int]:
    return [len(one.token_ids) for one in sequences]


def row(
    loaded: LoadedModel, tokenizer: ChatTokenizer, options: argparse.Namespace, drafts: int
) -> dict[str, Any]:
    """Free and held answers in turns, by an engine that makes so many guesses. Empty on ranks above
    0."""
    length = options.input_len + options.tokens
    if drafts:
        engine = made_engine(
            loaded, options.users, length, draft_length=drafts, kind=DraftingEngine
        )
        assert isinstance(engine, DraftingEngine)
        engine.acceptance, engine.sampler = PUBLISHED, HeldSampler(engine)
    else:
        engine = made_engine(replace(loaded, mtp_layers=()), options.users, length)
    engine.tokenizer = tokenizer
    engine.grammars = type(engine.grammars)(
        tokenizer.tokenizer, loaded.config.vocab_size, tokenizer.eos_ids
    )

    def measured() -> dict[str, Any]:
        schema, rounds = json_schema(SCHEMA), []
        began = time.perf_counter()
        engine.grammars.guide(schema, None)
        compiled = time.perf_counter() - began
        for number in range(1 + options.rounds):
            kinds = (None, schema) if number % 2 else (schema, None)
            found = {kind is None: steps(engine, options, kind) for kind in kinds}
            told = {
                name: _told(*found[free], options.users)
                for name, free in (("free", True), ("held", False))
            }
            print(
                f"{drafts} guesses, round {number}{' (warms up)' if number == 0 else ''}: {told}",
                flush=True,
            )
            if number:
                rounds.append(told)
        medians = {
            name: statistics.median(one[name]["step_ms"] for one in rounds)
            for name in ("free", "held")
        }
        means = {
            name: statistics.median(one[name]["mean_ms"] for one in rounds)
            for name in ("free", "held")
        }
        return {
            "guesses": drafts,
            "users": options.users,
            "free_step_ms": medians["free"],
            "held_step_ms": medians["held"],
            "ratio": statistics.median(
                one["held"]["step_ms"] / one["free"]["step_ms"] for one in rounds
            ),
            "ratio_of_means": statistics.median(
                one["held"]["mean_ms"] / one["free"]["mean_ms"] for one in rounds
            ),
            "free_mean_ms": means["free"],
            "held_mean_ms": means["held"],
            "first_grammar_s": compiled,
            "why_eager": engine.runner.why_eager,
        }

    return led(engine, measured) or {}


def _told(times: list[float], tokens: int, users: int) -> dict[str, float]:
    return {
        "step_ms": round(statistics.median(times), 3),
        "mean_ms": round(statistics.mean(times), 3),
        "slowest_ms": round(max(times), 1),
        "tokens_a_step": round(tokens / len(times) / users, 3),
    }


@torch.inference_mode()
def run(options: argparse.Namespace) -> dict[str, Any]:
    parallel, device = (
        joined_ranks(options.tiny)
        if options.ranks
        else (SINGLE, torch.device("cpu") if options.tiny else torch.device("cuda", 0))
    )
    torch.manual_seed(0)
    config = deepseek_v3.Config.from_dict(TINY | {"vocab_size": 2048} if options.tiny else R1)
    config = replace(config, num_hidden_layers=min(options.layers, config.num_hidden_layers))
    began = time.perf_counter()
    loaded = (
        build(config, parallel, device)
        if options.ranks
        else one_rank(config, options.rank_of, device, WholeHead)
    )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {
        "device": name,
        "torch": torch.__version__,
        "layers": config.num_hidden_layers,
        "rank_of": options.rank_of,
    }
    about |= {"ranks": parallel.size, "cores": os.cpu_count()}
    report: dict[str, Any] = about | {"tokens": options.tokens, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = large_tokenizer(config.vocab_size, Path(folder))
        size = tokenizer.tokenizer.get_vocab_size()
        print(
            f"{about}; weights after {time.perf_counter() - began:.1f} s; {size} tokens", flush=True
        )
        for drafts in options.guesses:
            found = row(loaded, tokenizer, options, drafts)
            if found:
                report["rows"].append(found)
                print(
                    "  ".join(
                        f"{key} {value:.4g}"
                        for key, value in found.items()
                        if not isinstance(value, str)
                    ),
                    found["why_eager"],
                    flush=True,
                )
            if options.out and parallel.rank == 0:
                options.out.write_text(json.dumps(report, indent=1))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank-of", type=int, default=4)
    parser.add_argument("--ranks", action="store_true", help="torchrun's, with their sums")
    parser.add_argument("--layers", type=int, default=31)
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--guesses", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1]
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.rank_of, options.users, options.input_len, options.tokens, options.rounds = (
            2,
            2,
            24,
            12,
            1,
        )
    if options.ranks:
        report_of_ranks(run, options)
    else:
        run(options)


if __name__ == "__main__":
    main()
