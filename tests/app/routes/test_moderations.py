from __future__ import annotations

import httpx
import pytest

from app.http.api import create_app
from app.translation.moderation import OPENAI_CATEGORIES
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/moderations"


async def test_each_text_gets_a_result_with_the_thirteen_categories_and_the_hazards(client: httpx.AsyncClient) -> None:
    answer = (await client.post(PATH, json={"input": ["fine", "bad"]})).json()
    assert answer["model"] == "guard"
    assert answer["id"].startswith("modr-")
    assert [result["flagged"] for result in answer["results"]] == [False, True]
    bad = answer["results"][1]
    assert set(bad["categories"]) == {*OPENAI_CATEGORIES, "elections"} == set(bad["category_applied_input_types"])
    assert bad["categories"]["hate"] is True
    assert bad["category_scores"]["hate"] == 0.9
    assert not any(flag for category, flag in bad["categories"].items() if category != "hate")


async def test_parts_are_one_input_whose_result_covers_all_of_them(client: httpx.AsyncClient) -> None:
    """Clients read the first result: what was wrong with the second part was told in a second one."""
    parts = [{"type": "text", "text": text} for text in ("fine", "bad", "fine")]
    [result] = (await client.post(PATH, json={"input": parts})).json()["results"]
    assert result["flagged"] is True
    assert result["category_scores"]["hate"] == 0.9
    [result] = (await client.post(PATH, json={"input": parts[:1]})).json()["results"]
    assert result["flagged"] is False


@pytest.mark.parametrize("model", [None, "guard", "omni-moderation-latest", "text-moderation-stable"])
async def test_the_classifier_answers_to_its_name_and_to_openais(client: httpx.AsyncClient, model: str | None) -> None:
    assert (await client.post(PATH, json={"input": "x", "model": model})).status_code == 200


async def test_other_names_are_a_404(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json={"input": "x", "model": "base"})
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


async def test_without_a_classifier_the_route_says_so(gateway: ScriptedGateway) -> None:
    transport = httpx.ASGITransport(app=create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post(PATH, json={"input": "x"})
    assert response.status_code == 404
    assert "no safety classifier" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": ["a"] * 5}, "input"),
        ({"input": "a" * 6000}, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}, "input[0].type"),
        ({"input": "a", "inptu": "b"}, "inptu"),
    ],
)
async def test_wrong_bodies_name_their_field(client: httpx.AsyncClient, body: object, param: str) -> None:
    response = await client.post(PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
