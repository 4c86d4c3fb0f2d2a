"""What several tasks share: the parts of the contract with their defaults, features, windows and outputs."""
