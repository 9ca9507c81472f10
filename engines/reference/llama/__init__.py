"""A decoder of Llama's kind in plain PyTorch, for one GPU or for tests on a CPU: the arithmetic `torch`."""
