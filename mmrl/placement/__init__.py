"""Placement of work on a controller's devices: policy, task queue, devices and device tasks."""
