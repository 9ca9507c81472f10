"""Writes the folders of small models in the shapes of known families, and the goldens that transformers makes of them."""
