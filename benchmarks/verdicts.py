"""How often are verdicts wrong? Simulated runs whose truth is known.

    python benchmarks/verdicts.py --runs 2000        the tables of docs/evaluation.md, in benchmarks/results/verdict-*.json
    python benchmarks/verdicts.py --runs 200         a look

Every run draws problems from a population, replies of both models to each, and asks `compare` for
its verdict, as an evaluation does. A verdict is false if it says held where the population loses
the margin (one point) or more, and lost where it loses nothing.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import core
import numpy as np

from quantkit.evaluation.statistics import sampling
from quantkit.evaluation.statistics.comparison import Comparison, compare, holm_corrected
from quantkit.evaluation.statistics.estimates import interval

Draw = Callable[
    [np.random.Generator, int], tuple[np.ndarray, np.ndarray]
]  # (baseline's, candidate's) share right of n problems
MARGIN = 0.01
LOOKS = (4, 8, 16, 32, 64)


def alike(a: float, b: float) -> Draw:
    """Both models the same; shares from Beta(a, b)."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        p = rng.beta(a, b, n)
        return p, p

    return draw


def spread(a: float, b: float, loss: float) -> Draw:
    """Every problem loses the same part of its share, `loss` in the mean."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        p = rng.beta(a, b, n)
        return p, p * (1 - loss * (a + b) / a)

    return draw


def whole(share: float, accuracy: float = 1.0) -> Draw:
    """A share of the problems is lost whole, the rest stays: the population loses share *
    accuracy."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        p = np.full(n, accuracy)
        return p, np.where(rng.random(n) < share, 0.0, p)

    return draw


Columns = list[str | tuple[str, str]]
"""Names, or names with units."""
Written = tuple[str, str, Columns, list[list[object]], list[str]]
"""A table's name, title, columns, rows and notes."""


@dataclass(frozen=True)
class Line:
    """`loss` is the population's, in points."""

    name: str
    draw: Draw
    n: int
    repeats: int
    loss: float

    def run(
        self, rng: np.random.Generator, repeats: int | None = None
    ) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Score tables of the candidate and of the baseline."""
        baseline, candidate = self.draw(rng, self.n)
        return table(rng, candidate, repeats or self.repeats), table(
            rng, baseline, repeats or self.repeats
        )


def table(rng: np.random.Generator, shares: np.ndarray, repeats: int) -> dict[str, list[float]]:
    scores = (rng.random((len(shares), repeats)) < shares[:, None]).astype(float)
    return {str(number): row for number, row in enumerate(scores.tolist())}


def logistic(
    rng: np.random.Generator, n: int, accuracy: float, spread: float, loss: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(baseline's, candidate's) share right and mean tokens of n problems: difficulties are normal
    on the logit scale, the candidate moves each by noise and all by what loses `loss`."""
    logits = rng.normal(0, spread, n) + np.log(accuracy / (1 - accuracy)) * np.sqrt(
        1 + spread**2 / 3
    )
    moved = logits + rng.normal(0, 0.3, n)
    baseline, low, high = 1 / (1 + np.exp(-logits)), -30.0, 30.0
    for _ in range(60):
        shift = (low + high) / 2
        candidate = 1 / (1 + np.exp(-(moved + shift)))
        low, high = (shift, high) if baseline.mean() - candidate.mean() > loss else (low, shift)
    return baseline, candidate, np.exp(rng.normal(8, 0.5, n) - 0.15 * logits)


def sequential_run(
    seed: int,
    n: int,
    accuracy: float,
    spread: float,
    loss: float,
    margin: float,
    *,
    repeats: int = 16,
    stored: int | None = None,
) -> tuple[str, str, float]:
    """The verdict of fixed repeats, that of the stages of sampling.py, and the tokens of the stages
    as a share of the fixed ones'. stored: repeats of a baseline that is not asked; the tokens are
    then the candidate's. Wrong replies are half as long again."""
    rng = np.random.default_rng(seed)
    shares = logistic(rng, n, accuracy, spread, loss)
    most = max(4 * repeats, stored or 0)
    scores = [(rng.random((n, most)) < share[:, None]).astype(float) for share in shares[1::-1]]
    lengths = [
        shares[2][:, None] * np.exp(rng.normal(0, 0.35, (n, most))) * np.where(score > 0, 1, 1.5)
        for score in scores
    ]

    def first(side: int, counts: dict[str, int]) -> dict[str, list[float]]:
        return {name: scores[side][int(name), :count].tolist() for name, count in counts.items()}

    def tokens(side: int, counts: dict[str, int]) -> dict[str, float]:
        return {name: lengths[side][int(name), :count].sum() for name, count in counts.items()}

    def means(side: int, counts: dict[str, int]) -> dict[str, float]:
        return {name: total / counts[name] for name, total in tokens(side, counts).items()}

    whole = {str(number): repeats for number in range(n)}
    fixed = sampling.compare_sampling(first(0, whole), first(1, whole), margin=margin).verdict
    start = dict.fromkeys(whole, sampling.PILOT)
    counts = [start, start if stored is None else dict.fromkeys(whole, stored)]
    for stage in range(len(sampling.STAGES)):
        grown = []
        for side in (0, 1) if stored is None else (0,):
            other = 1 - side
            found = sampling.repeats_of_stage(
                first(other, counts[other]),
                means(other, counts[other]),
                repeats,
                stage,
                complete=stored is not None,
            )
            grown.append({name: max(found[name], counts[side][name]) for name in whole})
        counts[: len(grown)] = grown
        seen = sampling.compare_sampling(
            first(0, counts[0]), first(1, counts[1]), margin=margin, stage=stage
        )
        if seen.verdict != "cannot tell" or seen.hopeless:
            break
    sides = (0, 1) if stored is None else (0,)
    asked, all_of_them = (
        sum(sum(tokens(side, each[side]).values()) for side in sides)
        for each in (counts, [whole, whole])
    )
    return fixed, seen.verdict, float(asked / all_of_them)


LINES = (
    Line("the same model", alike(4, 1), 30, 64, 0),
    Line("the same model", alike(4, 1), 200, 1, 0),
    Line("the same model", alike(4, 1), 200, 4, 0),
    Line("the same model", alike(4, 1), 1000, 4, 0),
    Line("the same model, nearly always right", alike(60, 1), 30, 64, 0),
    Line("the same model, nearly always right", alike(60, 1), 1000, 4, 0),
    Line("whole problems lost", whole(0.033), 30, 64, 3.3),
    Line("whole problems lost", whole(0.012), 164, 8, 1.2),
    Line("whole problems lost", whole(0.01), 400, 4, 1.0),
    Line("whole problems lost", whole(0.01), 2000, 4, 1.0),
    Line("whole problems lost", whole(0.0125, 0.8), 1000, 8, 1.0),
    Line("every problem a little worse", spread(4, 1, 0.01), 200, 4, 1.0),
    Line("every problem a little worse", spread(4, 1, 0.01), 2000, 4, 1.0),
)


def verdicts(line: Line, runs: int, seed: int) -> list[Comparison]:
    rng = np.random.default_rng(seed)
    return [_compared(*line.run(rng), seed=number) for number in range(runs)]


def _compared(
    candidate: Mapping[str, list[float]],
    baseline: Mapping[str, list[float]],
    seed: int,
    look: int = 1,
) -> Comparison:
    found = compare(candidate, baseline, margin=MARGIN, seed=seed, look=look)
    assert found is not None
    return found


def ever_said(line: Line, verdict: str, runs: int, seed: int) -> float:
    """Share of runs that say `verdict` at one of LOOKS while their repeats grow."""
    rng = np.random.default_rng(seed)
    said = 0
    for number in range(runs):
        ours, theirs = line.run(rng, LOOKS[-1])
        for look, repeats in enumerate(LOOKS, start=1):
            now = ({name: row[:repeats] for name, row in side.items()} for side in (ours, theirs))
            if _compared(*now, seed=number, look=look).verdict == verdict:
                said += 1
                break
    return said / runs


def any_of_tasks(line: Line, tasks: int, verdict: str, runs: int, seed: int) -> float:
    """Share of runs of several tasks in which any says `verdict`."""
    rng = np.random.default_rng(seed)
    said = 0
    for number in range(runs):
        found = holm_corrected(
            {str(task): _compared(*line.run(rng), seed=number) for task in range(tasks)}
        )
        said += any(one.verdict == verdict for one in found.values())
    return said / runs


def covered(line: Line, runs: int, seed: int) -> float:
    """Share of runs whose interval of the accuracy holds the population's."""
    rng = np.random.default_rng(seed)
    truth = float(line.draw(np.random.default_rng(0), 400_000)[0].mean())
    hits = 0
    for _ in range(runs):
        low, high = interval(list(line.run(rng)[1].values()))
        hits += low <= truth <= high
    return hits / runs


def advised(line: Line, runs: int, seed: int) -> tuple[int, float]:
    """(runs that could not tell, share of those in which a fresh run of the size advised tells)."""
    rng = np.random.default_rng(seed)
    asked = decided = 0
    for number in range(runs):
        baseline, candidate = line.draw(rng, line.n)
        first = _compared(
            table(rng, candidate, line.repeats), table(rng, baseline, line.repeats), seed=number
        )
        if first.verdict != "cannot tell":
            continue
        asked += 1
        repeats = first.repeats_needed or line.repeats
        if first.problems_needed:
            baseline, candidate = line.draw(rng, min(first.problems_needed, 100_000))
        decided += (
            _compared(
                table(rng, candidate, repeats), table(rng, baseline, repeats), seed=number
            ).verdict
            != "cannot tell"
        )
    return asked, decided / asked if asked else float("nan")


def errors(runs: int) -> Written:
    rows: list[list[object]] = []
    for seed, line in enumerate(LINES):
        counts = Counter(one.verdict for one in verdicts(line, runs, seed))
        held, lost = (round(100 * counts[verdict] / runs, 1) for verdict in ("held", "lost"))
        cover = round(100 * covered(line, runs, 100 + seed), 1)
        rows.append([line.name, line.n, line.repeats, line.loss, held, lost, cover])
        print(rows[-1], flush=True)
    columns: Columns = [
        *("truth", "problems", "repeats", ("population loses", "points")),
        *(("says held", "%"), ("says lost", "%"), ("interval covers", "%")),
    ]
    notes = [
        "held is false where the population loses 1 point or more, lost where it loses nothing",
        "the interval is that of one model's accuracy",
    ]
    return "verdict-errors", f"Verdicts of {runs} simulated runs a line", columns, rows, notes


def looks(runs: int) -> Written:
    rows: list[list[object]] = []
    for seed, line in enumerate((LINES[0], LINES[2], LINES[6], LINES[7])):
        verdict = "held" if line.loss else "lost"
        rows.append(
            [
                line.name,
                line.n,
                line.loss,
                verdict,
                round(100 * ever_said(line, verdict, runs, 200 + seed), 1),
            ]
        )
        print(rows[-1], flush=True)
    columns: Columns = [
        "truth",
        "problems",
        ("population loses", "points"),
        "false verdict",
        ("said at any of five looks", "%"),
    ]
    return (
        "verdict-looks",
        f"Runs grown until they decide: 4, 8, 16, 32, 64 repeats; {runs} simulated runs a line",
        columns,
        rows,
        [],
    )


def several_tasks(runs: int) -> Written:
    rows: list[list[object]] = []
    for seed, (line, tasks) in enumerate(((LINES[2], 5), (LINES[4], 5), (LINES[8], 5))):
        verdict = "held" if line.loss else "lost"
        said = round(100 * any_of_tasks(line, tasks, verdict, runs, 300 + seed), 1)
        rows.append([line.name, line.n, line.repeats, line.loss, tasks, verdict, said])
        print(rows[-1], flush=True)
    columns: Columns = [
        *("truth", "problems", "repeats", ("population loses", "points")),
        *("tasks", "false verdict", ("said of any task", "%")),
    ]
    return (
        "verdict-tasks",
        f"Several tasks in one run, Holm's correction; {runs} simulated runs a line",
        columns,
        rows,
        [],
    )


def advice(runs: int) -> Written:
    rows: list[list[object]] = []
    for seed, line in enumerate(
        (*LINES[:4], Line("every problem a little worse", spread(4, 1, 0.03), 200, 4, 3.0))
    ):
        asked, decided = advised(line, runs, 400 + seed)
        rows.append([line.name, line.n, line.repeats, line.loss, asked, round(100 * decided)])
        print(rows[-1], flush=True)
    columns: Columns = [
        *("truth", "problems", "repeats", ("population loses", "points")),
        *("could not tell", ("decided by a run of the size advised", "%")),
    ]
    return (
        "verdict-advice",
        "Advice: about N repeats, or problems, would decide",
        columns,
        rows,
        ["problems advised are drawn anew, 100,000 at most"],
    )


WORLDS = (
    (30, 0.8, 2.5, 0.065),
    (198, 0.7, 2.0, 0.03),
    (164, 0.93, 1.5, 0.022),
    (500, 0.95, 2.0, 0.011),
)
"""Problems, accuracy, spread of difficulties on the logit scale, and a margin that 16 repeats decide
in nine runs of ten."""


def sequential(runs: int) -> Written:
    rows: list[list[object]] = []
    for n, accuracy, wide, margin in WORLDS:
        for loss, stored in ((0, None), (0.5, None), (1, None), (2, None), (0, 64), (1, 64)):
            found = [
                sequential_run(seed, n, accuracy, wide, loss * margin, margin, stored=stored)
                for seed in range(runs)
            ]
            shares = [
                round(100 * sum(one[place] == verdict for one in found) / runs, 1)
                for verdict in ("held", "lost")
                for place in (0, 1)
            ]
            tokens = round(100 * float(np.mean([one[2] for one in found])))
            rows.append(
                [
                    n,
                    round(100 * margin, 2),
                    round(100 * loss * margin, 2),
                    stored or "asked",
                    *shares,
                    tokens,
                ]
            )
            print(rows[-1], flush=True)
    columns: Columns = [
        *("problems", ("margin", "points"), ("loss on these problems", "points")),
        *("baseline's repeats", ("16 repeats say held", "%"), ("stages say held", "%")),
        *(("16 repeats say lost", "%"), ("stages say lost", "%"), ("tokens of the stages", "%")),
    ]
    notes = [
        "held is false where the margin is lost, lost where nothing is",
        "tokens are those of both models; of the candidate where the baseline is stored",
    ]
    title = f"The verdict on these problems alone, in stages; {runs} simulated runs a line"
    return "verdict-sequential", title, columns, rows, notes


def main() -> None:
    options = core.parser(__doc__)
    options.add_argument("--runs", type=int, default=2000)
    options.add_argument("--commit", default=None)
    options.add_argument("--date", default="")
    args = options.parse_args()
    about = {
        "machine": "any: simulated",
        "commit": args.commit,
        "date": args.date,
        "command": f"python benchmarks/verdicts.py --runs {args.runs}",
    }
    few = max(args.runs // 4, 50)
    for table_of, runs in (
        (errors, args.runs),
        (looks, few),
        (several_tasks, few),
        (advice, max(args.runs // 20, 30)),
        (sequential, few),
    ):
        name, title, columns, rows, notes = table_of(runs)
        core.write(
            name,
            {"title": title, **about, "columns": heads(columns), "rows": rows, "notes": notes},
        )


def heads(columns: Columns) -> list[dict[str, str]]:
    return [
        {"name": one} if isinstance(one, str) else {"name": one[0], "unit": one[1]}
        for one in columns
    ]


if __name__ == "__main__":
    main()
