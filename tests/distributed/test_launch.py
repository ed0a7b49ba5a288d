"""The boundary: whatever fails on whichever ranks, one message, and every rank exits non-zero."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from ranks import run_script
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def run(num_processes, body, tmp_path):
    """Run ``main`` of a script on several processes: (exit codes, stderr of each)."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "from ppl_eval.errors import UserError\n"
        "from ppl_eval.boundary import guarded, set_log_level\n"
        "rank = int(os.environ.get('RANK', '0'))\n"
        f"def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        "guarded(main)\n"
    )
    errors = str(tmp_path / "error_{rank}.json")
    ended = run_script(num_processes, script, cwd=tmp_path, TORCHELASTIC_ERROR_FILE=errors)
    return [process.code for process in ended], [process.err for process in ended]


@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_mistake_that_all_ranks_see_is_shown_once(tmp_path, num_processes):
    codes, errors = run(num_processes, "raise UserError('x is 3, but it is 4')", tmp_path)
    assert codes == [1] * num_processes
    assert sorted(errors)[-1] == "ppl_eval: error: x is 3, but it is 4\n"
    assert sorted(errors)[:-1] == [""] * (num_processes - 1)


def test_a_mistake_of_one_rank_ends_those_that_wait_for_it(tmp_path):
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if rank == 1:
            raise UserError("only here")
        dist.all_reduce(torch.ones(1))
        """
    codes, errors = run(2, body, tmp_path)
    assert codes == [1, 1]
    assert errors == ["", "ppl_eval: error: only here\n"]


def test_a_defect_shows_the_traceback_of_the_rank_that_failed_first(tmp_path):
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if rank == 1:
            raise KeyError("a defect")
        dist.all_reduce(torch.ones(1))
        """
    codes, errors = run(2, body, tmp_path)
    assert codes == [1, 1]
    assert errors[0] == ""
    assert errors[1].startswith("ppl_eval: unexpected error on rank 1\nTraceback")
    assert errors[1].count("Traceback") == 1


def test_debug_shows_every_traceback(tmp_path):
    codes, errors = run(2, "set_log_level('DEBUG')\nraise UserError('seen')", tmp_path)
    assert codes == [1, 1]
    for error in errors:
        assert error.count("Traceback") == 1
        assert "UserError: seen" in error


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_interrupt_is_one_line(tmp_path, num_processes):
    codes, errors = run(num_processes, "raise KeyboardInterrupt", tmp_path)
    assert codes == [130] * num_processes
    assert "".join(errors) == "ppl_eval: interrupted\n"


def test_a_world_without_a_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from ppl_eval.boundary import guarded\nguarded(lambda: None)\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}
    done = subprocess.run(
        [sys.executable, script],
        env={**env, "WORLD_SIZE": "2", "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ppl_eval: error: WORLD_SIZE is 2, but")
    assert done.stderr.count("\n") == 1


def test_without_an_error_nothing_is_said(tmp_path):
    assert run(2, "pass", tmp_path) == ([0, 0], ["", ""])


@pytest.mark.parametrize("failing", [0, 1])
def test_torchruns_report_names_the_first_error_as_the_cause(tmp_path, failing):
    """As torchrun makes it, also if it stamps a rank that left no file in the same second."""
    body = f"""
        if rank == {failing}:
            raise UserError("café is wrong")
        time.sleep(2)
        raise KeyError("afterwards")
        """
    codes, _ = run(3, body, tmp_path)
    failures = {}
    for rank, code in enumerate(codes):
        file = tmp_path / f"error_{rank}.json"
        if rank == (failing + 1) % 3:
            file.unlink()  # killed before it wrote one
        failures[rank] = ProcessFailure(rank, 1, code, str(file))
    stamp = json.loads((tmp_path / f"error_{failing}.json").read_text())["message"]["extraInfo"]
    failures[(failing + 1) % 3].timestamp = int(stamp["timestamp"]) + 1
    error = ChildFailedError("ppl_eval", failures)
    assert error.get_first_failure()[0] == failing
    causes = str(error).split("Root Cause")
    assert "traceback : ppl_eval: error: café is wrong\n" in causes[1]
    assert causes[0].count("ended by the error of ") == 1


def test_each_start_of_torchruns_shows_its_error(tmp_path):
    """torchrun keeps its store when it starts the ranks again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from ppl_eval.errors import UserError\n"
        "from ppl_eval.boundary import guarded\n"
        "def main():\n"
        "    raise UserError(f'start {os.environ[\"TORCHELASTIC_RESTART_COUNT\"]} fails')\n"
        "guarded(main)\n"
    )
    options = ("--standalone", "--max_restarts=1", "--monitor_interval=0.1", "--nproc_per_node=2")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, script],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    shown, causes = done.stderr.split("Root Cause")
    for start in (0, 1):
        assert f"\nppl_eval: error: start {start} fails\n" in f"\n{shown}"
    assert "traceback : ppl_eval: error: start 1 fails" in causes
