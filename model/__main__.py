"""The model as a program: ``python -m model``; see `model.run`."""

import sys

from model.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
