"""A pass that all data-parallel ranks compute together, as one of them sees it: its own part, and
what comes of the others'."""

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
    """Made before the pass is computed. own: this rank's part. room: what all ranks' passes are
    padded to."""

    def __init__(self, step: ScheduledStep, parallel: Parallel) -> None:
        self._parallel, self._parts = parallel, [step.of(rank) for rank in range(parallel.size)]
        self.own, self.room = self._parts[parallel.rank], DpPadding.of(self._parts)
        self._successors = [part.rows_to_sample for part in self._parts]
        self._scored = [[one for one in part.sequences if _is_scored(one)] for part in self._parts]
        self._known = [
            (len(one.logprobs), len(one.prompt_logprobs)) for one in self._scored[parallel.rank]
        ]

    def compute(self, sampler: Sampler, runner: Runner) -> ForwardPass:
        """This rank's part."""
        sampler.prepare(self.own)
        return runner.joint(self.own, self.room)

    def share(self, chosen: Tensor) -> tuple[list[int], list[tuple[Sequence, list[int]]]]:
        """chosen [R]: successors of this rank's rows. Returns them, and the other ranks' sequences
        with theirs. All ranks' prompts are as far as this pass computed them then."""
        counts = [sum(count for _, count in own) for own in self._successors]
        shared = self._parallel.share(chosen, counts) if any(counts) else [[] for _ in counts]
        elsewhere = []
        for rank, token_ids in enumerate(shared):
            if rank == self._parallel.rank:
                continue
            for sequence, length in self._parts[rank].prefill:
                sequence.num_cached += length
            rest = iter(token_ids)
            elsewhere += [
                (sequence, [next(rest) for _ in range(count)])
                for sequence, count in self._successors[rank]
            ]
        return shared[self._parallel.rank], elsewhere

    def report(self) -> None:
        """Log-probabilities that were asked for go to rank 0, which answers. After the pass's
        tokens were appended."""
        if not any(self._scored):
            return
        own = self._scored[self._parallel.rank]
        news = [
            (one.logprobs[first:], one.prompt_logprobs[second:])
            for one, (first, second) in zip(own, self._known)
        ]
        told = self._parallel.report([[list(map(astuple, part)) for part in one] for one in news])
        for sequences, reported in zip(self._scored[1:], told[1:]):
            for sequence, (chosen, prompt) in zip(sequences, reported):
                sequence.logprobs += map(_read, chosen)
                sequence.prompt_logprobs += map(_read, prompt)
                check_not_nan(sequence, [*map(_read, chosen), *map(_read, prompt)])


def _is_scored(sequence: Sequence) -> bool:
    return sequence.params.logprobs is not None or sequence.params.prompt_logprobs is not None


def _read(told: list[Any]) -> TokenLogprob:
    token_id, logprob, top, rank = told
    return TokenLogprob(token_id, logprob, tuple((one, value) for one, value in top), rank)
