"""`python -m tests.kubernetes`."""

from tests.kubernetes.main import main

main()
