"""The parts of the contract with their defaults, features, windows and outputs."""
