"""The scenarios: each starts a process under test and its neighbours, and adds figures to the results."""
