"""The encoder in plain torch: configuration, packing, attention, layers, heads and the CRF."""
