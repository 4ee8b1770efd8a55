"""Measure the gain of tiers below the KV cache: conversations that together exceed it, asked one after the other.

    python -m loadtest.cache_tiers models/stdlib-chat --conversations 16 --tokens 700

Each conversation has its own history, and each turn sends all of it. The cases: a KV cache that holds all of them; one
of half that size without a tier below; the same with a tier on disk; on a GPU, the same with a tier in host memory; and
a first turn in a restarted engine with the disk tier. In the half-size cache, LRU order has always evicted the history
of the conversation that asks next. Times to first token are medians over conversations.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from tempfile import TemporaryDirectory

from engine.build import build_engine
from engine.config import EngineConfig
from engine.loading.spec import read_model_spec
from engine.resolve import BYTES_BY_DTYPE
from loadtest.arguments import at_least_1, checkpoint_folder
from loadtest.engine_alone import EngineAlone, refusals_said
from loadtest.tables import markdown_table, number
from loadtest.workloads import TokenRange, token_prompt

COLUMNS = ("case", "TTFT, ms", "of computing it anew", "tokens fetched for each")
ANSWER_TOKENS, TURN_TOKENS = 8, 16
WARM_TURNS = 3
"""Measured turns; an unmeasured first turn is cold in every case."""


class Talk:
    """Conversations with one engine."""

    def __init__(self, config: EngineConfig, num_conversations: int, num_tokens: int) -> None:
        self._alone = EngineAlone(build_engine(config))
        seeds = range(num_conversations)
        self._prompts = [token_prompt(num_tokens, seed=seed, ids=TokenRange()) for seed in seeds]

    def turn(self) -> tuple[float, float]:
        """Ask one turn of every conversation; return the median TTFT in ms and the mean tokens fetched for each."""
        before, ttft_ms = self._alone.engine.snapshot().fetched_tokens, []
        for prompt in self._prompts:
            ttft_ms.append(self._alone.generate([prompt], [ANSWER_TOKENS]).prefill_s * 1000)
            prompt.extend(token_prompt(TURN_TOKENS, seed=len(prompt), ids=TokenRange()))
        return median(ttft_ms), (self._alone.engine.snapshot().fetched_tokens - before) / len(self._prompts)

    def turns(self, count: int) -> tuple[float, float]:
        """Return the medians over `count` turns."""
        found = [self.turn() for _ in range(count)]
        return median(ttft for ttft, _ in found), median(tokens for _, tokens in found)

    def close(self) -> None:
        """Free the engine."""
        self._alone.close()


def measure(config: EngineConfig, num_conversations: int, num_tokens: int) -> list[list[str]]:
    """Return the table's rows."""
    most_tokens = num_tokens + TURN_TOKENS * (WARM_TURNS + 1) + ANSWER_TOKENS
    token_bytes = read_model_spec(config.model_path).kv_bytes_per_token(BYTES_BY_DTYPE[config.dtype or "float32"])
    all_bytes = (num_conversations + 1) * (most_tokens + config.block_tokens) * token_bytes
    config = replace(config, max_model_len=most_tokens, kv_cache_bytes=all_bytes // 2)
    found = {}
    with TemporaryDirectory(prefix="antiphon-tiers-") as folder:
        tiers = {"on disk": replace(config, kv_disk_bytes=2 * all_bytes, kv_disk_folder=folder)}
        if config.device == "cuda":
            tiers["in the host's memory"] = replace(config, kv_host_bytes=2 * all_bytes)
        cases = {
            "computed anew": config,
            "all in the cache": replace(config, kv_cache_bytes=all_bytes),
            **{f"half in the cache, the rest {place}": tier for place, tier in tiers.items()},
        }
        for case, options in cases.items():
            talk = Talk(options, num_conversations, num_tokens)
            talk.turn()
            found[case] = talk.turns(WARM_TURNS)
            talk.close()
        talk = Talk(tiers["on disk"], num_conversations, num_tokens)
        found["after a restart, first turn"] = talk.turn()
        talk.close()
    anew_ms = found["computed anew"][0]
    return [
        [case, number(ttft_ms), number(ttft_ms / anew_ms), number(tokens)] for case, (ttft_ms, tokens) in found.items()
    ]


@refusals_said("cache_tiers")
def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=checkpoint_folder, help="folder of a model")
    parser.add_argument("--conversations", type=at_least_1, default=16)
    parser.add_argument("--tokens", type=at_least_1, default=700, help="of each history")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(BYTES_BY_DTYPE), default="bfloat16")
    options = parser.parse_args()
    config = EngineConfig(model_path=options.checkpoint, device=options.device, dtype=options.dtype)
    print(markdown_table(COLUMNS, measure(config, options.conversations, options.tokens)))


if __name__ == "__main__":
    main()
