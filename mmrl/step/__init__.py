"""The parts of one step: its batch, micro-batches, context, metrics and the update program."""
