"""Where a run is started: what is written for a cluster's scheduler, how it is handed over. Imports no torch."""
