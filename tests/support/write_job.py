"""Writes a small checkpoint with CheckpointWriter: the job that test_writer.py runs, kills and
starts again.

    python write_job.py OUT kill TIMES      write it, killed so many times on the way; prints what each run found done
    python write_job.py OUT ranks NUMBER    write it with so many processes at once
    python write_job.py OUT full BYTES      write it, with so many bytes of the disk left when all but the last files are written,
                                            then with room again; prints what was told and the
                                            files' sha256

It forks, so that torch is imported once and not for every run.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from functools import cache
from pathlib import Path

import torch

from quantkit import QuantkitError
from quantkit.checkpoint.header import TensorSpec
from quantkit.checkpoint.writer import CheckpointWriter

UNITS = 100
SHARD_BYTES = 1_500_000
FINGERPRINT = {"source": "abc", "recipe": "def", "version": "1"}
CONFIG = {"model_type": "test"}
EXTRA = {"tokenizer.json": b'{"a": 1}'}


def unit(number):
    """The tensors of one unit: the same whenever they are computed."""
    generator = torch.Generator().manual_seed(number)
    prefix = f"model.layers.{number}.mlp"
    return {
        f"{prefix}.weight": torch.randint(
            0, 255, (128, 384), dtype=torch.uint8, generator=generator
        ),
        f"{prefix}.weight_scale": torch.randn(128, 24, generator=generator).to(torch.float8_e4m3fn),
        f"{prefix}.weight_scale_2": torch.randn((), generator=generator),
        f"{prefix}.norm.weight": torch.randn(384, generator=generator).bfloat16(),
    }


@cache
def specs():
    return [
        TensorSpec(name, t.dtype, tuple(t.shape))
        for number in range(UNITS)
        for name, t in unit(number).items()
    ]


def write(out, rank=0, ranks=1, overwrite=False, pause=0.0):
    """Write this rank's units, in an order of its own, and return the writer. pause: seconds before
    each."""
    writer = CheckpointWriter(
        out,
        specs(),
        fingerprint=FINGERPRINT,
        overwrite=overwrite,
        shard_bytes=SHARD_BYTES,
        rank=rank,
    )
    mine = list(range(rank, UNITS, ranks))
    random.shuffle(mine)
    for number in mine:
        name = f"unit {number}"
        if not writer.is_done(name):
            time.sleep(pause)
            writer.write(name, unit(number), {"number": number})
    return writer


def _forked(job):
    """Run `job` in a process of its own; returns its id."""
    pid = os.fork()
    if pid == 0:
        job()
        os._exit(0)
    return pid


def kill_and_start_again(out, kills):
    """Write `out`, killed `kills` times on the way; returns how many units each run found in the
    journal.

    Every third kill comes at once or while the run sets up, the others within moments of a unit
    entering the journal.
    """
    journal = out.with_name(f"{out.name}.partial") / ".quantkit" / "journal-00000.jsonl"

    def units():
        return journal.read_bytes().count(b'"unit"') if journal.exists() else 0

    found = []
    while not out.exists():
        found.append(units())
        # Without a pause a run may be done before this process, which waits for a processor, looks
        # again.
        pid = _forked(lambda: write(out, pause=0.005).finish(CONFIG, EXTRA))
        if len(found) <= kills:
            while len(found) % 3 and units() == found[-1] and not out.exists():
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def fill_the_disk(out, left):
    """Finish with `left` bytes free on the file system of `out`, fail, make room, start again."""
    filler = out.with_name("filler")
    writer = write(out)
    writer.wait()
    with filler.open("wb") as file:
        file.write(b"x" * (shutil.disk_usage(out.parent).free - left))
    try:
        writer.finish(CONFIG, EXTRA)
    except QuantkitError as error:
        told = str(error)
        partial = sorted(path.name for path in out.parent.iterdir())
        writer.close()
    filler.unlink()
    write(out).finish(CONFIG, EXTRA)
    return {
        "told": told,
        "left": partial,
        "files": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.iterdir()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads, so that forking is safe
    specs()  # once, before the forks
    out, what, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if what == "kill":
        print(json.dumps(kill_and_start_again(out, number)))
    elif what == "full":
        print(json.dumps(fill_the_disk(out, number)))
    else:
        children = [
            _forked(lambda rank=rank: write(out, rank, number).close()) for rank in range(number)
        ]
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        assert statuses == [0] * number, statuses
        write(out).finish(CONFIG, EXTRA)
