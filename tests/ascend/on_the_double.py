"""Run a Python file or `-m quantkit ...` with backend torch_npu on the double: what a rehearsal
puts in the place of a machine with an NPU.

The check of operators runs its first few, at a small shape.
"""

import importlib
import runpy
import sys
from itertools import islice

import torch
from ascend import npu_double
from quantkit_kernels import function_cases, timing


def main():
    timing._CPU_SECONDS = 0.0
    check = importlib.import_module("quantkit_kernels.self_check")
    check.LINEARS = {"down": (64, 2048)}
    for one in (check, function_cases):
        one.HIDDEN = 256
        # Of small weights, three times a large cache is thousands of copies and 20 GB.
        one.copies_beyond_cache = lambda nbytes, device: 1
    plain = check.check
    check.check = lambda target: islice(plain(target), 3)
    torch.set_grad_enabled(False)
    with npu_double.installed():
        if sys.argv[1] == "-m":
            sys.argv = sys.argv[2:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = sys.argv[1:]
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
