"""The command `mapstate`, as `python -m mapstate`."""

from mapstate.cli import main

if __name__ == "__main__":
    main()
