"""The run: builds everything from the config and trains."""
