"""Runs a frontend: `python -m services.frontend`."""

from services.frontend.main import main

main()
