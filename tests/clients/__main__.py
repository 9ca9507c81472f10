"""`python -m tests.clients`."""

from tests.clients.main import main

main()
