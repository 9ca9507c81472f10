"""`python -m tests.chaos`."""

from tests.chaos.main import main

main()
