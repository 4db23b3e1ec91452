"""Measurements: schedules, steps, checkpoints, plans and GPUs; and pictures of schedules."""
