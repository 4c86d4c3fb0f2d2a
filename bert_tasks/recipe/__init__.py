"""Recipes, with their schema, TOML and errors. `init` writes a recipe for a file."""
