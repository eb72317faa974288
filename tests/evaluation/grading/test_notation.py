import pytest

from quantkit.evaluation.grading.notation import exact_angles, intervals, latex


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2√5", r"2\sqrt{5}"),
        ("2*sqrt(5)", r"2 \cdot \sqrt{5}"),
        (r"\sqrt{5}", r"\sqrt{5}"),
        ("x² - 7x", "x^{2} - 7x"),
        (r"3 \over 4", r"\frac{3}{4}"),
        ("6 + (-5)i", "6 - 5i"),
        ("6 + (-5)^2", "6 + (-5)^2"),
        (r"\bigl(3, 4\bigr)", "(3, 4)"),
        (
            r"\left(\begin{smallmatrix} 0 & 1 \end{smallmatrix}\right)",
            r"\begin{pmatrix} 0 & 1 \end{pmatrix}",
        ),
    ],
)
def test_what_is_written_otherwise_becomes_latex(written: str, meant: str) -> None:
    assert latex(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"0 < x \le 5", "(0, 5]"),
        (r"x \ge -5", r"[-5, \infty)"),
        (r"x < 2 \text{ or } x > 3", r"(-\infty, 2)\cup(3, \infty)"),
        ("x < y < 2 < 3", "x < y < 2 < 3"),
        ("(0, 5]", "(0, 5]"),
    ],
)
def test_inequalities_of_one_letter_are_intervals(written: str, meant: str) -> None:
    assert intervals(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (r"50\sin 30^\circ", "50(1/2)"),
        (r"\sin(60^{\circ})", r"(\sqrt{3}/2)"),
        (r"\cos\left(\frac{2\pi}{3}\right)", "(-1/2)"),
        (r"\tan^2 60^\circ", r"(\sqrt{3})^2"),
        ("sin 210°", "(-1/2)"),
        ("cos(π/2)", "(0)"),
        (r"\tan 135^\circ", "(-1)"),
        (r"\sin 30", r"\sin 30"),
        (r"\sin 20^\circ", r"\sin 20^\circ"),
        (r"\tan 90^\circ", r"\tan 90^\circ"),
        (r"\arcsin 30^\circ", r"\arcsin 30^\circ"),
        (r"\sin 30^\circ x", r"\sin 30^\circ x"),
        (r"\sin\frac{\pi}{7}", r"\sin\frac{\pi}{7}"),
        (r"\sin\frac{\pi}{0}", r"\sin\frac{\pi}{0}"),
    ],
)
def test_sines_of_known_angles_are_numbers(written: str, meant: str) -> None:
    assert exact_angles(written) == meant
