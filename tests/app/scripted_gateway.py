from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from adapters.catalogue import AdapterEntry, AdapterVersion
from adapters.identity import AdapterDigest, AdapterRef
from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.values import (
    Admission,
    Charge,
    KeyInfo,
    Quota,
    UsageQuestion,
    UsageRecord,
    UsageTotal,
)
from deployments.answer_events import (
    EndReason,
    Finished,
    GenerationEvent,
    Moderated,
    Started,
    TextDelta,
    TokenScore,
    Verdict,
)
from deployments.generation import ChatPrompt, GenerationRequest, HealthReport, ModelCard, TextPrompt
from deployments.pooled import EmbeddingRequest, Embeddings, Reranking, RerankRequest, Tokenized
from deployments.registry.adapter_changes import AdapterStatus, Registration
from deployments.timeline import Timeline
from engine.errors import RequestError
from engine.request import Pooling

NAMES = ("base", "shout")


ENTRY = AdapterEntry(
    name="sql",
    base="base",
    versions=(
        AdapterVersion(number=1, ref=AdapterRef(name="sql", path="/", digest=AdapterDigest("d")), created_s=1700000000),
    ),
    split=((1, 100),),
)


class ScriptedAdapters:
    """The names of adapters: one, whatever is asked."""

    def __init__(self) -> None:
        self.loaded: list[Registration] = []
        self.routed: list[tuple[str, dict[int, int]]] = []
        self.misfits: dict[int, str] = {}
        self.shadowed_by: str | None = None
        self.left: AdapterEntry | None = None
        self.error: Exception | None = None

    async def load(self, wanted: Registration) -> AdapterEntry:
        if self.error is not None:
            raise self.error
        self.loaded.append(wanted)
        return ENTRY

    async def load_if(self, wanted: Registration, trial: Callable[[str], Awaitable[None]]) -> AdapterEntry:
        await trial("base")
        return await self.load(wanted)

    async def unload(self, name: str, number: int | None = None) -> list[int]:
        return [5]

    def entry(self, name: str) -> AdapterEntry | None:
        return self.left

    async def route(self, name: str, split: Mapping[int, int]) -> AdapterEntry:
        self.routed.append((name, dict(split)))
        return ENTRY

    async def status(self) -> list[AdapterStatus]:
        places = {1: {"r1": "device"}}
        shadow = self.shadowed_by
        return [AdapterStatus(entry=ENTRY, places_by_replica=places, misfits=self.misfits, shadowed_by=shadow)]


class ScriptedMeter:
    """Counts nothing; remembers what it was told, and refuses by a script."""

    def __init__(self) -> None:
        self.tenant_by_key: dict[str, str] = {}
        self.admission = Admission(quotas={"requests_per_minute": Quota(10, 7, 30.0)})
        self.admitted: list[tuple[str, int]] = []
        self.charges: list[Charge] = []
        self.asked: list[UsageQuestion] = []

    async def begin(self, joint: JointAdmission) -> Admission:
        if joint.asked is None:
            self.admitted.append((joint.tenant, joint.input_tokens))
            joint.asked = asyncio.ensure_future(asyncio.sleep(0, self.admission))
        return await joint.asked

    def release(self, charge: Charge) -> None:
        self.charges.append(charge)

    async def totals(self, question: UsageQuestion) -> list[UsageTotal]:
        self.asked.append(question)
        return [
            UsageTotal(
                tenant="blue", model="base", adapter="", num_requests=2, num_failed=1, input_tokens=10,
                cached_tokens=4, output_tokens=6, device_s=0.5, mean_ttft_s=0.1, mean_tpot_s=None,
            )
        ]  # fmt: skip

    async def records(self, question: UsageQuestion, *, limit: int) -> list[UsageRecord]:
        return [
            UsageRecord(
                record_id="r1", tenant="blue", model="base", adapter="", started_unix_s=1.5, input_tokens=5,
                cached_tokens=4, output_tokens=3, outcome="stop",
            )
        ]  # fmt: skip

    async def keys(self) -> list[KeyInfo]:
        return [KeyInfo(digest=d, tenant=t, created_unix_s=1700000000.5) for d, t in self.tenant_by_key.items()]

    async def add_key(self, digest: str, tenant: str) -> None:
        self.tenant_by_key[digest] = tenant

    async def remove_key(self, digest: str) -> bool:
        return self.tenant_by_key.pop(digest, None) is not None


class ScriptedGateway:
    """Answers by a script, and remembers what it was asked and how many answers are open."""

    def __init__(self) -> None:
        self.adapters = ScriptedAdapters()
        self.requests: list[GenerationRequest] = []
        self.embedded: list[EmbeddingRequest] = []
        self.reranked: list[RerankRequest] = []
        self.tokenized: list[ChatPrompt | TextPrompt] = []
        self.moderated_for: list[str] = []
        self.num_open = 0
        self.is_closed = False
        self.pieces = ["Hel", "lo", " 🙂"]
        self.deltas: list[TextDelta] = []
        self.end = EndReason.STOP
        self.stop: str | None = None
        self.stop_id: int | None = None
        self.refusal: str | None = None
        self.moderation: Moderated | None = None
        self.error_before: Exception | None = None
        self.error_after: Exception | None = None
        self.health_report = HealthReport(state_by_model={"base": "ready"})
        self.never_ends = False
        self.num_reasoning_tokens = 0
        self.shifts_logprob_by = 0.0
        self.meter: ScriptedMeter | None = None
        self.batches: Any = None
        self.known_timelines: dict[str, list[Timeline]] = {}

    def models(self) -> Sequence[ModelCard]:
        return (
            ModelCard(name="base", parent=None, created_s=1700000000, max_model_len=512),
            ModelCard(name="shout", parent="base", created_s=1700000001, max_model_len=512),
        )

    def model(self, name: str) -> ModelCard | None:
        return next((card for card in self.models() if card.name == name), None)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.num_open += 1
        try:
            if request.model not in NAMES:
                raise RequestError(
                    f"The model '{request.model}' does not exist.", field="model", code="model_not_found"
                )
            if self.error_before is not None:
                raise self.error_before
            yield self._started(request)
            for delta in self.deltas:
                yield delta
            for piece in self.pieces:
                await asyncio.sleep(0)
                scores = () if request.params.num_logprobs is None else (self._score(piece, request),)
                token_ids = (len(piece),) if request.returns_token_ids else ()
                yield TextDelta(
                    text=piece, scores=scores, text_scores=scores, shown_scores=scores, token_ids=token_ids,
                    shown_ids=token_ids,
                )  # fmt: skip
            if self.error_after is not None:
                raise self.error_after
            if self.never_ends:
                await asyncio.Event().wait()
            yield Finished(
                reason=self.end,
                stop=self.stop,
                stop_id=self.stop_id,
                num_prompt_tokens=7,
                num_completion_tokens=len(self.pieces),
                num_cached_tokens=4,
                num_reasoning_tokens=self.num_reasoning_tokens,
                refusal=self.refusal,
                moderation=self.moderation,
            )
        finally:
            self.num_open -= 1

    def _started(self, request: GenerationRequest) -> Started:
        prompt_scores: tuple[TokenScore, ...] = ()
        if request.params.num_prompt_logprobs is not None:
            prompt_scores = TokenScore(1, "Say", b"Say", None), self._score(": ", request)
        return Started(
            num_prompt_tokens=7,
            num_cached_tokens=4,
            prompt_text="Say: " if request.echoes else None,
            prompt_scores=prompt_scores,
            prompt_ids=(1, 2) if request.returns_token_ids else (),
        )

    def _score(self, text: str, request: GenerationRequest) -> TokenScore:
        # Later answers to a prompt are likelier.
        logprob = self.shifts_logprob_by - 10.0 + int(request.request_id.rpartition("-")[2])
        count = max(request.params.num_logprobs or 0, request.params.num_prompt_logprobs or 0)
        top = tuple(TokenScore(5 + i, f"x{i}", b"x", -0.5 - i, rank=1 + i) for i in range(count))
        return TokenScore(len(text), text, text.encode(), logprob, top, rank=9)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        self.embedded.append(request)
        if request.model not in (*NAMES, "single"):
            raise RequestError(f"The model '{request.model}' does not exist.", field="model", code="model_not_found")
        if request.pooling is Pooling.CLASS and request.model == "base":
            raise RequestError.about("model", "has no classifier.")
        vectors = tuple(array("f", (0.5, float(index))).tobytes() for index in range(len(request.inputs)))
        if request.model == "single":
            vectors = tuple(vector[:4] for vector in vectors)
        return Embeddings(vectors=vectors, num_prompt_tokens=11)

    async def rerank(self, request: RerankRequest) -> Reranking:
        self.reranked.append(request)
        if request.model != "judge":
            raise RequestError("This server has no reranker.", field="model", code="model_not_found")
        return Reranking(scores=tuple(len(pair[1]) / 8 for pair in request.pairs), num_prompt_tokens=9)

    async def tokenize(
        self, model: str, prompt: ChatPrompt | TextPrompt, *, with_texts: bool, tenant: str = ""
    ) -> Tokenized:
        self.tokenized.append(prompt)
        if model not in NAMES:
            raise RequestError(f"The model '{model}' does not exist.", field="model", code="model_not_found")
        text = prompt.text if isinstance(prompt, TextPrompt) else "".join(turn.content for turn in prompt.messages)
        return Tokenized(token_ids=tuple(map(ord, text)), max_model_len=512, texts=tuple(text) if with_texts else None)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    async def moderate(self, texts: Sequence[str], *, tenant: str = "") -> Sequence[Verdict]:
        self.moderated_for.append(tenant)
        return [
            Verdict(score_by_hazard={"hate": 0.9, "elections": 0.1}, flagged=("hate",))
            if "bad" in text
            else Verdict(score_by_hazard={"hate": 0.01, "elections": 0.02}, flagged=())
            for text in texts
        ]

    async def timelines(self, client_id: str) -> list[Timeline]:
        return self.known_timelines.get(client_id, [])

    async def health(self) -> HealthReport:
        return self.health_report

    async def close(self) -> None:
        self.is_closed = True

    async def metrics(self) -> bytes:
        return b"# HELP antiphon_requests_total Requests.\n"
