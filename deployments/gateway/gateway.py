"""The ingress actor: which names are served and by whom, and the methods that the routes call.

The routes are injected (`create_app`), so this package does not depend on them; they use the gateway's methods.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from adapters.catalogue import Catalogue, CatalogueChange
from adapters.identity import AdapterDigest, AdapterRef
from deployments.accounts.meter import Meter
from deployments.accounts.spool import Spool
from deployments.actor_process import begin_actor, settle
from deployments.answer_events import EndReason, GenerationEvent, Started, Verdict
from deployments.batches.client import BatchClient
from deployments.batches.values import InsideAnswer, InsideCall
from deployments.channel.token_channel import ChannelListener
from deployments.classifiers.reranking import Rerankers
from deployments.config import GatewayConfig, ModelConfig, TracingConfig
from deployments.exposition import FamilyText
from deployments.gateway.answer_log import AnswerLog
from deployments.gateway.answering import Answering
from deployments.gateway.beam_source import BeamSource, SharedSearch
from deployments.gateway.dialect import dialect_of
from deployments.gateway.embedding import Embedding
from deployments.gateway.front_gate import FrontGate
from deployments.gateway.inside import answer_inside, beating
from deployments.gateway.overview import Overview
from deployments.gateway.prompt_encoder import PromptEncoder
from deployments.gateway.replica_calls import ChannelSource, HandleSource
from deployments.gateway.served_model import ServedModel
from deployments.gateway.served_names import ServedNames
from deployments.gateway.token_checks import check_vocabulary
from deployments.gateway.verdicts import Verdicts
from deployments.generation import ChatPrompt, GenerationRequest, HealthReport, TextPrompt
from deployments.logs import log_answer, log_prompt
from deployments.metrics import GatewayMetrics, gateway_families
from deployments.pooled import EmbeddingRequest, Embeddings, Reranking, RerankRequest, Tokenized
from deployments.registry.adapter_directory import AdapterDirectory
from deployments.routing.board import board_of
from deployments.routing.watch import ReplicaWatch
from deployments.timeline import Timeline
from deployments.tokenizer.tokenizer import build_codecs
from engine.errors import OverloadError

if TYPE_CHECKING:
    from deployments.tracing import TraceWriter


class Gateway:
    """One replica of the ingress; many may run side by side, and none holds state that others need.

    Args:
        create_app: makes the ASGI application that serves this gateway's routes.
        replicas: handle of each base model's deployment, by name.
        tokenizer, safety: None to run it in the gateway's own process.
        registry: None if adapters cannot be changed while the server runs.
        accounts: None if usage is not metered.
        batches: None if batches are not supported.
        rerankers: handle of each cross-encoder's deployment, by name.

    Attributes:
        models, model: return the cards of all servable names, or of one (`ServedNames`).
        timelines, metrics: return those of all gateways (`Overview`).
        adapters: the names of adapters, and how to change them.
        meter: meters the usage of tenants; None if usage is not metered.
        batches: files and batches; None if they are not supported.
    """

    def __init__(
        self,
        config: GatewayConfig,
        create_app: Callable[[Gateway], ASGIApp],
        replicas: dict[str, DeploymentHandle],
        tokenizer: DeploymentHandle | None = None,
        safety: DeploymentHandle | None = None,
        registry: DeploymentHandle | None = None,
        accounts: DeploymentHandle | None = None,
        batches: DeploymentHandle | None = None,
        rerankers: Mapping[str, DeploymentHandle] | None = None,
    ) -> None:
        begin_actor()
        self._config = config
        self._create_app = create_app
        self._replicas = replicas
        self._tokenizer_handle = tokenizer
        self._rerankers = Rerankers(config.rerankers, rerankers or {})
        self._name = uuid.uuid4().hex
        self._log = AnswerLog(self._count_answer)
        self.adapters = AdapterDirectory(
            self._name,
            config.models,
            replicas,
            registry,
            cross_encoders=[reranker.name for reranker in config.rerankers],
            in_use=self._log.adapters_in_use,
        )
        self._names = ServedNames(config, self.adapters, self._rerankers)
        self.models, self.model = self._names.cards, self._names.card
        self._metrics = GatewayMetrics(config.slo, (model.name for model in config.models))
        self._verdicts = Verdicts(config.safety, safety)
        self._gates = {model.name: FrontGate(max_wait_s=model.engine.max_queue_s) for model in config.models}
        parts = {"tokenizer": tokenizer, "safety": safety} | self._rerankers.parts
        self._overview = Overview(replicas, parts)
        self.timelines, self.metrics = self._overview.timelines, self._overview.metrics
        self.meter: Meter | None = None
        if config.accounts is not None and accounts is not None:
            spool = Spool(config.accounts.spool_folder, self._name)
            self.meter = Meter(accounts, spool, self._name, self._overview.traces)
        self._traced: TraceWriter | None = None
        self._served: dict[str, ServedModel] = {}
        self._searches = WeakValueDictionary[str, SharedSearch]()
        self._listener: ChannelListener | None = None
        self.batches = None if batches is None else BatchClient(batches)
        self._app: ASGIApp | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start what needs the event loop and return the application. Serve calls it once, before any request."""
        # The classifier first: loading tokenizers hides torch from transformers unless torch is already imported.
        await self._verdicts.start()
        codecs = await asyncio.to_thread(build_codecs, self._config.models)
        encoder = PromptEncoder(self._tokenizer_handle, self._config.local_chars)
        sources = await self._sources()
        for model in self._config.models:
            # Probes each template once, however many patterns share it.
            dialect = cache(partial(dialect_of, model))
            self._served |= {
                name: ServedModel(
                    config=model,
                    codec=codecs[name],
                    dialect=dialect(codecs[name]),
                    encoder=encoder,
                    source=sources[model.name],
                )
                for name in model.template_by_codec()
            }
        await self.adapters.start()
        if self._config.tracing is not None:
            self._traced = self._trace_writer(self._config.tracing)
            self._traced.start()
        if self.meter is not None:
            await self.meter.start()
        await self._overview.until_parts_answer()
        self._app = self._create_app(self)
        settle()
        return self._app

    async def answer_inside(self, call: InsideCall) -> AsyncGenerator[InsideAnswer | None, None]:
        """Answer a line of a batch as if its tenant had sent it; yields None until then, as a sign of life.

        Called by the actor that runs batches.
        """
        assert self._app is not None
        async with aclosing(beating(answer_inside(self._app, call))) as signs:
            async for sign in signs:
                yield sign

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of one answer; closing the iterator frees the request in the engine.

        Raises:
            RequestError: the request can never be served.
            OverloadError: the client should retry later.
            TimeoutError: the deadline has passed.
            EngineError: the server has failed.
        """
        base, adapter = self._names.target(request.model, request.siblings.draw)
        if self._config.log_prompts:
            log_prompt(request)
        model = self._model_of(base, adapter)
        request = model.closed(request)
        flow, gate = (adapter, request.tenant), self._gates[base.name]
        with self._log.answer(request, base.name, adapter) as recorder:
            if request.beams is not None:
                eos_ids = frozenset(model.config.eos_ids)
                source = BeamSource(
                    self._searches,
                    model.source,
                    request.beams,
                    eos_ids,
                    recorder.note_expansion,
                    max_resumes=self._config.max_resumes,
                    on_resume=partial(self._metrics.count_resumption, base.name),
                )
                model = replace(model, source=source)
            answer = Answering(
                request,
                model,
                adapter,
                config=self._config,
                judge=partial(self._verdicts.of_answer, flow),
                metrics=self._metrics,
                recorder=recorder,
            )
            while True:
                try:
                    left_s = recorder.left_s(request.timeout_s)
                    with gate.passage(flow, left_s, request.priority, request.siblings) as passage:
                        async with aclosing(answer.events()) as events:
                            async for event in events:
                                if not isinstance(event, Started):
                                    gate.end(passage)
                                    recorder.note_text()
                                yield event
                        return
                except OverloadError as error:
                    if recorder.timeline.first_token_s is not None or not request.siblings.may_wait(error):
                        raise
                async with asyncio.timeout(recorder.left_s(request.timeout_s)):
                    await request.siblings.until_room()

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector for each input; raises the same errors as `generate`."""
        base, adapter = self._names.target(request.model, random.random())
        with self._log.answer(request, base.name, adapter) as recorder:
            embedding = Embedding(
                request,
                self._model_of(base, adapter),
                adapter,
                config=self._config,
                judge=partial(self._verdicts.of_answer, (adapter, request.tenant)),
                recorder=recorder,
            )
            found = await embedding.run()
            recorder.end(EndReason.STOP.value)
        return found

    async def tokenize(
        self, name: str, prompt: ChatPrompt | TextPrompt, *, with_texts: bool, tenant: str = ""
    ) -> Tokenized:
        """Return the token ids of a prompt to a model.

        Raises:
            RequestError: there is no such model, or the prompt cannot be encoded.
            OverloadError: the tokenizer cannot be reached.
        """
        model = self._model_of(*self._names.target(name))
        token_ids = tuple(await model.encode(prompt, ("tokenize", tenant)))
        # In a thread: a prompt may have millions of tokens, and all streams would stand still meanwhile.
        texts = await asyncio.to_thread(model.codec.pieces.texts, token_ids) if with_texts else None
        return Tokenized(token_ids=token_ids, max_model_len=model.config.max_model_len, texts=texts)

    async def detokenize(self, name: str, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            RequestError: there is no such model, or an id is outside its vocabulary.
        """
        model = self._model_of(*self._names.target(name))
        check_vocabulary(token_ids, model.config.vocab_size, field="tokens")
        return await asyncio.to_thread(model.codec.pieces.decode, token_ids, shows_special=True)

    async def moderate(self, texts: Sequence[str], *, tenant: str = "") -> Sequence[Verdict]:
        """Return the classifier's verdict on each text, in order.

        Raises:
            RequestError: there is no classifier, or it cannot take these texts.
            OverloadError: it cannot be reached in time, or is overloaded.
        """
        return await self._verdicts.of(("moderations", tenant), texts)

    async def rerank(self, request: RerankRequest) -> Reranking:
        """Return how well each document answers its query; raises the same errors as `generate`."""
        self._rerankers.check(request.model)
        with self._log.answer(request, request.model) as recorder:
            with recorder.stage("scores"):
                found = await self._rerankers.score(request)
            recorder.timeline.num_prompt_tokens = found.num_prompt_tokens
            recorder.end(EndReason.STOP.value)
        return found

    async def own_timelines(self, client_id: str) -> list[Timeline]:
        """Return this gateway's timelines of a client request. Called by the gateway that the client asked."""
        return self._log.find(client_id)

    async def health(self) -> HealthReport:
        """Report whether every part that an answer needs has a replica that makes progress."""
        return self._log.told(await self._overview.health())

    async def drain(self, limit_s: float) -> None:
        """Refuse new answers and wait for running ones (`AnswerLog.drain`). Called by whoever stops the server."""
        await self._log.drain(limit_s, None if self._listener is None else self._listener.fail_all)
        if self.meter is not None:
            await self.meter.flush()

    async def metric_families(self) -> dict[str, FamilyText]:
        """Return the metrics of this gateway. Called by the gateway that is scraped."""
        others = gateway_families(self._gates, self.meter, self._verdicts.num_by_outcome)
        text = await asyncio.to_thread(self._metrics.text, serve.get_replica_context().replica_tag, others)
        # Names no longer served are exported once more before they are dropped, so that their last answers count.
        await asyncio.to_thread(self._metrics.forget_all_but, self._names.has)
        return text

    async def close(self) -> None:
        """Flush usage records and traces that have not been sent."""
        if self.meter is not None:
            await self.meter.flush()
        if self._traced is not None:
            await self._traced.close()

    async def adopt(self, found: Catalogue | CatalogueChange) -> str:
        """Apply a change of the adapters' names and return this gateway's name. Called by the registry."""
        await self.adapters.follow(found)
        return self._name

    async def until_unused(self, adapter: AdapterDigest) -> str:
        """Wait until this gateway's running answers that use an adapter have ended, and return its name.

        Called by the registry before it frees the adapter.
        """
        await self._log.until_unused(adapter)
        return self._name

    def _model_of(self, base: ModelConfig, adapter: AdapterRef | None) -> ServedModel:
        """Return a base model with the chat template of an adapter's name."""
        return self._served[base.codec_of(None if adapter is None else adapter.name)]

    def _count_answer(self, timeline: Timeline) -> None:
        self._metrics.count_answer(timeline)
        log_answer(timeline)
        if self._traced is not None:
            self._traced.add(timeline)
        if self.meter is not None:
            self.meter.record(timeline)

    def _trace_writer(self, config: TracingConfig) -> TraceWriter:
        # Imported here so that its packages load only if tracing is on.
        from deployments.tracing import TraceWriter, otlp_exporter

        exporter = otlp_exporter(config.endpoint)
        return TraceWriter(exporter, self._overview.traces, service=config.service, sample_ratio=config.sample_ratio)

    async def _sources(self) -> Mapping[str, ChannelSource | HandleSource]:
        if self._config.channel.transport == "handle":
            return {name: HandleSource(handle) for name, handle in self._replicas.items()}
        watch = ReplicaWatch(self._replicas)
        self._listener = ChannelListener(
            self._config.channel,
            self._name,
            node_host=ray.util.get_node_ip_address(),
            on_report=watch.hear,
            on_end=watch.lose,
        )
        address = await self._listener.start()
        watch.start(address)
        return {
            name: ChannelSource(handle, self._listener, address, board_of(name))
            for name, handle in self._replicas.items()
        }
