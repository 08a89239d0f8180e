"""`python -m canter`, and `torchrun ... -m canter`: the command `canter`."""

import sys

from canter.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
