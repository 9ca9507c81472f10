"""`python -m simulator`, which `kvmesh replay` starts."""

from simulator.main import main

if __name__ == "__main__":
    main()
