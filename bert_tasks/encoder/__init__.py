"""The encoder in plain torch: configuration, packing, attention, layers and heads. Knows no checkpoint names."""
