"""Text to calibrate on that says nothing: letters at random, the same every time."""

import json

import torch


def write_letters(path, count=400):
    """`count` of a to z; returns the path. A .jsonl has documents of 32, every other one of which
    the model is said to have written."""
    generator = torch.Generator().manual_seed(0)
    letters = "".join(map(chr, torch.randint(97, 123, (count,), generator=generator).tolist()))
    if path.suffix == ".jsonl":
        kinds = ("written by the model", "") * count
        parts = (letters[start : start + 32] for start in range(0, count, 32))
        lines = (json.dumps({"text": part, "kind": kind}) for part, kind in zip(parts, kinds))
        letters = "\n".join(lines)
    path.write_text(letters)
    return path
