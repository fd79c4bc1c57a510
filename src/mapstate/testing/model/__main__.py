"""The model as a program: ``python -m mapstate.testing.model``; see `mapstate.testing.model.run`."""

import sys

from mapstate.testing.model.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
