"""Compile the CUDA kernels for a wheel, which then needs no toolkit where it is installed: `make
wheel`.

    python tools/compile_kernels.py --out FOLDER [--architecture 90]

The library is made by the nvcc at hand, with the CUDA runtime and libstdc++ inside, and is loaded
once to see that it is whole. It asks for a driver of nvcc's major version of CUDA, and for the
glibc of the machine it is made on, which wheel_hook.py writes into the wheel's name.
"""

import argparse
from pathlib import Path

from quantkit_kernels.cuda.build import compile_library, find_nvcc
from quantkit_kernels.cuda.shipped import why_unfit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", default="90", help="compute capability without its dot")
    options = parser.parse_args()
    if find_nvcc() is None:
        raise SystemExit("nvcc is not installed: the CUDA toolkit has it")
    print(
        f"compiling the CUDA kernels for {options.architecture}: five minutes of processor time",
        flush=True,
    )
    path = compile_library(options.architecture, options.out)
    fault = why_unfit(path, path.stem.rpartition("-")[2])
    if fault is not None:
        raise SystemExit(f"{path}: {fault}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
