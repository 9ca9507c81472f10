"""`python -m services.router.replay`, which `kvmesh replay` starts."""

from services.router.replay.main import main

if __name__ == "__main__":
    main()
