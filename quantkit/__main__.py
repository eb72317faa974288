"""`python -m quantkit`: the same as the `quantkit` command, for torchrun and machines without the script on PATH."""

from quantkit.cli import main

if __name__ == "__main__":
    main()
