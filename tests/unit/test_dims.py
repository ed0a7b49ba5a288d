"""ParallelDims: what fits, and what the refusal says."""

import pytest

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
        ({"dp_shard": 0}, 4, r"dp_shard is 0, but it is at least 1, or -1"),
        ({"dp_shard": -2}, 4, r"dp_shard is -2"),
        ({"cp": 0}, 4, r"cp is 0"),
        ({"tp": -1}, 4, r"tp is -1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_all_numbers(degrees, world_size, message):
    with pytest.raises(UserError, match=message):
        ParallelDims(**degrees, world_size=world_size)
