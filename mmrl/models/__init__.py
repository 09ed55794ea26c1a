"""Training engines: ``policy`` is plain torch on one device; FSDP2 and Megatron-Core have the same interface."""
