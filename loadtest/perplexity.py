"""Measure the quality cost of weight formats: the perplexity of one text under each dtype and quantization.

    python -m loadtest.perplexity models/stdlib-chat          # answers about the standard library, each to its question
    python -m loadtest.perplexity /models/mine --text some.txt

A text is split into windows, each evaluated without preceding context; a window's first token is not predicted. Uses
the engine's own forward pass, including KV cache and kernels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engine.buffers import InputBuffers
from engine.config import EngineConfig
from engine.cpu.build import build_model, start_threads
from engine.decoder.decoder import StepOutput
from engine.decoder.reading import read_spec
from engine.hardware import probe
from engine.kv_cache import KvCache
from engine.request import Request, RequestId, SamplingParams
from engine.resolve import resolve
from engine.runner import StepModel
from engine.step import StepPlan, StepRow
from loadtest.arguments import at_least, checkpoint_folder
from loadtest.engine_alone import refusals_said
from loadtest.tables import markdown_table
from loadtest.workloads import QUESTIONS, read_entries

COLUMNS = ("weights", "perplexity", "of the first", "tokens")
VARIANTS: dict[str, tuple[str, str | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8, inputs rounded": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
"""Label in the table -> dtype and quantization."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A window of tokens, and the index of its first predicted token."""

    token_ids: tuple[int, ...]
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A model that evaluates windows of a text.

    Attributes:
        length: maximum tokens of a window.
    """

    buffers: InputBuffers
    model: StepModel
    cache: KvCache
    length: int

    @classmethod
    def load(cls, path: str, length: int, dtype: str, quantization: str | None = None) -> Reader:
        """Load a checkpoint.

        Raises:
            CheckpointError, ConfigError: as `engine.build.build_engine`.
        """
        config = EngineConfig(
            model_path=path,
            dtype=dtype,
            quantization=quantization,
            max_model_len=length,
            max_num_seqs=length,
            max_batched_tokens=length,
        )
        spec = read_spec(path)
        resolved = resolve(config, spec, probe(config))
        buffers, model, cache = build_model(spec, resolved, start_threads(spec, resolved))
        return cls(buffers=buffers, model=model, cache=cache, length=length)

    def negative_log_likelihoods(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return -ln p of every token but the first, float32 [len(token_ids) - 1]; at most `length` tokens."""
        params = SamplingParams(max_tokens=1)
        request = Request(request_id=RequestId("reader"), prompt_ids=tuple(token_ids), params=params)
        count = -(-len(token_ids) // self.cache.block_tokens)
        tables = [range(table * count, (table + 1) * count) for table in range(len(self.cache.layout.windows))]
        # One row per position, all over the same blocks, so that every position has logits.
        rows = tuple(
            StepRow(
                row=position,
                is_admission=True,
                request=request,
                output_ids=(),
                start=position,
                end=position + 1,
                block_tables=tables,
                samples=True,
            )
            for position in range(len(token_ids))
        )
        with torch.inference_mode():
            output = self.model.forward(self.buffers.fill(StepPlan(step_id=1, rows=rows)), self.cache)
            assert isinstance(output, StepOutput), "nobody asked for a pause"
            logits = output.logits
            predicted = torch.log_softmax(logits[:-1], dim=-1)
            return -predicted.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def perplexity(reader: Reader, pieces: Iterable[Piece]) -> tuple[float, int]:
    """Return the perplexity of the predicted tokens, and their number.

    Raises:
        ValueError: no token is predicted.
    """
    total, count = 0.0, 0
    for piece in pieces:
        found = reader.negative_log_likelihoods(piece.token_ids)[piece.first - 1 :]
        total, count = total + float(found.double().sum()), count + len(found)
    if not count:
        raise ValueError("there is no token to predict")
    return math.exp(total / count), count


def windows(token_ids: Sequence[int], length: int) -> Iterator[Piece]:
    """Split a text into pieces of at most `length` tokens and at least two."""
    for start in range(0, len(token_ids) - 1, length):
        yield Piece(token_ids=tuple(token_ids[start : start + length]))


def answers(tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[Piece]:
    """Yield a question and answer per bundled entry, in the model's chat template; only the answer is predicted."""
    for index, entry in enumerate(read_entries()):
        question = QUESTIONS[index % len(QUESTIONS)].format(name=entry.name)
        turns = [{"role": "user", "content": question}]
        asked = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        known = tokenizer.encode(asked, add_special_tokens=False)
        answer = tokenizer.encode(f"{entry.name}: {entry.summary}", add_special_tokens=False)
        yield Piece(token_ids=(*known, *answer)[:length], first=len(known))


def text_file(text: str) -> str:
    """Return the text of a file.

    Raises:
        ArgumentTypeError: there is none.
    """
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise argparse.ArgumentTypeError(f"no text can be read from {text!r} ({failure})") from None


@refusals_said("perplexity")
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.perplexity", description=__doc__)
    parser.add_argument("model", type=checkpoint_folder, help="checkpoint folder with its tokenizer")
    parser.add_argument(
        "--text", type=text_file, help="a text file; without one, conversations about the standard library"
    )
    parser.add_argument("--max-tokens", type=at_least(2), default=20_000, help="of the text file")
    parser.add_argument("--window", type=at_least(2), default=256, help="tokens read together")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.text is not None:
        token_ids = tokenizer.encode(options.text, add_special_tokens=False)
        pieces = [*windows(token_ids[: options.max_tokens], options.window)]
    else:
        if tokenizer.chat_template is None:
            parser.error(f"{options.model} has no chat template to put questions in; give a --text")
        pieces = [*answers(tokenizer, options.window)]
    if not any(len(piece.token_ids) > piece.first for piece in pieces):
        parser.error("there is no token to predict: the text is too short, or the window for its questions")
    rows, first = [], 0.0
    for name, variant in VARIANTS.items():
        found, count = perplexity(Reader.load(options.model, options.window, *variant), pieces)
        first = first or found
        rows.append([name, f"{found:.4f}", f"{found / first:.4f}", str(count)])
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    main()
