"""What reads the file imports; what it says of files that cannot be read: tests of `app.cli.config_lint`."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_line_of_a_server_holds_neither_ray_nor_torch() -> None:
    code = "import sys, app.cli.main; print(*sorted({'ray', 'torch', 'pydantic', 'fastapi'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
