"""``python -m mapstate.testing.model``: see `run`."""

import sys

from mapstate.testing.model.run import main

if __name__ == "__main__":
    sys.exit(main())
