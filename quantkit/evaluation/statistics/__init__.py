"""Statistics of repeated, graded samples.

estimates.py   accuracy, standard errors, pass@k, majority, bounds on a mean
comparison.py  paired comparison with a baseline: held, lost or undecided
power.py       problems and repeats that a verdict needs
"""
