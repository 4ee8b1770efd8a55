"""Safety screening of one answer: what the server's policy and the request ask for, and the verdicts.

A request can add to what the server blocks, never reduce it. A text that may be blocked is judged before it is shown,
and the same verdict is reported. A text whose verdict is only reported is judged as a whole once it is complete.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import groupby

from deployments.answer_events import Moderated, Verdict, worst
from deployments.config import SafetyConfig
from deployments.gateway.verdicts import AnswerJudge
from deployments.generation import ChatPrompt, Moderation
from deployments.prompt_texts import texts_in
from deployments.stream.harmony import without_signs
from deployments.stream.screening import OutputScreen
from deployments.timeline import Recorder
from deployments.tokenizer.chat_template import arguments_read
from deployments.waits import patiently
from engine.errors import EngineError, OverloadError, RequestError

OUTPUT_PATIENCE_S = 60.0
"""How long a running stream waits for a classifier that is being replaced, or overloaded."""


class AnswerSafety:
    """Screens the input and output of one answer.

    Args:
        policy: the server's policy; None if there is no classifier, which disables all screening.
        asked: what the request asks for; None to report no verdicts.

    Attributes:
        blocks_input: a flagged input is refused.
        is_first: engine work must wait for the verdict on the input.
    """

    def __init__(
        self, policy: SafetyConfig | None, asked: Moderation | None, *, judge: AnswerJudge, recorder: Recorder
    ) -> None:
        self._policy = policy
        self._asked = None if policy is None else asked
        self._judge = judge
        self._recorder = recorder
        self._output: list[Verdict] = []
        self.blocks_input = policy is not None and (policy.screen_input or (asked is not None and asked.blocks_input))
        self.is_first = policy is not None and self.blocks_input and policy.mode == "before"

    async def judge_input(self, texts: Callable[[], Sequence[str]]) -> Verdict | None:
        """Return the merged verdict on the input's texts; None if no verdict is needed or there is no text.

        Args:
            texts: builds the texts; called only if they are needed.

        Raises:
            RequestError, OverloadError: the classifier gave no verdict, and the input must not pass without one.
        """
        if not self.blocks_input and (self._asked is None or not self._asked.tells_input):
            return None
        with self._recorder.stage("safety"):
            if self.blocks_input and self._policy is not None:
                return worst(await patiently(partial(self._judge, texts()), self._policy.timeout_s))
            return worst(await self._found(texts()))

    def screen(self) -> OutputScreen | None:
        """Return the screen that holds the answer back until it is judged; None if text is shown as it comes."""
        policy = self._policy
        if policy is None or not (policy.screen_output or (self._asked is not None and self._asked.blocks_output)):
            return None
        return OutputScreen(window_chars=policy.window_chars, overlap_chars=policy.overlap_chars)

    async def judge_output(self, windows: Sequence[str]) -> Sequence[Verdict]:
        """Return the verdicts on windows of the answer; raises the same errors as `judge_input`."""
        with self._recorder.stage("safety of the answer"):
            # Be patient: failing the stream would discard what has been computed.
            texts = list(map(without_signs, windows))
            verdicts = await patiently(partial(self._judge, texts, is_running=True), OUTPUT_PATIENCE_S, OverloadError)
        self._output += verdicts
        return verdicts

    async def told(self, verdict: Awaitable[Verdict | None], text: str) -> Moderated | None:
        """Return the verdicts to report for a finished answer; None if the request asks for none.

        Args:
            verdict: the verdict on the input.
            text: the answer's text as it was shown.
        """
        if self._asked is None:
            return None
        if not self._output and text:
            with self._recorder.stage("safety of the answer"):
                self._output += await self._found([without_signs(text)], is_running=True)
        return Moderated(input=await verdict, output=worst(self._output))

    async def _found(self, texts: Sequence[str], *, is_running: bool = False) -> Sequence[Verdict]:
        """Judge texts that cannot be blocked; a failure becomes a verdict with an error, and the answer goes on."""
        judge = partial(self._judge, texts, is_running=is_running)
        try:
            return await (patiently(judge, OUTPUT_PATIENCE_S, OverloadError) if is_running else judge())
        except RequestError as error:
            # The classifier's names of texts are not those of a field.
            reason = error.message.replace(f"'{error.field}'", "a text", 1)
        except (OverloadError, EngineError) as error:
            reason = str(error)
        return (Verdict(score_by_hazard={}, flagged=(), error=reason),)


def texts_of(prompt: ChatPrompt) -> list[str]:
    """Return everything that a model reads in a chat, as texts to be judged.

    Each turn is a text of its own, so that a long harmless conversation cannot dilute a harmful turn. Consecutive turns
    of one role are joined into a further text: a sentence may be spread over them.
    """
    texts = [message.content for message in prompt.messages]
    for _, turns in groupby(prompt.messages, key=lambda message: message.role):
        contents = [message.content for message in turns]
        if len(contents) > 1:
            texts.append("\n".join(contents))
    texts += [message.reasoning or "" for message in prompt.messages]
    # JSON is judged without its escapes, as a template shows it.
    calls = [call for message in prompt.messages for call in message.tool_calls]
    for call in calls:
        texts.append("\n".join(texts_in(arguments_read(call.arguments))))
    for tool in prompt.tools:
        texts += [tool.description, "\n".join(texts_in(tool.parameters))]
    # A template may write any of these into the prompt.
    texts.append("\n".join(texts_in(list(prompt.template_options.values()))))
    texts.append("\n".join(message.name for message in prompt.messages if message.name is not None))
    texts.append("\n".join(dict.fromkeys((*(call.name for call in calls), *(tool.name for tool in prompt.tools)))))
    ids = (*(call.call_id for call in calls), *(message.tool_call_id or "" for message in prompt.messages))
    texts.append("\n".join(dict.fromkeys(filter(None, ids))))
    return [text for text in texts if text]
