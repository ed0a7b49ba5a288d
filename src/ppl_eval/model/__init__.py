"""From a config's components and a checkpoint to a sharded model."""
