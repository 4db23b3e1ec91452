"""What a run will need and how its pipeline will run, from shapes alone: sizes, communication, the plan."""
