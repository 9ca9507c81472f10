"""One archive for a GPU host without a network, and the run that proves the mesh there."""
