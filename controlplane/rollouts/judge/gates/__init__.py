"""The gates: each judges one kind of evidence, and reports its figure beside its bound."""
