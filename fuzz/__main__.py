"""The fuzzer as a program: ``python -m fuzz``; see `fuzz.run`."""

import sys

from fuzz.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
