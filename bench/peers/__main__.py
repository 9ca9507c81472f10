"""Runs the comparison: `python -m bench.peers`."""

from bench.peers.main import main

if __name__ == "__main__":
    main()
