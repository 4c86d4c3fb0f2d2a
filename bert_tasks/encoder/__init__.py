"""The encoder in plain torch, from its configuration to heads and the CRF."""
