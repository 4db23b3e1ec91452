"""What we see: metrics, trackers, progress, measured timeline, report."""
