"""litellm: as a provider of OpenAI's kind and of Anthropic's."""

from __future__ import annotations

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

QUESTION = [{"role": "user", "content": "What does os.getcwd do?"}]
OPENAI = {"model": "openai/stdlib-chat", "api_base": f"{sys.argv[1]}/v1", "api_key": "unused", "temperature": 0}
ANTHROPIC = {"model": "anthropic/stdlib-chat", "api_base": sys.argv[1], "api_key": "unused", "temperature": 0}

texts = [litellm.completion(messages=QUESTION, **options).choices[0].message.content for options in (OPENAI, ANTHROPIC)]
assert "working directory" in texts[0]
assert texts[0] == texts[1]
for options in (OPENAI, ANTHROPIC):
    chunks = litellm.completion(messages=QUESTION, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[0]
