"""`python -m secureinfer` is the `secureinfer` command."""

from .cli import main

if __name__ == "__main__":
    main()
