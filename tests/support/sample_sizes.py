"""Sizes of generated sets: a small fixed sample in CI, the whole set in `make check-long`."""

import os

WHOLE = "QUANTKIT_EVERY_CASE" in os.environ


def sized(sample: int, whole: int) -> int:
    return whole if WHOLE else sample
