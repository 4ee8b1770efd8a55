"""instructor: a model of the client's, by calls and by a schema."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Module(BaseModel):
    """Where something is found."""

    # A small model would go on with properties of its own for ever.
    model_config = ConfigDict(extra="forbid")

    module: Literal["os", "json"]
    sure: bool


client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="stdlib-chat",
        response_model=Module,
        messages=[{"role": "user", "content": "What does os.getcwd do?"}],
        temperature=0,
        max_tokens=300,
        max_retries=0,
    )
    assert isinstance(found, Module)
