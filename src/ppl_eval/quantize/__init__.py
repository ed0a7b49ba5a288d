"""Quantised linear layers: torchao's numbers, in parameters that FSDP2 can shard."""
