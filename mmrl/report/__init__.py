"""The output of a run: its directory, metrics, progress, sample grids and HTML report."""
