"""Placement of a run on a controller's devices: policy, task queue, devices and device tasks."""
