"""Where a gateway has prompts tokenized: short ones in its own process, long ones in the tokenizer deployment."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from ray.serve.handle import DeploymentHandle

from deployments.generation import ChatPrompt, TextPrompt
from deployments.handle_calls import reached
from deployments.room import Room
from deployments.tokenizer.text_codec import TextCodec
from deployments.tokenizer.tokenizer import LocalTokenizer, ask_tokenizer, is_longer
from deployments.waits import patiently

PATIENCE_S = 5.0
"""How long a request waits for a tokenizer that is being replaced."""


class PromptEncoder:
    """Tokenizes the prompts of all models; flows take turns.

    A call to another process costs a gateway more time than tokenizing a short prompt, and the request several times
    as much. Long prompts would take the processor from the gateway's streams.

    Args:
        handle: the tokenizer deployment; None to tokenize everything here.
        local_chars: prompts that count more characters (`is_longer`) go to `handle`.
    """

    def __init__(self, handle: DeploymentHandle | None, local_chars: int) -> None:
        self._handle = handle
        self._local_chars = local_chars
        self._local = LocalTokenizer()
        self._local_room, self._remote_room = Room(), Room()

    async def encode(self, codec: TextCodec, prompt: ChatPrompt | TextPrompt, flow: Hashable) -> Sequence[int]:
        """Return the token ids of a prompt, if need be from the successor of a tokenizer that has died.

        Args:
            flow: takes turns with other flows if many prompts wait.

        Raises:
            RequestError: as in the `encode` methods of `TextCodec`.
            UnavailableError: the tokenizer deployment cannot be reached, or does not answer in time.
        """
        if self._handle is None or not is_longer(prompt, self._local_chars):
            async with self._local_room.place(flow):
                return await reached("tokenizer", self._local.encode, codec, prompt)
        ask = partial(reached, "tokenizer", ask_tokenizer, self._handle, self._local, codec, prompt)
        async with self._remote_room.place(flow):
            return await patiently(ask, PATIENCE_S)
