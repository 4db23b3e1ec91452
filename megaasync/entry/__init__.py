"""From the command line to a run: Hydra, messages, the run folder, and the ranks of this host. Imports no torch."""
