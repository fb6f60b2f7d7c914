"""`python -m qkv` is the command `qkv`."""

from qkv.cli import main

if __name__ == "__main__":
    main()
