"""The scenarios. Each starts a process under test with its load and stubs, and adds figures to the results."""
