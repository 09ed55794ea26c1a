"""Engines: where weights train. ``policy`` is plain torch on one device; FSDP2 and Megatron-Core come behind it."""
