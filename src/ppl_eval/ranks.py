"""This process among those that a launcher started."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process's ranks, from the environment variables that torchrun sets."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_env(cls) -> "Ranks":
        """Rank 0 of 1 without a launcher."""
        env = os.environ
        world_size = int(env.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", world_size)),
        )
