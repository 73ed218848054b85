"""`python -m specq`, the same as the command `specq`."""

from specq.cli.app import entry

if __name__ == "__main__":
    entry()
