"""What routers tell each other of their dispatches, so that each counts the work of all."""
