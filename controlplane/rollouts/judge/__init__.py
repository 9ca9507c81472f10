"""The judge of a rollout: compares the canary with its comparison arm, look by look."""
