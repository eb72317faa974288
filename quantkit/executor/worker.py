"""A rank's process: it leads as rank 0, or follows and ends when rank 0 is done.

    python -m quantkit.executor.worker '{"model_path": ..., "tp": 4, ...}'      is one that follows, with RANK and WORLD_SIZE set

A process that rank 0 started ends on its own when rank 0 is gone.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from quantkit.common.errors import QuantkitError
from quantkit.executor.engine import Engine
from quantkit.executor.options import EngineOptions
from quantkit.executor.rank0 import follow
from quantkit.executor.ranks.rank_processes import leave_fault

_WATCH_SECONDS = 0.2


def lead_or_follow(
    options: EngineOptions, report: Callable[[str], None] = lambda text: None
) -> Engine:
    """Rank 0's engine. A process that was started as another rank follows here, and ends when rank
    0 dismisses it. report: as of `Engine.open`, of rank 0."""
    engine = (
        Engine.open(options) if int(os.environ.get("RANK", "0")) else Engine.open(options, report)
    )
    if engine.parallel.rank == 0:
        return engine
    follow(engine)
    engine.parallel.close()
    sys.exit(0)


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _end_with_parent()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C is for rank 0, which stops the others
    try:
        lead_or_follow(EngineOptions.from_json(sys.argv[1]))
    except QuantkitError as fault:
        leave_fault(fault)  # rank 0 finds most by itself, and reports them once
        sys.exit(1)


if __name__ == "__main__":
    main()
