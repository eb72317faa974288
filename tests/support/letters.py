"""Text to calibrate on that says nothing: letters at random, the same every time."""

import torch


def write_letters(path, count=400):
    """`count` of a to z; returns the path."""
    path.write_text(
        "".join(
            map(
                chr,
                torch.randint(
                    97, 123, (count,), generator=torch.Generator().manual_seed(0)
                ).tolist(),
            )
        )
    )
    return path
