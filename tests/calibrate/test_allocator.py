"""What glibc does with freed memory, in a process of its own: it cannot be taken back."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource
import psutil
import torch
from quantkit.calibrate.hidden_states import trim_heap, keep_freed_blocks

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

anew = faults()
keep_freed_blocks()
kept = faults()
blocks = [torch.ones(2**24) for _ in range(6)]
above = torch.ones(1000)
del blocks
full = psutil.Process().memory_info().rss
trim_heap()
print(anew, kept, full - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_blocks_are_kept_until_they_are_given_back():
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    anew, kept, returned = (int(number) for number in done.stdout.split())
    assert kept < 0.6 * anew, "a block of 64 MiB is not faulted in each of 20 times"
    assert returned > 2**26
