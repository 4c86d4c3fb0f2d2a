"""Recipes: schema, TOML, errors with lines, JSON schema; and `init`, which writes a recipe for a data file."""
