"""Tests that a log which nothing reads stops nothing, and that a log which is read is whole."""

import re
import subprocess
import sys

from tests.waiting import WAIT_SECONDS

NUM_LINES = 10_000
# Logs more lines than fit into the pipe and the queue, says how many were dropped, and ends when it is told to.
TALK = f"""
import logging, sys
from meshserve.runtime.supervision.supervisor import Supervisor
from meshserve.runtime.telemetry import logs
logs._MAX_QUEUED_LINES = 100
logs.configure_logs("text", Supervisor())
for index in range({NUM_LINES}):
    logging.info("line %d %s", index, "x" * 100)
print(logs.num_dropped_lines(), flush=True)
if sys.stdin.readline():
    logging.getLogger().handlers[0].queue.join()
logging.info("the last line")
logs.complain("an error")
"""


def test_a_process_ends_although_nothing_reads_its_log():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TALK], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert 0 < int(process.stdout.readline()) < NUM_LINES
        process.stdin.close()
        assert process.wait(WAIT_SECONDS) == 0


def test_a_log_that_is_read_again_says_what_it_lacks():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TALK], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        num_dropped = int(process.stdout.readline())
        lines = process.communicate("go on\n", WAIT_SECONDS)[1].splitlines()
        assert process.returncode == 0 and " INFO root: line 0 x" in lines[0]
    told = [int(found[1]) for line in lines if (found := re.search(r"WARNING \S+: (\d+) lines of the log were", line))]
    assert sum(told) == num_dropped == NUM_LINES - sum(": line " in line for line in lines)
    assert lines[-2].endswith("the last line") and lines[-1] == "meshserve: an error"
