"""Helpers of the tests: configs, ranks, and a run that returns its numbers."""
