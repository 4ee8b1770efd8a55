"""Scores of a small random cross-encoder against transformers, and what becomes of pairs that cannot have one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from deployments.classifiers.cross_encoder import CrossEncoder
from deployments.classifiers.reranking import Reranker, Rerankers
from deployments.classifiers.sequence_window import read_labels, read_window
from deployments.config import RerankerConfig
from deployments.errors import UnavailableError
from deployments.pooled import Pair, PairScore, RerankRequest
from deployments.room import NUM_PLACES
from engine.errors import CheckpointError, OverloadError, RequestError
from tests.deployments.in_process import Response
from tests.deployments.tiny_models import CONTEXT, write_cross_encoder, write_guard

QUERY = "Which function returns the current directory?"
DOCUMENTS = ("os.getcwd returns it.", "A bird.", "Return the current working directory. " * 6, "x", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("reranker"))


def config_of(folder: Path, **options: Any) -> RerankerConfig:
    fields = {"name": "judge", "model_path": str(folder), "max_tokens": CONTEXT, "max_batch": 3}
    return RerankerConfig(**fields | options)


def pairs_of(documents: Sequence[str], max_tokens: int | None = None) -> list[Pair]:
    return [Pair(QUERY, document, f"documents[{i}]", max_tokens) for i, document in enumerate(documents)]


@torch.no_grad()
def expected(folder: Path, document: str, **options: Any) -> tuple[float, int]:
    """One pair alone, as transformers scores it."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    row = AutoTokenizer.from_pretrained(folder)(QUERY, document, return_tensors="pt", **options)
    return model(**row).logits.sigmoid().item(), row.input_ids.shape[1]


class Handle:
    """A Serve handle of an actor in this process."""

    def __init__(self, actor: Reranker, delay_s: float = 0.0) -> None:
        self._actor = actor
        self._delay_s = delay_s
        self.num_calls = 0
        self.score = self

    def remote(self, pairs: Sequence[Pair]) -> Response:
        self.num_calls += 1
        self.last = Response(self._scored(pairs))
        return self.last

    async def _scored(self, pairs: Sequence[Pair]) -> list[PairScore] | OverloadError:
        await asyncio.sleep(self._delay_s)
        try:
            return await self._actor.score(pairs)
        except RequestError as error:
            raise RayTaskError("score", "traceback", error).as_instanceof_cause() from None


def rerankers(folder: Path, delay_s: float = 0.0, **options: Any) -> Rerankers:
    config = config_of(folder, **options)
    return Rerankers((config,), {config.name: Handle(Reranker(config), delay_s)})  # type: ignore[dict-item]


def asked(documents: Sequence[str] = DOCUMENTS, **changes: Any) -> RerankRequest:
    pairs = tuple(pairs_of(documents))
    return RerankRequest(**{"request_id": "r.1", "model": "judge", "pairs": pairs} | changes)


async def test_scores_are_those_of_transformers_whoever_shares_the_batch(folder: Path) -> None:
    opened = rerankers(folder)
    first, second = await asyncio.gather(opened.score(asked()), opened.score(asked(DOCUMENTS[::-1])))
    wanted = [expected(folder, document) for document in DOCUMENTS]
    assert first.scores == pytest.approx([score for score, _ in wanted], abs=1e-5)
    assert second.scores == pytest.approx([score for score, _ in wanted[::-1]], abs=1e-5)
    assert first.num_prompt_tokens == second.num_prompt_tokens == sum(count for _, count in wanted)
    assert len({round(score, 4) for score in first.scores}) == len(DOCUMENTS)


def test_a_gateway_that_asks_for_scores_goes_without_torch() -> None:
    """The first request for scores imported it on the event loop: every stream of the gateway stood still meanwhile."""
    subprocess.run([sys.executable, "-c", _GATEWAY_S_SIDE], check=True, timeout=120)


_GATEWAY_S_SIDE = """
import asyncio, pickle, sys
from types import SimpleNamespace
from deployments.classifiers.reranking import Rerankers
from deployments.config import RerankerConfig
from deployments.pooled import Pair, PairScore, RerankRequest

async def remote(pairs):
    return pickle.loads(pickle.dumps([PairScore(0.5, len(pair.document)) for pair in pairs]))

handle = SimpleNamespace(score=SimpleNamespace(remote=remote))
rerankers = Rerankers([RerankerConfig(name="judge", model_path="", max_tokens=9)], {"judge": handle})
request = RerankRequest(request_id="r", model="judge", pairs=(Pair("q", "a", "documents[0]"),))
assert asyncio.run(rerankers.score(request)).scores == (0.5,)
assert "torch" not in sys.modules
"""


async def test_a_long_pair_is_cut_where_that_is_asked_for(folder: Path) -> None:
    long = "Return the current working directory. " * 60
    opened = rerankers(folder)
    for truncates_to, max_length in ((-1, CONTEXT), (20, 20)):
        found = await opened.score(asked([long], truncates_to=truncates_to))
        score, count = expected(folder, long, truncation=True, max_length=max_length)
        assert found.scores == pytest.approx([score], abs=1e-5)
        assert found.num_prompt_tokens == count == max_length


@pytest.mark.parametrize(
    ("document", "changes", "field"),
    [
        ("word " * CONTEXT, {}, "documents[1]"),
        ("y" * 5001, {}, "documents[1]"),
        ("\ud800", {}, "documents[1]"),
        ("fine", {"truncates_to": CONTEXT + 1}, "truncate_prompt_tokens"),
    ],
)
async def test_a_pair_that_cannot_be_scored_names_its_field_and_harms_no_other(
    folder: Path, document: str, changes: dict[str, object], field: str
) -> None:
    opened = rerankers(folder, max_chars=5000)
    bad, good = await asyncio.gather(
        opened.score(asked(["fine", document], **changes)), opened.score(asked(["fine"])), return_exceptions=True
    )
    assert type(bad) is RequestError
    assert bad.field == field
    assert not isinstance(good, BaseException)
    assert good.scores == pytest.approx([expected(folder, "fine")[0]], abs=1e-5)


async def test_who_is_not_there_or_too_late_is_told(folder: Path) -> None:
    opened = rerankers(folder, delay_s=5.0, timeout_s=0.05)
    with pytest.raises(UnavailableError):
        await opened.score(asked())
    with pytest.raises(TimeoutError):
        await opened.score(asked(timeout_s=0.01))
    with pytest.raises(asyncio.CancelledError):  # nobody waits for it any more
        await opened._handles["judge"].last.task  # type: ignore[attr-defined]
    for names, words in ((opened, "'nobody' does not exist"), (Rerankers((), {}), "no reranker")):
        with pytest.raises(RequestError, match=words) as refused:
            names.check("nobody")
        assert refused.value.code == "model_not_found"
    assert [(card.name, card.task, card.max_model_len) for card in opened.cards(5)] == [("judge", "score", CONTEXT)]
    assert list(opened.parts) == ["reranker judge"]


async def test_a_bounded_number_of_requests_is_scored_at_a_time_and_each_has_the_time_limit_for_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It covered the wait as well: under load the cross-encoder was at requests that were about to be withdrawn."""
    opened, passed_s, loop = rerankers(folder, delay_s=30.0, timeout_s=60.0), 0.0, asyncio.get_running_loop()
    handle, time = opened._handles["judge"], loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
    calls = [asyncio.create_task(opened.score(asked(["x"], tenant="blue"))) for _ in range(NUM_PLACES + 1)]
    await until_called(handle, NUM_PLACES)
    passed_s += 50.0
    await asyncio.gather(*calls[:-1])
    await until_called(handle, NUM_PLACES + 1)
    passed_s += 50.0
    assert (await calls[-1]).num_prompt_tokens > 0


async def test_a_request_with_many_pairs_has_more_time_than_one_with_few(folder: Path) -> None:
    opened = rerankers(folder, delay_s=5.0, timeout_s=0.01)
    with pytest.raises(UnavailableError, match=r"within 0\.02 seconds"):
        await opened.score(asked(["x"] * 4))


async def until_called(handle: Any, num_calls: int) -> None:
    async with asyncio.timeout(300):
        while handle.num_calls < num_calls:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    assert handle.num_calls == num_calls


async def test_what_cannot_be_scored_in_time_is_refused_before_any_work(folder: Path) -> None:
    opened = rerankers(folder)
    opened._handles["judge"]._actor._pace.note(1, 3600.0)  # type: ignore[attr-defined]
    found = await asyncio.gather(opened.score(asked()), opened.score(asked()), return_exceptions=True)
    refused = [error for error in found if isinstance(error, OverloadError)]
    assert len(refused) == 1
    assert refused[0].retry_after_s > 3600


def test_a_checkpoint_with_more_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one label"):
        CrossEncoder(config_of(write_guard(tmp_path)))


@pytest.mark.parametrize(
    ("config", "tokenizer", "window"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, {"model_max_length": 10**30}, 512),
        ({"model_type": "bert", "max_position_embeddings": 512}, {"model_max_length": 128}, 128),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}, None, 512),
        ({"model_type": "mpnet", "max_position_embeddings": 514}, None, 512),
        ({"model_type": "xlnet", "max_position_embeddings": -1}, None, 512),
        ({"model_type": "other"}, {}, 512),
    ],
)
def test_the_window_is_read_off_the_files(
    tmp_path: Path, config: dict[str, object], tokenizer: dict[str, object] | None, window: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert read_window(str(tmp_path)) == window


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("config.json", {"max_position_embeddings": "512"}),
        ("config.json", {"pad_token_id": [1]}),
        ("config.json", {"num_labels": "one"}),
        ("tokenizer_config.json", {"model_max_length": "512"}),
        ("tokenizer_config.json", {"model_max_length": -1}),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, name: str, told: dict[str, object]) -> None:
    """The check of a configuration ended in a traceback."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=f"{name}: {next(iter(told))} must be"):
        (read_labels if "num_labels" in told else read_window)(str(tmp_path))


@pytest.mark.parametrize("content", [None, "", "[]", "[" * 100_000], ids=["none", "empty", "no object", "deep"])
def test_a_folder_without_a_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        read_window(str(tmp_path))
