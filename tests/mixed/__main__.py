"""`python -m tests.mixed`."""

from tests.mixed.main import main

main()
