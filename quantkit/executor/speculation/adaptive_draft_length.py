"""Adaptive draft length: chosen while serving, from measured acceptance rates and step times.

With d tokens drafted by a model (an MTP layer or a draft model) and l by prompt lookup, B decoding
sequences gain B * (1 + expected accepted drafts) tokens a step, in the measured time of a step of
that many rows. The pair (d, l) with the most tokens per second is used, (0, 0) where speculation
does not pay. Lengths without measurements are assumed to be as good as possible, so they are tried,
shorter ones first; one token more than the current choice is tried from time to time, because texts
and batch sizes change.

Trials may lose time, so they are paid from a credit, counted in plain decode steps: a little at the
start and a small share of every step. A speculative step adds the plain steps its tokens would have
taken and subtracts its own time. In debt, nothing is drafted until the credit covers a restart,
where the drafter first has to catch up on the tokens it skipped. So a drafter that is never right
costs at most the initial credit, however good it looked.
"""

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from quantkit.executor.runner.graphs import power_of_two
from quantkit.executor.scheduler.sequence import DRAFTER, PROMPT_LOOKUP

_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
"""Assumed acceptance rate before any measurement, and the number of drafts it counts as."""
_DECAY = 0.98
"""Weight of older observations after each step: about the last 50 count."""
_TRIED, _WARMUP = 2, 1
"""Samples that make a step time trustworthy, after the warm-up steps (which compile and capture)
that are not counted."""
_PLAIN_SAMPLES, _FASTER = _TRIED + _WARMUP + 1, 0.9
"""Samples of plain decode steps. The last one is taken after the first drafts, because the machine
may have been busy at first: if it is faster than the mean by this factor, it replaces the mean."""
_INTERVAL, _PROBE_INTERVAL = 16, 16
"""Steps between two choices, and choices between two probes of one draft token more."""
_TRIAL = 1 + _WARMUP + _TRIED
"""Steps of a trial: the drafts of the first step are verified in the second."""
_MARGIN = 1.01
"""Minimum predicted speed-up to draft at all."""
_INITIAL_CREDIT, _CREDIT_PER_STEP, _MAX_CREDIT = 0.5, 0.005, 12.0
_RESERVE = 0.5
"""Credit needed, in addition to the cost of a restart, to draft again after a debt or to try what
is not predicted to pay."""
_RESTART_COST = 2.0
"""Assumed restart cost before it was measured: the drafter catches up, launched eagerly."""
_SHORT_PAUSE, _CATCH_UP_COST, _MAX_CATCH_UP_COST = 4, 8.0, 10.0
"""After a pause of more steps than this the drafter catches up with a prefill, launched eagerly;
its assumed cost in steps before it was measured, and the most it is charged: the first one also
compiles."""
_REMEMBERED = 0.25
"""Weight of the acceptance statistics after such a pause: the text has changed, and trials are
short."""
_PAYBACK = 32
"""Steps within which promising drafts should earn the restart cost that exceeds the credit."""
_MAX_SLOWDOWN = 4.0
"""Plain steps that a speculative step is charged at most: slower ones are noise of the machine."""


@dataclass
class AcceptanceRates:
    """Acceptance rate by draft position, given that all drafts before it were accepted."""

    accepted: list[float] = field(default_factory=list)
    proposed: list[float] = field(default_factory=list)
    _expected: list[float] = field(default_factory=list)
    """Cached expectations by draft length; cleared by new observations."""

    def add(self, count: int, accepted: int) -> None:
        """Of `count` consecutive drafts the first `accepted` were accepted."""
        self._expected = []
        self.accepted += [0.0] * (count - len(self.accepted))
        self.proposed += [0.0] * (count - len(self.proposed))
        for place in range(min(accepted + 1, count)):
            self.accepted[place] = self.accepted[place] * _DECAY + (place < accepted)
            self.proposed[place] = self.proposed[place] * _DECAY + 1

    def fade(self, share: float) -> None:
        """Multiply the weight of all observations by `share`."""
        self._expected = []
        self.accepted = [one * share for one in self.accepted]
        self.proposed = [one * share for one in self.proposed]

    def expected(self, count: int) -> float:
        """Expected accepted drafts of `count` consecutive ones."""
        if count >= len(self._expected):  # twice as many: the next longer ones are asked for next
            self._expected = self._sums(2 * count)
        return self._expected[count]

    def _sums(self, most: int) -> list[float]:
        """Expected accepted drafts of 0, 1, .. `most` consecutive ones."""
        sums, chance, rate = [0.0], 1.0, _PRIOR_RATE
        for place in range(most):
            if place < len(self.proposed):
                rate = (self.accepted[place] + rate * _PRIOR_WEIGHT) / (
                    self.proposed[place] + _PRIOR_WEIGHT
                )
            chance *= rate
            sums.append(sums[-1] + chance)
        return sums


class StepTimes:
    """Mean step time by batch rows, for a fixed draft length."""

    def __init__(self) -> None:
        self._samples: defaultdict[int, int] = defaultdict(int)
        self._seconds: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        self._samples[rows] += 1
        if self._samples[rows] <= _WARMUP:
            return
        known = self._seconds.get(rows)
        # A single slow step is noise of the machine, so it moves the mean by little.
        self._seconds[rows] = (
            seconds if known is None else known + 0.1 * (min(seconds, 2 * known) - known)
        )

    def add_check(self, rows: int, seconds: float) -> None:
        """A step that was run to check the mean."""
        known = self._seconds[rows]
        self._samples[rows] += 1
        self._seconds[rows] = seconds if seconds < _FASTER * known else (known + seconds) / 2

    def num_samples(self, rows: int) -> int:
        """Steps of exactly `rows` rows."""
        return self._samples.get(rows, 0)

    def tried(self, rows: int) -> bool:
        """Whether there are enough samples of about this many rows."""
        return any(
            samples >= _TRIED + _WARMUP
            for one, samples in self._samples.items()
            if rows <= 1.5 * one <= 2.25 * rows
        )

    def by_rows(self) -> dict[int, float]:
        """Seconds of a step, by its rows."""
        return dict(sorted(self._seconds.items()))

    def at(self, rows: int) -> float | None:
        """Mean of exactly `rows` rows."""
        return self._seconds.get(rows)

    def seconds(self, rows: float) -> float | None:
        """Interpolated between the nearest measured numbers of rows; None without measurements."""
        fewer = max((one for one in self._seconds if one <= rows), default=None)
        more = min((one for one in self._seconds if one >= rows), default=None)
        if fewer is None or more is None:
            near = fewer if more is None else more
            return None if near is None else self._seconds[near]
        share = (rows - fewer) / (more - fewer) if more > fewer else 0.0
        return self._seconds[fewer] + share * (self._seconds[more] - self._seconds[fewer])


class DraftLengthController:
    """max_drafts, max_lookup: longest draft of each source. adaptive: adapt the draft length to
    measured speed; starts at 0 to time plain decoding. Otherwise both lengths are fixed."""

    def __init__(self, max_drafts: int, max_lookup: int, *, adaptive: bool = False) -> None:
        self.max_drafts, self.max_lookup = max_drafts, max_lookup
        self.adaptive = adaptive and max_drafts + max_lookup > 0
        self.drafts, self.lookup = (0, 0) if self.adaptive else (max_drafts, max_lookup)
        self.rates = {DRAFTER: AcceptanceRates(), PROMPT_LOOKUP: AcceptanceRates()}
        self.step_times = {drafts: StepTimes() for drafts in range(max_drafts + 1)}
        """By the number of tokens that the drafter computes in the step."""
        self._sizes: Counter[tuple[int, int]] = Counter()
        """How often each (drafts, rows) size came: the first step of a size captures it, so the
        second one is charged twice."""
        self._hit_rate = 0.5
        """Share of the sequences for which prompt lookup found a draft."""
        self._credit, self._in_debt = _INITIAL_CREDIT, False
        self._pause, self._catch_up_cost = 0, _CATCH_UP_COST
        """Steps since the drafter last ran, at most the age of the oldest sequence; the cost in
        steps of catching up after a long pause."""
        self._steps = self._batch = self._next_choice = self._choices = self._trial_end = 0

    def record_acceptance(self, source: str, count: int, accepted: int) -> None:
        """Of `count` drafts of a sequence the first `accepted` were accepted."""
        self.rates[source].add(count, accepted)

    def record_lookup_hits(self, share: float) -> None:
        """Prompt lookup found a draft for this share of the step's sequences."""
        self._hit_rate = _DECAY * self._hit_rate + (1 - _DECAY) * share

    def record_step(
        self, batch: int, rows: int, accepted: int, seconds: float, longest: int
    ) -> None:
        """Record a decode-only step: sequences, rows including drafts, accepted drafts. longest:
        most generated tokens of a sequence; the drafter has read all prompts, so it can be behind
        by no more."""
        self._charge(batch, rows, accepted, seconds)
        self._pause = min(self._pause, longest)
        times = self.step_times[self.drafts]
        if self.drafts == 0 and rows == batch and times.num_samples(rows) == _PLAIN_SAMPLES - 1:
            times.add_check(rows, seconds)
        else:
            times.add(rows, seconds)
        self._batch = batch
        self._steps += 1

    def choose(self) -> tuple[int, int]:
        """Draft length of each source for the next steps: (drafter, prompt lookup)."""
        if not self.adaptive or not self._batch:
            return self.drafts, self.lookup
        if not self._tried(0) or (self._in_debt and self._steps >= self._trial_end):
            self._next_choice = 0
            return 0, 0
        if self._steps < self._next_choice:
            return self.drafts, self.lookup
        if self.drafts and self.step_times[0].num_samples(self._batch) == _PLAIN_SAMPLES - 1:
            self._next_choice = self._steps + 2  # the first of which still verifies drafts
            return 0, 0
        self._choices += 1
        plain, known = self._speed((0, 0)), 0
        while known < self.max_drafts and self._tried(known + 1):
            known += 1
        # One more than was tried if that paid; the first one on its prior alone.
        longest = min(known + (known == 0 or self._speed((known, 0)) >= plain), self.max_drafts)
        best = max(
            itertools.product(range(longest + 1), range(self.max_lookup + 1)), key=self._speed
        )
        gain = self._speed(best) / plain
        if gain < _MARGIN or (
            best[0]
            and self._long_pause
            and self._credit + _PAYBACK * (gain - 1) < self._required_credit()
        ):
            best = (0, 0)
        if best[0] > known:
            self._next_choice = self._trial_end = self._steps + _TRIAL
            return best[0], 0
        if not any(best) and self._credit >= self._required_credit():
            self._next_choice = self._trial_end = self._steps + _TRIAL
            return min(1, self.max_drafts), min(1, self.max_lookup)
        if any(best) and self._choices % _PROBE_INTERVAL == 0:
            self._next_choice = self._steps + 1
            return min(best[0] + 1, self.max_drafts), min(best[1] + 1, self.max_lookup)
        self._next_choice = self._steps + _INTERVAL
        return best

    def _charge(self, batch: int, rows: int, accepted: int, seconds: float) -> None:
        """Update the credit with the gain and the time of a step."""
        size, plain = (self.drafts, power_of_two(rows)), self.step_times[0].seconds(batch)
        self._sizes[size] += 1
        restarted = self.drafts > 0 and self._long_pause
        self._pause = 0 if self.drafts else self._pause + 1
        if plain is None:
            return
        self._credit += _CREDIT_PER_STEP
        if restarted:
            self._catch_up_cost = min(max(seconds / plain - 1, 0.0), _MAX_CATCH_UP_COST)
            self._credit -= self._catch_up_cost
            self.rates[DRAFTER].fade(_REMEMBERED)
        elif self.drafts > 0 or rows > batch:
            saved = 1 - min(seconds / plain, _MAX_SLOWDOWN)
            weight = (0, 2, 1)[min(self._sizes[size], 3) - 1]
            self._credit += accepted / batch + weight * saved
        self._credit = min(self._credit, _MAX_CREDIT)
        self._in_debt = self._credit < (self._required_credit() if self._in_debt else 0.0)

    @property
    def _long_pause(self) -> bool:
        """Whether the drafter has more to catch up on than fits into the rows of a step."""
        return self._pause > _SHORT_PAUSE

    def _required_credit(self) -> float:
        """Credit needed to start drafting. The first step has no drafts to verify."""
        if self._long_pause and self.max_drafts:
            return _RESERVE + self._catch_up_cost
        plain = self.step_times[0].seconds(self._batch)
        first = self.step_times[min(1, self.max_drafts)].at(self._batch)
        return _RESERVE + (max(first / plain - 1, 0.0) if plain and first else _RESTART_COST)

    def _rows(self, drafts: int, lookup: int) -> int:
        """Expected rows of a step."""
        hits = self._hit_rate if lookup else 0.0
        return round(self._batch * (1 + (1 - hits) * drafts + hits * max(lookup, drafts)))

    def _tried(self, drafts: int) -> bool:
        return self.step_times[drafts].tried(self._rows(drafts, 0))

    def _speed(self, lengths: tuple[int, int]) -> float:
        """Expected tokens per second; an untried draft length is timed as the longest tried one
        below it."""
        drafts, lookup = lengths
        hits = self._hit_rate if lookup else 0.0
        accepted = (1 - hits) * self.rates[DRAFTER].expected(drafts) + hits * self.rates[
            PROMPT_LOOKUP
        ].expected(lookup)
        known = next((fewer for fewer in range(drafts, 0, -1) if self._tried(fewer)), 0)
        seconds = self.step_times[known].seconds(self._rows(known, lookup))
        assert seconds, "plain steps are timed first"
        return self._batch * (1 + accepted) / seconds
