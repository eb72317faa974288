"""How many tokens a step guesses: chosen while running, from how often guesses were right and what
steps have cost.

With d guesses computed, by an MTP layer or a draft model (drafter.py), and l looked up (lookup.py),
B answers bring B * (1 + expected right guesses) tokens a step, in the time that a step of so many
rows has taken. The pair with the most tokens a second is used; none is where guessing does not pay.
What was not tried yet is taken for as good as it may be, so it is tried, fewer guesses before more;
one more than was chosen is tried from time to time, for lengths and texts change.

Trying may lose time, so there is a credit, in steps without guesses: a little at first, and a small
share of every step. A step with guesses adds the steps without that its tokens would have taken,
and takes what it took itself. Who is in debt guesses nothing until there is credit again for
beginning anew, when a layer must read what it has not: so a source that is never right costs no
more than what it was lent, however good it looked.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from quantkit.executor.runner.graphs import power_of_two
from quantkit.executor.scheduler.sequence import DRAFTER, PROMPT_LOOKUP

_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
"""What is taken for the share of right guesses before any was seen, and as how many guesses that
counts."""
_KEPT = 0.98
"""Of what counted at a step, so much counts at the next: the last 50 matter."""
_TRIED, _DROPPED = 2, 1
"""Times that a cost must have been seen to be believed; the first times, which compile and capture,
do not count."""
_LOOKED, _FASTER = _TRIED + _DROPPED + 1, 0.9
"""Times that steps without guesses are seen: at last behind the first guesses, for a machine may be
busy when an answer begins. So much faster than what was known, such a step counts alone."""
_EVERY, _PROBED = 16, 16
"""Steps between choices, and choices between those that try a guess more for one step."""
_TRIAL = 1 + _DROPPED + _TRIED
"""Steps that something new is tried for: the guesses of the first are checked in the second."""
_MARGIN = 1.01
"""By how much guessing must promise to be faster than not guessing."""
_LENT, _SHARE, _SAVED = 0.5, 0.005, 12.0
"""The credit at first; what every step adds to it; and what is saved up at most."""
_ENOUGH = 0.5
"""Of the credit, beside the cost of beginning anew: to guess again after a debt, or to try what
does not promise to pay."""
_READING = 2.0
"""Of the credit, what beginning anew is taken to cost before it was seen: a layer reads what it has
not, operator by operator."""
_FEW, _MUCH, _MOST_READ = 4, 8.0, 10.0
"""Behind more steps without guesses than this a layer reads what it has not as a prompt, operator
by operator; how many steps that is taken to cost before it was seen, and is at most: the first time
it compiles, too."""
_REMEMBERED = 0.25
"""So much of what was right before such a pause counts behind it: the text is another, and a trial
is short."""
_REPAID = 32
"""Steps within which guesses that promise to pay should bring back what beginning anew costs beyond
the credit."""
_SLOWEST = 4.0
"""Steps without guesses that one with guesses is charged at most: a slower one is the machine's."""


@dataclass
class AcceptanceRates:
    """Of one source of guesses: the share that was right at each place, of those whose predecessors
    were right."""

    right: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)
    _sums: list[float] = field(default_factory=list)
    """What `expected` has found since the last guess."""

    def add(self, count: int, kept: int) -> None:
        """Of `count` guesses in a row the first `kept` were right."""
        self._sums = []
        self.right += [0.0] * (count - len(self.right))
        self.seen += [0.0] * (count - len(self.seen))
        for place in range(min(kept + 1, count)):
            self.right[place] = self.right[place] * _KEPT + (place < kept)
            self.seen[place] = self.seen[place] * _KEPT + 1

    def fade(self, share: float) -> None:
        """What was seen before counts so much less."""
        self._sums = []
        self.right, self.seen = (
            [one * share for one in self.right],
            [one * share for one in self.seen],
        )

    def expected(self, count: int) -> float:
        """Right guesses of `count` in a row."""
        if count >= len(self._sums):  # twice as many: who asks for this one asks for the next
            self._sums = self._summed(2 * count)
        return self._sums[count]

    def _summed(self, most: int) -> list[float]:
        """Of 0, 1, .. `most` in a row."""
        sums, chance, rate = [0.0], 1.0, _PRIOR_RATE
        for place in range(most):
            if place < len(self.seen):
                rate = (self.right[place] + rate * _PRIOR_WEIGHT) / (
                    self.seen[place] + _PRIOR_WEIGHT
                )
            chance *= rate
            sums.append(sums[-1] + chance)
        return sums


class StepTimes:
    """Seconds of steps by their rows, for one number of guesses that the step makes."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        times = self._times[rows] = self._times.get(rows, 0) + 1
        if times <= _DROPPED:
            return
        known = self._seconds.get(rows)
        # A single slow step is the machine's, not the rows': it moves what is known by little.
        self._seconds[rows] = (
            seconds if known is None else known + 0.1 * (min(seconds, 2 * known) - known)
        )

    def add_look(self, rows: int, seconds: float) -> None:
        """Of a step that was taken to see again what is known."""
        known = self._seconds[rows]
        self._times[rows] += 1
        self._seconds[rows] = seconds if seconds < _FASTER * known else (known + seconds) / 2

    def times(self, rows: int) -> int:
        """How often steps of just so many were seen."""
        return self._times.get(rows, 0)

    def tried(self, rows: int) -> bool:
        """Whether steps of about so many rows were seen often enough."""
        return any(
            times >= _TRIED + _DROPPED
            for one, times in self._times.items()
            if rows <= 1.5 * one <= 2.25 * rows
        )

    def by_rows(self, unit: float = 1.0) -> dict[int, float]:
        """What is known, in parts of a second."""
        return {rows: seconds * unit for rows, seconds in sorted(self._seconds.items())}

    def of(self, rows: int) -> float | None:
        """Of just so many."""
        return self._seconds.get(rows)

    def seconds(self, rows: float) -> float | None:
        """Between what is known of fewer and of more rows; None where nothing is."""
        fewer = max((one for one in self._seconds if one <= rows), default=None)
        more = min((one for one in self._seconds if one >= rows), default=None)
        if fewer is None or more is None:
            near = fewer if more is None else more
            return None if near is None else self._seconds[near]
        share = (rows - fewer) / (more - fewer) if more > fewer else 0.0
        return self._seconds[fewer] + share * (self._seconds[more] - self._seconds[fewer])


class DraftLengthController:
    """most_drafts, most_looked_up: guesses of each source after a token, at most. measured: whether
    fewer are made where that pays; then none at first, for what they are held against."""

    def __init__(self, most_drafts: int, most_looked_up: int, *, measured: bool = False) -> None:
        self.most_drafts, self.most_looked_up = most_drafts, most_looked_up
        self.measured = measured and most_drafts + most_looked_up > 0
        self.drafts, self.looked_up = (0, 0) if self.measured else (most_drafts, most_looked_up)
        self.rates = {DRAFTER: AcceptanceRates(), PROMPT_LOOKUP: AcceptanceRates()}
        self.costs: dict[int, StepTimes] = {
            drafts: StepTimes() for drafts in range(most_drafts + 1)
        }
        """Of steps, by how many guesses they compute."""
        self._met: Counter[tuple[int, int]] = Counter()
        """How often sizes of steps came, by guesses and rows: the first time they are captured, and
        are charged as the second."""
        self._found = 0.5
        """Share of answers for which something was looked up."""
        self._credit, self._in_debt = _LENT, False
        self._idle, self._reading = 0, _MUCH
        """Steps since something was computed, as far back as answers reach; what reading cost that
        came behind many of them, in steps."""
        self._steps = self._answers = self._next = self._choices = self._tried_until = 0

    def record_acceptance(self, source: str, count: int, kept: int) -> None:
        """Of an answer's `count` guesses the first `kept` were right."""
        self.rates[source].add(count, kept)

    def record_lookup_hits(self, share: float) -> None:
        """For so many of the step's answers something was looked up."""
        self._found = _KEPT * self._found + (1 - _KEPT) * share

    def record_step(self, answers: int, rows: int, kept: int, seconds: float, longest: int) -> None:
        """A step that computed answers alone: so many, with so many rows, their guesses included,
        of which `kept` were right. longest: tokens of the longest answer; prompts have been read,
        so a layer has no more to read of any."""
        self._charge(answers, rows, kept, seconds)
        self._idle = min(self._idle, longest)
        if self.drafts == 0 and rows == answers and self.costs[0].times(rows) == _LOOKED - 1:
            self.costs[0].add_look(rows, seconds)
        else:
            self.costs[self.drafts].add(rows, seconds)
        self._answers = answers
        self._steps += 1

    def choose(self) -> tuple[int, int]:
        """Guesses of each source from now on."""
        if not self.measured or not self._answers:
            return self.drafts, self.looked_up
        if not self._tried(0) or (self._in_debt and self._steps >= self._tried_until):
            self._next = 0
            return 0, 0
        if self._steps < self._next:
            return self.drafts, self.looked_up
        if self.drafts and self.costs[0].times(self._answers) == _LOOKED - 1:
            self._next = self._steps + 2  # the first of which has guesses to check
            return 0, 0
        self._choices += 1
        plain, known = self._rate((0, 0)), 0
        while known < self.most_drafts and self._tried(known + 1):
            known += 1
        # One more than were tried, where those pay; the first of all for what it promises.
        most = min(known + (known == 0 or self._rate((known, 0)) >= plain), self.most_drafts)
        best = max(
            itertools.product(range(most + 1), range(self.most_looked_up + 1)), key=self._rate
        )
        promised = self._rate(best) / plain
        if promised < _MARGIN or (
            best[0]
            and self._reads_much
            and self._credit + _REPAID * (promised - 1) < self._enough()
        ):
            best = (0, 0)
        if best[0] > known:
            self._next = self._tried_until = self._steps + _TRIAL
            return best[0], 0
        if not any(best) and self._credit >= self._enough():
            self._next = self._tried_until = self._steps + _TRIAL
            return min(1, self.most_drafts), min(1, self.most_looked_up)
        if any(best) and self._choices % _PROBED == 0:
            self._next = self._steps + 1
            return min(best[0] + 1, self.most_drafts), min(best[1] + 1, self.most_looked_up)
        self._next = self._steps + _EVERY
        return best

    def _charge(self, answers: int, rows: int, kept: int, seconds: float) -> None:
        """What a step brought and took, on the credit."""
        size, plain = (self.drafts, power_of_two(rows)), self.costs[0].seconds(answers)
        self._met[size] += 1
        began_anew, self._idle = (
            self.drafts > 0 and self._reads_much,
            0 if self.drafts else self._idle + 1,
        )
        if plain is None:
            return
        self._credit += _SHARE
        if began_anew:
            self._reading = min(max(seconds / plain - 1, 0.0), _MOST_READ)
            self._credit -= self._reading
            self.rates[DRAFTER].fade(_REMEMBERED)
        elif self.drafts > 0 or rows > answers:
            slower, times = (
                1 - min(seconds / plain, _SLOWEST),
                (0, 2, 1)[min(self._met[size], 3) - 1],
            )
            self._credit += kept / answers + times * slower
        self._credit = min(self._credit, _SAVED)
        self._in_debt = self._credit < (self._enough() if self._in_debt else 0.0)

    @property
    def _reads_much(self) -> bool:
        """Whether a layer that begins to guess has more to read than rows of a step."""
        return self._idle > _FEW

    def _enough(self) -> float:
        """Credit that beginning anew takes. Its first step has rows of answers alone."""
        if self._reads_much and self.most_drafts:
            return _ENOUGH + self._reading
        plain, first = (
            self.costs[0].seconds(self._answers),
            self.costs[min(1, self.most_drafts)].of(self._answers),
        )
        return _ENOUGH + (max(first / plain - 1, 0.0) if plain and first else _READING)

    def _rows(self, drafts: int, looked_up: int) -> int:
        found = self._found if looked_up else 0.0
        return round(self._answers * (1 + (1 - found) * drafts + found * max(looked_up, drafts)))

    def _tried(self, drafts: int) -> bool:
        """Whether it is known what so many computed guesses cost."""
        return self.costs[drafts].tried(self._rows(drafts, 0))

    def _rate(self, pair: tuple[int, int]) -> float:
        """Tokens a second; of guesses that were not tried, with the cost of the most of those that
        were."""
        drafts, looked_up = pair
        found = self._found if looked_up else 0.0
        right = (1 - found) * self.rates[DRAFTER].expected(drafts) + found * self.rates[
            PROMPT_LOOKUP
        ].expected(looked_up)
        known = next((fewer for fewer in range(drafts, 0, -1) if self._tried(fewer)), 0)
        seconds = self.costs[known].seconds(self._rows(known, looked_up))
        assert seconds, "steps without guesses come first"
        return self._answers * (1 + right) / seconds
