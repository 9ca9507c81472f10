"""`python -m tests.abuse`."""

from tests.abuse.main import main

main()
