"""Warm-up of replicas before they serve: lives, hot prefixes, seeding, packages. Pure parts and one runner."""
