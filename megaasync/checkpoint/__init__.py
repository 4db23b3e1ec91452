"""Checkpoints on torch.distributed.checkpoint: by name and global shape, so that any layout can load them."""
