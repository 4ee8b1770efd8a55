"""Entry point for Locust: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.

The users and their options are in `loadtest.users`.
"""

import sys
from pathlib import Path

# Locust imports this file by its path, from any working directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loadtest.users.chat import ChatUser

__all__ = ["ChatUser"]
