"""pydantic-ai: an agent whose result is typed."""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Module(BaseModel):
    """Where something is found."""

    module: Literal["os", "json"]
    sure: bool


model = OpenAIChatModel("stdlib-chat", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="unused"))
settings = {"temperature": 0, "max_tokens": 300}
question = "What does os.getcwd do?"
assert "working directory" in Agent(model).run_sync(question, model_settings=settings).output
assert isinstance(Agent(model, output_type=Module).run_sync(question, model_settings=settings).output, Module)
