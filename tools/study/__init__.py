"""Studies: what a gradient delay costs, measured on small runs and on problems with a known bound."""
