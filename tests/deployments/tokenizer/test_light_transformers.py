from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from deployments.generation import ChatMessage, ChatPrompt
from deployments.tokenizer.text_codec import TextCodec
codec = TextCodec("models/stdlib-chat")
print(codec.encode_chat(ChatPrompt(messages=(ChatMessage(role="user", content="What is json.loads?"),))))
print("torch" in sys.modules)
{more}
"""


def run(more: str = "", first: str = "") -> tuple[list[str], str]:
    """Run in a fresh interpreter; returns what it printed, and what it complained of."""
    code = first + CODE.format(more=more)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines(), done.stderr


def test_text_is_encoded_without_torch_and_without_advice_to_install_it() -> None:
    (token_ids, has_torch), complaints = run()
    assert has_torch == "False"
    assert "PyTorch" not in complaints
    (with_torch, is_there), _ = run(first="import torch\n")
    assert (with_torch, is_there) == (token_ids, "True")


def test_torch_can_be_imported_afterwards() -> None:
    (*_, last), _ = run(more="import torch, importlib.util\nprint(importlib.util.find_spec('torch') is not None)")
    assert last == "True"
