"""`python -m tokenleap`: the command line."""

from tokenleap.cli import main

if __name__ == "__main__":
    main()
