from __future__ import annotations

from deployments.config import model_deployment


def test_a_model_s_deployment_has_the_name_that_configurations_call_it_by() -> None:
    assert model_deployment("my-model") == "Model-my-model"
