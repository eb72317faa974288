"""Quantizes a small checkpoint: the job that tests/quantization/test_kill.py kills and starts
again.

    python quantize_job.py SOURCE TEXT OUT kill TIMES SECONDS   killed so many times at random moments of a run of about SECONDS, and
                                                                as often in the middle of a write;
                                                                then left alone
    python quantize_job.py SOURCE TEXT OUT once [BYTES] [METHOD ...]  one run, also as a rank of
    torchrun; its --memory, 0 for none, and
                                                                its recipe's methods
Prints one JSON object. It forks, so that torch is imported once and not for every run.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from quantized import quantized
from small_recipe import SMALL

from quantkit.calibrate import expert_layer, input_sums
from quantkit.calibrate.recipe import Recipe
from quantkit.common.progress import Note, Progress

SCHEME = "awq-w4a16"
METHODS = None
"""Of its recipe; None for the scheme's own."""
expert_layer.expert_batch_values = lambda device_type, batches: min(
    2 * 3 * 128 * 256, batches.expert_values
)  # two of make_model's experts
input_sums.PANEL = 64  # so that make_model's Hessians have several, as real ones do


def run(source, text, out, facts=None, memory=None, also=lambda event: None):
    """One run; the units that it finds finished are counted in `facts`. also: told every event,
    too."""
    found = 0

    def on_event(event):
        nonlocal found
        found += isinstance(event, Note) and event.text.endswith("found finished")
        if facts is not None and isinstance(event, Progress):
            facts.write_text(str(found))
        also(event)

    recipe = Recipe(scheme=SCHEME, calibration=str(text), methods=METHODS, **SMALL)
    return quantized(source, out, recipe, memory=memory, on_event=on_event)


def tear(writes):
    """From now on, the write that comes after `writes` others is cut in half by SIGKILL."""
    pwrite, left = os.pwrite, writes

    def torn(descriptor, data, offset):
        nonlocal left
        if left == 0:
            pwrite(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return pwrite(descriptor, data, offset)

    os.pwrite = torn


def kill_and_start_again(source, text, out, times, seconds):
    """Killed at random moments and in the middle of writes, `times` each, some run having gone on
    from an earlier one's units; then to the end. A run that ends before its kill is thrown away."""
    facts = out.with_name("facts")
    deaths, found = {"moment": 0, "write": 0}, [0]
    for attempt in range(40):
        if min(deaths.values()) >= times and max(found) > 0:
            break
        plan = "write" if attempt % 2 else "moment"
        facts.write_text("0")
        pid = os.fork()
        if pid == 0:
            if plan == "write":
                tear(random.randrange(12))
            run(source, text, out, facts)
            os._exit(0)
        if plan == "moment":
            time.sleep(random.uniform(0, seconds))
            os.kill(pid, signal.SIGKILL)
        deaths[plan] += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        found.append(
            int(facts.read_text() or 0)
        )  # a kill may fall between its clearing and its writing
        if out.exists():
            shutil.rmtree(out)
    facts.unlink()
    if not out.exists():
        run(source, text, out)
    return {"deaths": deaths, "found": found}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no threads, so that forking is safe
    source, text, out = (Path(argument) for argument in sys.argv[1:4])
    if sys.argv[4] == "kill":
        print(
            json.dumps(
                kill_and_start_again(source, text, out, int(sys.argv[5]), float(sys.argv[6]))
            )
        )
    elif sys.argv[4] == "once":
        METHODS = tuple(sys.argv[6:]) or None
        print(
            run(
                source, text, out, memory=(int(sys.argv[5]) if len(sys.argv) > 5 else 0) or None
            ).peak_memory
        )
