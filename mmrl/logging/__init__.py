"""What a run writes while it works: its directory, metrics, progress, samples and trackers."""
