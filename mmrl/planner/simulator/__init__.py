"""The simulator: the steps of a run on many devices, in simulated time (``mmrl simulate``)."""
