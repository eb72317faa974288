"""Sizes of generated sets: a small fixed sample in CI, the whole set in `make check-long`."""

import os

WHOLE = "QUANTKIT_EVERY_CASE" in os.environ


def sized(sample, whole):
    return whole if WHOLE else sample
