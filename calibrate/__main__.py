"""`python -m calibrate`: the command line of `calibrate.command`."""

import sys

from calibrate.command import main

if __name__ == "__main__":
    sys.exit(main())
