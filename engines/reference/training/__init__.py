"""Trains the small model of the reference engine. Development only: the engine does not import this package."""
