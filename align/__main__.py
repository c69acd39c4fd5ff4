"""`python -m align`: the command line."""

from __future__ import annotations

from align.cli import main

if __name__ == "__main__":
    main()
