"""Recipes: their schema, their TOML, their errors, and `init`, which writes a first one for a data file."""
