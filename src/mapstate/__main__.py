"""``python -m mapstate`` is the command ``mapstate``."""

from mapstate.cli import main

if __name__ == "__main__":
    main()
