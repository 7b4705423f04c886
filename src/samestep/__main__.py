"""`python -m samestep` is the same as the command `samestep`."""

import sys


def main() -> int:
    """Run the command; Ctrl-C ends it with 130 also while its modules are imported."""
    try:
        from samestep.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
