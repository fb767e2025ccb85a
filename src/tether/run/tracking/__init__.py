"""Forward a run's metrics to trackers."""
