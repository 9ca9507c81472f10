"""Trains the reference engine's small model. Development only: the engine imports nothing from here."""
