"""What `quantkit` and `python -m quantkit` run; the latter for torchrun and machines without the script on PATH."""

import sys


def main() -> None:
    """The command line. Stopped while it is imported, it ends as it does later: in one word, with 130."""
    try:
        from quantkit.cli import main as command_line
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    command_line()


if __name__ == "__main__":
    main()
