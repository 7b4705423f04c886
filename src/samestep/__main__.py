"""`python -m samestep` is the same as the command `samestep`."""

import sys

from samestep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
