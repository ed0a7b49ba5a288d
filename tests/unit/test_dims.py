"""ParallelDims: what fits, and what the refusal says."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ppl_eval import UserError
from ppl_eval.parallel.dims import ParallelDims


def test_dp_shard_takes_what_is_left():
    dims = ParallelDims(dp_replicate=2, dp_shard=-1, cp=2, tp=2, world_size=16)
    assert dims.dp_shard == 2
    assert (dims.batch_size, dims.fsdp_size) == (4, 4)


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        (
            {"tp": 4},
            2,
            r"cp\(1\) \* tp\(4\) = 4 does not divide the number of processes, 2",
        ),
        ({"tp": 3}, 4, r"tp\(3\) = 3 does not divide the number of processes, 4"),
        ({"cp": 2, "dp_shard": 1}, 4, r"dp_shard\(1\) \* cp\(2\) \* tp\(1\) = 2, but 4 processes"),
        ({"tp": 2}, 1, r"does not divide the number of processes, 1,"),
        ({"dp_replicate": 3, "dp_shard": 1}, 2, r"= 3, but 2 processes were started: change"),
        ({"dp_replicate": -1}, 4, r"dp_replicate is -1, but a degree is at least 1"),
        ({"dp_shard": 0}, 4, r"dp_shard is 0, but a degree is at least 1"),
        ({"dp_shard": -2}, 4, r"dp_shard is -2"),
        ({"cp": 0}, 4, r"cp is 0"),
        ({"tp": -1}, 4, r"tp is -1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_all_numbers(degrees, world_size, message):
    with pytest.raises(UserError, match=message):
        ParallelDims(**degrees, world_size=world_size)


@pytest.fixture
def groups_at():
    """Rank 5 of a world that is not there: the groups that it makes and those that it is in."""

    def count(world_size, **degrees):
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=world_size)
        world = dist.distributed_c10d._world
        before = world.group_count
        meshes = ParallelDims(**degrees, world_size=world_size).build_mesh("cpu")
        joined = [
            sorted(r) for r in world.pg_group_ranks.values() if 5 in r and len(r) < world_size
        ]
        made = world.group_count - before
        for name in ("batch", "fsdp", "loss", "cp", "tp"):
            mesh = getattr(meshes, name)
            assert dist.get_process_group_ranks(mesh.get_group()) == mesh.mesh.tolist()
        return made, joined, meshes

    yield count
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "degrees", "made", "joined"),
    [
        (8, {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}, 4 + 4 + 2 + 4, 4),  # fsdp is cp
        (8, {"tp": 8}, 8, 1),  # each rank alone, for batch, fsdp, loss and cp; tp is the world
        (8, {}, 8, 1),  # each rank alone, for cp and tp
        (64, {}, 64, 1),
        (64, {"tp": 8}, 8 + 8 + 64, 3),  # batch, fsdp and loss are the same ranks
        (64, {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 4}, 8 + 8 + 4 + 32 + 16, 5),
    ],
)
def test_axes_over_the_same_ranks_do_not_get_a_group_each(
    groups_at, world_size, degrees, made, joined
):
    """A mesh for each purpose made 384 groups of 64 data-parallel ranks, and 148 of the last."""
    num_made, groups, _ = groups_at(world_size, **degrees)
    assert num_made == made
    assert len(groups) == joined
    assert len({tuple(ranks) for ranks in groups}) == len(groups)


def test_the_ranks_of_each_purpose(groups_at):
    """Of rank 5, which is (0, 0, 1, 1) on dp_replicate, dp_shard, cp and tp: tp is innermost."""
    _, _, meshes = groups_at(64, dp_replicate=2, dp_shard=4, cp=2, tp=4)
    assert meshes.batch.mesh.tolist() == [5, 13, 21, 29, 37, 45, 53, 61]
    assert meshes.fsdp.mesh.tolist() == [1, 5, 9, 13, 17, 21, 25, 29]
    assert meshes.loss.mesh.tolist() == list(range(1, 64, 4))
    assert meshes.cp.mesh.tolist() == [1, 5]
    assert meshes.tp.mesh.tolist() == [4, 5, 6, 7]
