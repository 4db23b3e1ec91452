"""The networks: the decoder, how its layers are assigned to stages, and its initial weights."""
