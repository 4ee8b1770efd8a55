from __future__ import annotations

import math

import httpx
import numpy as np
import pytest

from app.routes.classify import _told
from deployments.generation import TextPrompt, TokenPrompt
from engine.request import Pooling
from tests.app.routes.pooled_fields import WRONG_FIELDS
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/classify"


async def test_the_answer_is_vllms(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    response = await client.post(PATH, json={"model": "shout", "input": ["a", "b"], "user": "u", "priority": 0})
    answer = response.json()
    assert answer.pop("id").startswith("classify-")
    assert answer.pop("created") > 0
    low, high = 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-0.5))
    assert answer == {
        "object": "list",
        "model": "shout",
        "data": [
            {"index": 0, "label": "LABEL_0", "probs": pytest.approx([high, low]), "num_classes": 2},
            {"index": 1, "label": "LABEL_1", "probs": pytest.approx([low, high]), "num_classes": 2},
        ],
        "usage": {"prompt_tokens": 11, "total_tokens": 11, "completion_tokens": 0},
    }
    (request,) = gateway.embedded
    assert (request.pooling, request.dimensions, request.normalizes) == (Pooling.CLASS, None, False)
    assert request.request_id.startswith(f"{response.headers['request-id']}.")


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", (TextPrompt(text="a"),)),
        ([1, 2], (TokenPrompt(token_ids=(1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2, 3)))),
    ],
)
async def test_each_shape_of_input_reaches_the_gateway_and_raw_scores_come_back(
    client: httpx.AsyncClient, gateway: ScriptedGateway, given: object, inputs: object
) -> None:
    body = {"model": "shout", "input": given, "use_activation": False}
    response = await client.post(PATH, json=body, headers={"x-request-timeout": "2.5"})
    (request,) = gateway.embedded
    assert (request.inputs, request.timeout_s) == (inputs, 2.5)
    assert response.json()["data"][0]["probs"] == [0.5, 0.0]


async def test_a_single_label_has_a_sigmoid(client: httpx.AsyncClient) -> None:
    for activation, prob in ((True, 1 / (1 + math.exp(-0.5))), (None, 1 / (1 + math.exp(-0.5))), (False, 0.5)):
        body = {"model": "single", "input": "a", "use_activation": activation}
        (found,) = (await client.post(PATH, json=body)).json()["data"]
        assert found == {"index": 0, "label": "LABEL_0", "probs": [pytest.approx(prob)], "num_classes": 1}


def test_high_scores_do_not_overflow() -> None:
    for numbers, probs in (((3e38, -3e38, 3e38), [0.5, 0.0, 0.5]), ((3e38,), [1.0]), ((-3e38,), [0.0])):
        assert _told(0, np.array(numbers, "<f4").tobytes(), activates=True).probs == probs


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        *WRONG_FIELDS,
        ({"model": "base"}, "model", 400),
        ({"use_activation": "softmax"}, "use_activation", 400),
        ({"dimensions": 1}, "dimensions", 400),
    ],
)
async def test_wrong_bodies_name_their_field(
    client: httpx.AsyncClient, change: dict[str, object], param: str, status: int
) -> None:
    response = await client.post(PATH, json={"model": "shout", "input": "a"} | change)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
