"""A forward pass that all data-parallel ranks compute together, as one of them sees it: its own
part, and the results of the others."""

from dataclasses import astuple
from typing import Any

from torch import Tensor

from quantkit.executor.ranks.parallel import Parallel
from quantkit.executor.runner.runner import ForwardPass, Runner
from quantkit.executor.runner.sampler import Sampler, check_not_nan
from quantkit.executor.scheduler.data_parallel import DpPadding
from quantkit.executor.scheduler.scheduler import ScheduledStep
from quantkit.executor.scheduler.sequence import Sequence, TokenLogprob


class DpStep:
    """Made before the pass is computed."""

    def __init__(self, step: ScheduledStep, parallel: Parallel) -> None:
        self._parallel = parallel
        self._parts = [step.of_rank(rank) for rank in range(parallel.size)]
        self._own, self._padding = self._parts[parallel.rank], DpPadding.of(self._parts)
        self._sampled = [part.rows_to_sample for part in self._parts]
        self._scored = [
            [
                one
                for one in part.sequences
                if one.params.logprobs is not None or one.params.prompt_logprobs is not None
            ]
            for part in self._parts
        ]
        self._num_scored = [
            (len(one.logprobs), len(one.prompt_logprobs)) for one in self._scored[parallel.rank]
        ]

    def compute(self, sampler: Sampler, runner: Runner) -> ForwardPass:
        """This rank's part."""
        sampler.prepare(self._own)
        return runner.dp_pass(self._own, self._padding)

    def share(self, sampled: Tensor) -> tuple[list[int], list[tuple[Sequence, list[int]]]]:
        """sampled [R]: tokens of this rank's rows. Returns them, and the other ranks' sequences
        with their tokens; also advances the other ranks' prompts."""
        counts = [sum(count for _, count in own) for own in self._sampled]
        shared = self._parallel.share(sampled, counts) if any(counts) else [[] for _ in counts]
        others = []
        for rank, token_ids in enumerate(shared):
            if rank == self._parallel.rank:
                continue
            for sequence, length in self._parts[rank].prefill:
                sequence.num_cached += length
            rest = iter(token_ids)
            others += [
                (sequence, [next(rest) for _ in range(count)])
                for sequence, count in self._sampled[rank]
            ]
        return shared[self._parallel.rank], others

    def report_logprobs(self) -> None:
        """Send new log-probabilities to rank 0, which answers requests. Called when the pass's
        tokens were appended."""
        if not any(self._scored):
            return
        own = self._scored[self._parallel.rank]
        new = [
            (one.logprobs[first:], one.prompt_logprobs[second:])
            for one, (first, second) in zip(own, self._num_scored)
        ]
        reports = self._parallel.report([[list(map(astuple, part)) for part in one] for one in new])
        for sequences, reported in zip(self._scored[1:], reports[1:]):
            for sequence, parts in zip(sequences, reported):
                sampled, prompt = (list(map(_parse, part)) for part in parts)
                sequence.logprobs += sampled
                sequence.prompt_logprobs += prompt
                check_not_nan(sequence, sampled + prompt)


def _parse(values: list[Any]) -> TokenLogprob:
    token_id, logprob, top, rank = values
    return TokenLogprob(token_id, logprob, tuple((one, value) for one, value in top), rank)
