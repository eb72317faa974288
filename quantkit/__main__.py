"""What `quantkit` and `python -m quantkit` run; the latter for torchrun and machines without the
script on PATH."""

import signal
import sys
from types import FrameType


def main() -> None:
    """The command line. Stopped while it is imported, it ends as it does later: in one word, with
    130 or 143."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        from quantkit.cli import main as command_line
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    signal.signal(signal.SIGTERM, before)
    command_line()


def _terminate(number: int, frame: FrameType | None) -> None:
    print("terminated", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
