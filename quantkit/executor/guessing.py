"""How many tokens a step guesses: chosen while running, from how often guesses were right and what steps have cost.

With d guesses computed, by an MTP layer or a draft model (drafter.py), and l looked up (lookup.py), B answers bring
B * (1 + expected right guesses) tokens a step, in the time that a step of so many rows has taken. The pair with the most tokens a second
is used; none is where guessing does not pay. What may be better is tried for a few steps: more guesses than were tried, as if they cost no
more than the most that were, for a kernel may take 40 rows in little more time than 24; and what was seen to be worse, for a machine may
have been busy then. The longer ago and the fewer times a cost was seen, the less it may be now: that of steps without guesses, too.

Trying may lose time, so there is a credit, in steps without guesses: a little at first, and a small share of every step. A step with
guesses adds the steps without that its tokens would have taken, and takes what it took itself. A trial wants the credit that it may lose.
What promises to pay goes on into some debt; then nothing is guessed until there is credit again, also for beginning anew, when a layer
must read what it has not: so a source that is never right costs no more than what it was lent, however good it looked.
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from quantkit.executor.graphs import power_of_two

_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 4.0
"""What is taken for the share of right guesses before any was seen, and as how many guesses that counts."""
_KEPT = 0.99
"""Of what counted at a guess, so much counts at the next: the last 100 matter."""
_TRIED, _DROPPED = 2, 1
"""Times that a cost must have been seen to be believed; the first times, which compile and capture, do not count."""
_SURE, _SETTLED = 4, 10
"""Times that a cost was seen up to which the fastest counts, for a machine may have been busy; and those that count at most."""
_FIRST, _SEEN = 8.0, 32.0
"""First guesses that must have been checked before more are tried; and before they are given up, if there is credit."""
_STALE, _STALE_NONE, _AGE = 0.1, 0.4, 96.0
"""By what share a cost may have fallen since it was seen, at most, and that of steps without guesses; and over how many steps, times the
square of how often it was seen, it falls to nothing: what was seen four times falls by a tenth in 154 steps."""
_EVERY = 16
"""Steps between choices."""
_TRIAL = 1 + _DROPPED + _TRIED
"""Steps that something new is tried for: the guesses of the first are checked in the second."""
_TRIAL_NONE = 2
"""The same for none: behind more steps a layer reads what it has not as a prompt."""
_MARGIN, _STAYS = 1.01, 0.97
"""By how much something must promise to be faster than what is used; and how slow guesses may seem, beside none, that are made already, for
beginning anew costs more than what is not known better."""
_LENT, _SHARE, _SAVED = 1.25, 0.005, 12.0
"""The credit at first; what every step adds to it; and what is saved up at most."""
_OWED = 3.0
"""Of the credit, the debt in which what promises to pay goes on."""
_ENOUGH = 0.5
"""Of the credit, beside the cost of beginning anew: to guess again after a debt, or to try what does not promise to pay."""
_FEW, _MUCH, _MOST_READ = 4, 8.0, 10.0
"""Behind more steps without guesses than this a layer reads what it has not as a prompt, operator by operator; how many steps that is taken
to cost before it was seen, and is at most: the first time it compiles, too."""
_REMEMBERED = 0.25
"""So much of what was right before such a pause counts behind it: the text is another, and a trial is short."""
_REPAID = 32
"""Steps within which guesses that promise to pay should bring back what beginning anew costs beyond the credit."""
_SLOWEST = 4.0
"""Steps without guesses that one with guesses is charged at most: a slower one is the machine's."""

COMPUTED, LOOKUP = "computed", "lookup"
"""Who guessed."""


@dataclass
class Rates:
    """Of one source of guesses: the share that was right at each place, of those whose predecessors were right."""

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
        self.right, self.seen = [one * share for one in self.right], [one * share for one in self.seen]

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
                rate = (self.right[place] + rate * _PRIOR_WEIGHT) / (self.seen[place] + _PRIOR_WEIGHT)
            chance *= rate
            sums.append(sums[-1] + chance)
        return sums


@dataclass
class Cost:
    """Seconds of steps of one size; how often they were seen, as far as that counts, and when last."""

    seconds: float
    times: int
    last: int

    def add(self, seconds: float, now: int) -> None:
        self.times, self.last = min(self.times + 1, _SETTLED), now
        if self.times <= _SURE:  # the machine may have been busy once
            self.seconds = min(self.seconds, seconds)
        else:  # a single slow step is the machine's, not the rows': it moves what is known by little
            self.seconds += (min(seconds, 2 * self.seconds) - self.seconds) / self.times

    def hoped(self, now: int, most: float) -> float:
        """What it may be by now, by a share of `most` less."""
        return self.seconds * (1 - min(most, (now - self.last) / (_AGE * self.times**2)))


class Costs:
    """Seconds of steps by their rows, for one number of guesses that the step makes. stale: by what share they may have fallen since they
    were seen, at most; enough: times that one must have been seen to be believed."""

    def __init__(self, stale: float = _STALE, enough: int = _TRIED) -> None:
        self._stale, self._least = stale, enough
        self._met: Counter[int] = Counter()
        self._known: dict[int, Cost] = {}

    def add(self, rows: int, seconds: float, now: int = 0) -> None:
        """now: the step."""
        self._met[rows] += 1
        if self._met[rows] > _DROPPED:
            if rows in self._known:
                self._known[rows].add(seconds, now)
            else:
                self._known[rows] = Cost(seconds, 1, now)

    def tried(self, rows: int) -> bool:
        """Whether steps of about so many rows were seen often enough."""
        return any(one.times >= self._least for at, one in self._known.items() if rows <= 1.5 * at <= 2.25 * rows)

    def by_rows(self, unit: float = 1.0) -> dict[int, float]:
        """What is known, in parts of a second."""
        return {rows: one.seconds * unit for rows, one in sorted(self._known.items())}

    def seconds(self, rows: float, now: int | None = None) -> float | None:
        """Between what is known of fewer and of more rows; None where nothing is. now: what it may be by then, where that was long ago."""
        fewer = max((one for one in self._known if one <= rows), default=None)
        more = min((one for one in self._known if one >= rows), default=None)
        if fewer is None or more is None:
            near = fewer if more is None else more
            return None if near is None else self._at(near, now)
        low, high = self._at(fewer, now), self._at(more, now)
        return low + (high - low) * ((rows - fewer) / (more - fewer) if more > fewer else 0.0)

    def _at(self, rows: int, now: int | None) -> float:
        return self._known[rows].seconds if now is None else self._known[rows].hoped(now, self._stale)


class Guessing:
    """most_drafts, most_looked_up: guesses of each source after a token, at most. measured: whether fewer are made where that pays; then
    none at first, for what they are held against."""

    def __init__(self, most_drafts: int, most_looked_up: int, *, measured: bool = False) -> None:
        self.most_drafts, self.most_looked_up = most_drafts, most_looked_up
        self.measured = measured and most_drafts + most_looked_up > 0
        self.drafts, self.looked_up = (0, 0) if self.measured else (most_drafts, most_looked_up)
        self.rates = {COMPUTED: Rates(), LOOKUP: Rates()}
        self.costs: dict[int, Costs] = {drafts: Costs() if drafts else Costs(_STALE_NONE, _TRIED + 1) for drafts in range(most_drafts + 1)}
        """Of steps, by how many guesses they compute."""
        self._met: Counter[tuple[int, int]] = Counter()
        """How often sizes of steps came, by guesses and rows: the first time they are captured, and are charged as the second."""
        self._found = 0.5
        """Share of answers for which something was looked up."""
        self._credit, self._in_debt = _LENT, False
        self._idle, self._reading = 0, _MUCH
        """Steps since something was computed; what reading cost that came behind many of them, in steps."""
        self._steps = self._answers = self._next = self._tried_until = 0

    def checked(self, source: str, count: int, kept: int) -> None:
        """Of an answer's `count` guesses the first `kept` were right."""
        self.rates[source].add(count, kept)

    def found(self, share: float) -> None:
        """For so many of the step's answers something was looked up."""
        self._found = _KEPT * self._found + (1 - _KEPT) * share

    def stepped(self, answers: int, rows: int, kept: int, seconds: float) -> None:
        """A step that computed answers alone: so many, with so many rows, their guesses included, of which `kept` were right."""
        self._charge(answers, rows, kept, seconds)
        self.costs[self.drafts].add(rows, seconds, self._steps)
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
        best = self._best()
        trial = self._trial(best)
        if trial is not None and trial != best:
            self._next = self._tried_until = self._steps + (_TRIAL if any(trial) else _TRIAL_NONE)
            return trial
        soon = any(best) and (self._seen < _SEEN or self._credit < 0)
        self._next = self._steps + (_TRIAL if soon else _EVERY)
        if best[0] and self._reads_much:
            self._tried_until = self._steps + _TRIAL
        return best

    def _best(self) -> tuple[int, int]:
        """By what is known."""
        tried = [drafts for drafts in range(self.most_drafts + 1) if self._tried(drafts)]
        pairs = [one for one in itertools.product(tried, range(self.most_looked_up + 1)) if any(one)]
        if not pairs:
            return 0, 0
        best = max(pairs, key=self._rate)
        promised = self._rate(best) / self._rate((0, 0))
        least = _STAYS if not self._reads_much and self._seen >= _SEEN else _MARGIN
        if promised < least or (best[0] and self._reads_much and self._credit + _REPAID * (promised - 1) < self._enough()):
            return 0, 0
        return best

    def _trial(self, best: tuple[int, int]) -> tuple[int, int] | None:
        """What may be better than what is known: by costs that may have fallen since, of more guesses than were tried as of the most that
        were; or, in a pause, by nothing but the credit."""
        if not any(best) and (self._seen < _SEEN or self._reads_much) and self._credit >= self._enough():
            return min(1, self.most_drafts), min(1, self.most_looked_up)
        if self._reads_much:
            return None
        drafts, looked_up = max(itertools.product(range(self.most_drafts + 1), range(self.most_looked_up + 1)), key=self._hoped)
        if self._hoped((drafts, looked_up)) < _MARGIN * self._rate(best):
            return None
        new = next((fewer for fewer in range(drafts + 1) if not self._tried(fewer)), None)
        if new is not None:
            drafts, looked_up = new, 0
            if new > 1 and self._seen < _FIRST:
                return None
        return (drafts, looked_up) if self._may_lose(drafts) else None

    def _may_lose(self, drafts: int) -> bool:
        """Whether the credit has what a trial may lose, its steps being as much slower as those of fewer guesses let fear."""
        plain, known = self._rate((0, 0)), self._most_known(drafts)
        right, rows = self.rates[COMPUTED].expected(drafts), self._rows(known, 0)
        slower = (self.costs[known].seconds(rows) or 0.0) * plain / self._answers - 1 if known else 0.0
        lost = slower * drafts / max(known, 1) - right
        return drafts == 0 or self._credit >= max(0.0, lost) * (_TRIED + _DROPPED)

    def _charge(self, answers: int, rows: int, kept: int, seconds: float) -> None:
        """What a step brought and took, on the credit."""
        size, plain = (self.drafts, power_of_two(rows)), self.costs[0].seconds(answers)
        self._met[size] += 1
        began_anew, self._idle = self.drafts > 0 and self._reads_much, 0 if self.drafts else self._idle + 1
        if plain is None:
            return
        self._credit += _SHARE
        if began_anew:
            self._reading = min(max(seconds / plain - 1, 0.0), _MOST_READ)
            self._credit -= self._reading
            self.rates[COMPUTED].fade(_REMEMBERED)
        elif self.drafts > 0 or rows > answers:
            gained = kept / answers + 1 - min(seconds / plain, _SLOWEST)
            self._credit += (0, 2, 1)[min(self._met[size], 3) - 1] * gained
        self._credit = min(self._credit, _SAVED)
        self._in_debt = self._credit < (_ENOUGH if self._in_debt else -_OWED)

    @property
    def _seen(self) -> float:
        """How many first guesses were checked, as far as that counts."""
        return sum(self.rates[COMPUTED if self.most_drafts else LOOKUP].seen[:1])

    @property
    def _reads_much(self) -> bool:
        """Whether a layer that begins to guess has more to read than rows of a step."""
        return self.most_drafts > 0 and self._idle > _FEW

    def _enough(self) -> float:
        """Credit that beginning anew takes."""
        return _ENOUGH + (self._reading if self._reads_much else 0.0)

    def _rows(self, drafts: int, looked_up: int) -> int:
        found = self._found if looked_up else 0.0
        return round(self._answers * (1 + (1 - found) * drafts + found * max(looked_up, drafts)))

    def _tried(self, drafts: int) -> bool:
        """Whether it is known what so many computed guesses cost."""
        return self.costs[drafts].tried(self._rows(drafts, 0))

    def _most_known(self, drafts: int) -> int:
        """The most guesses of so many at most whose cost is known."""
        return next((fewer for fewer in range(drafts, 0, -1) if self._tried(fewer)), 0)

    def _rate(self, pair: tuple[int, int], now: int | None = None) -> float:
        """Tokens a second; of guesses that were not tried, with the cost of the most of those that were. now: as `Costs.seconds`."""
        drafts, looked_up = pair
        found = self._found if looked_up else 0.0
        right = (1 - found) * self.rates[COMPUTED].expected(drafts) + found * self.rates[LOOKUP].expected(looked_up)
        known = self._most_known(drafts)
        seconds = self.costs[known].seconds(self._rows(known, looked_up), now)
        assert seconds, "steps without guesses come first"
        return self._answers * (1 + right) / seconds

    def _hoped(self, pair: tuple[int, int]) -> float:
        return self._rate(pair, self._steps)
