from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source_tree import ROOT

LOGS_TO_A_FULL_DISK = """
import logging, sys
from ray.serve._private.logging_utils import StreamToLogger
if sys.argv[1] == "ours":
    import deployments.config
logger = logging.getLogger("ray.serve")
logger.propagate = False
logger.addHandler(logging.FileHandler("/dev/full"))
sys.stderr = StreamToLogger(logger, logging.INFO, sys.stderr)
try:
    logger.warning("what nobody will read")
except RecursionError:
    print("the request fails")
else:
    print("the line is dropped")
"""


@pytest.mark.parametrize(("kind", "told"), [("serve's", "the request fails"), ("ours", "the line is dropped")])
def test_a_line_that_a_full_disk_does_not_take_fails_no_request(kind: str, told: str) -> None:
    """As Serve's replicas log, stderr included; the first case is what has to be kept from happening."""
    command = [sys.executable, "-c", LOGS_TO_A_FULL_DISK, kind]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told in run.stdout
