import numpy as np
import pytest

from quantkit.evaluation.statistics.comparison import compare


def drawn(p: np.ndarray, repeats: int, seed: int) -> dict[str, list[float]]:
    scores = np.random.default_rng(seed).random((len(p), repeats)) < p[:, None]
    return {str(i): row.astype(float).tolist() for i, row in enumerate(scores)}


def verdicts(p: np.ndarray, drop: float, repeats: int, runs: int = 40) -> list[str]:
    worse = np.clip(p - drop, 0, 1)
    return [compare(drawn(worse, repeats, 2 * i), drawn(p, repeats, 2 * i + 1)).verdict for i in range(runs)]


P = np.random.default_rng(7).uniform(0.3, 0.9, 60)


def test_a_true_loss_is_rarely_called_held_and_no_loss_rarely_lost() -> None:
    assert verdicts(P, 0.03, 8).count("held") <= 2
    assert verdicts(P, 0.0, 8).count("lost") <= 3


def test_a_large_loss_is_seen_with_few_repeats() -> None:
    assert verdicts(P, 0.25, 4).count("lost") >= 36


def test_no_loss_is_held_with_many_repeats() -> None:
    assert verdicts(P, 0.0, 1500, runs=10).count("held") >= 7


def test_the_number_of_repeats_it_asks_for_tells_about_as_often_as_not() -> None:
    """A difference right at the interval's edge is found in half of the runs; with four times the repeats in nearly all."""
    worse = np.clip(P - 0.05, 0, 1)
    firsts = [compare(drawn(worse, 3, 200 + 2 * i), drawn(P, 3, 201 + 2 * i)) for i in range(30)]
    open_ones = [told for told in firsts if told.verdict == "cannot tell" and told.repeats_needed and -0.07 < told.difference < -0.03]
    assert len(open_ones) > 5
    told = []
    for seed, first in enumerate(open_ones):
        repeats = 4 * first.repeats_needed
        told.append(compare(drawn(worse, repeats, 300 + 2 * seed), drawn(P, repeats, 301 + 2 * seed)).verdict)
    assert told.count("lost") >= 0.8 * len(told)


def test_a_few_identical_replies_prove_nothing() -> None:
    same = {str(i): [1.0] for i in range(30)}
    told = compare(same, same)
    assert told.verdict == "cannot tell"
    assert told.low < -0.05 < 0 < told.high
    many = {str(i): [1.0] for i in range(400)}
    assert compare(many, many).verdict == "held"


def test_greedy_runs_ask_for_problems_not_repeats() -> None:
    ours = {str(i): [float(i % 10 != 0)] for i in range(50)}
    theirs = {str(i): [float(i % 7 != 0)] for i in range(50)}
    told = compare(ours, theirs, greedy=True)
    assert told.repeats_needed is None
    assert told.problems_needed is not None
    assert told.problems_needed > 50
    assert "problems would" in told.sentence()


def test_only_shared_problems_count_and_mcnemar_needs_single_repeats() -> None:
    told = compare({"a": [1.0], "b": [0.0], "x": [1.0]}, {"a": [0.0], "b": [0.0], "y": [1.0]})
    assert (told.n, told.gained, told.lost) == (2, 1, 0)
    assert told.mcnemar_p == 1.0
    assert compare({"a": [1.0, 0.0]}, {"a": [1.0, 1.0]}).mcnemar_p is None
    assert compare({"a": [1.0]}, {"b": [1.0]}) is None


def test_the_comparison_repeats_itself() -> None:
    a, b = drawn(P, 2, 1), drawn(P, 2, 2)
    assert compare(a, b, seed=3) == compare(a, b, seed=3)


@pytest.mark.parametrize("margin", [0.01, 0.05])
def test_held_means_that_the_margin_is_excluded(margin: float) -> None:
    told = compare(drawn(P, 400, 1), drawn(P, 400, 2), margin=margin)
    assert (told.verdict == "held") == (told.low >= -margin)
