"""Standard streams that are closed, full or ASCII: what was to be done is done, and exits well."""

import os
import subprocess
import sys

import pytest

BODY = """
import logging, sys
from pathlib import Path
from tqdm import tqdm
from ppl_eval.errors import UserError
from ppl_eval.boundary import guarded, set_log_level

def main():
    set_log_level("INFO")
    for number in range(3):
        print("x" * 100_000, flush=number == 0)
        logging.getLogger("ppl_eval").info("y" * 100_000)
    for _ in tqdm(range(3), mininterval=0):
        pass
    print(sys.stdin.read(), "café 文")
    Path("done").touch()
    if "fail" in sys.argv:
        raise UserError("this is wrong")

guarded(main)
"""


@pytest.fixture
def shell(tmp_path):
    """Run BODY as ``run`` in a shell command: (exit code of the first in a pipe, output, error)."""
    (tmp_path / "body.py").write_text(BODY)

    def call(command, **env):
        command = (
            f'run() {{ "{sys.executable}" body.py "$@"; }}; {command}; exit ${{PIPESTATUS[0]}}'
        )
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [
        "run 2>/dev/null | head -c 1",
        "run 2>&1 | head -c 1",
        "run 2>&1 >/dev/null | true",
        "run >&-",
        "run 2>&-",
        "run 2>/dev/full",
        "run <&- >&- 2>&-",
        "run <&- >/dev/full 2>&1",
    ],
)
def test_a_stream_that_is_gone_ends_nothing(shell, tmp_path, command, unbuffered):
    code, _, error = shell(command, PYTHONUNBUFFERED=unbuffered)
    assert code == 0, error
    assert (tmp_path / "done").exists()
    assert b"Traceback" not in error
    assert b"Exception ignored" not in error


def test_a_full_disk_behind_stdout_is_one_line(shell, tmp_path):
    code, _, error = shell("run >/dev/full")
    assert code == 0
    assert (tmp_path / "done").exists()
    said = [line for line in error.decode().splitlines() if line.startswith("ppl_eval")]
    assert said == [
        "ppl_eval: stdout cannot be written (No space left on device); going on without it"
    ]


@pytest.mark.parametrize("command", ["run fail 2>&-", "run fail 2>/dev/full", "run fail 2>&1|true"])
def test_an_error_that_nobody_can_read_is_still_one(shell, command):
    assert shell(command)[0] == 1


def test_letters_that_stdout_lacks_are_escaped(shell):
    code, output, _ = shell("run", PYTHONIOENCODING="ascii")
    assert code == 0
    assert rb"caf\xe9 \u6587" in output


@pytest.mark.parametrize(
    "command",
    [
        *("cli ls", "cli --help", "cli ls --help", "cli where tiny_text"),
        *("cli cp tiny_ppl_eval copy.yaml", "tools.text 999"),
    ],
)
def test_a_reader_that_has_gone_is_no_error_of_our_commands(tmp_path, command):
    pipe = f"'{sys.executable}' -m ppl_eval.{command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
