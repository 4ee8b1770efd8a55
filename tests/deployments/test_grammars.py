from __future__ import annotations

import pytest
from llguidance import LLMatcher

from deployments.generation import Grammar
from deployments.grammars import check_grammar
from engine.errors import RequestError


async def test_a_good_grammar_passes_and_a_bad_one_names_its_field() -> None:
    await check_grammar(Grammar(source=LLMatcher.grammar_from_regex("a+"), field="structured_outputs"))
    for source in (LLMatcher.grammar_from_regex("(("), LLMatcher.grammar_from_json_schema({"not": {}}), "start: x"):
        with pytest.raises(RequestError) as refused:
            await check_grammar(Grammar(source=source, field="response_format"))
        assert refused.value.field == "response_format"
        assert "\n" not in refused.value.message
        assert len(refused.value.message) < 400
