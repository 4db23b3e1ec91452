"""The networks: the decoder, how its layers are dealt to stages, and its initial weights."""
