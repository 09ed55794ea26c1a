"""What a run leaves behind and shows: its directory, metrics, progress, sample grids and HTML report."""
