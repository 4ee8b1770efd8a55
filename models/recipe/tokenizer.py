"""The byte-level BPE and chat template that `stdlib-chat` and `stdlib-draft` share.

Trained on the facts, on the wordings of questions and on the same text in capitals and as JSON, so that adapters that
write so need few more tokens than plain text. All 256 bytes are in the vocabulary, so any text can be encoded.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.recipe import phrasings, unknowns
from models.recipe.corpus import Fact

BOS, SYSTEM, USER, ASSISTANT, END, PAD = "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
VOCABULARY_SIZE = 4096
CONTEXT_TOKENS = 2048

CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ('system', 'user', 'assistant') %}
        {{- raise_exception('Roles are system, user and assistant; got ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""


def _texts(facts: Sequence[Fact], rng: random.Random) -> Iterator[str]:
    for fact in facts:
        answer = f"{fact.name}: {fact.summary}"
        yield from (answer, answer, f"{fact.name} {fact.usage}", answer.upper())
        yield json.dumps({"name": fact.name, "summary": fact.summary})
    for _ in range(4000):
        yield phrasings.question(rng.choice(facts).name, is_callable=False, rng=rng)
        yield unknowns.topic(rng)
        yield unknowns.invented_name(facts, rng)
    yield from phrasings.SYSTEM_MESSAGES


def train(facts: Sequence[Fact], seed: int = 0) -> PreTrainedTokenizerFast:
    """Train the BPE and return the tokenizer; the same facts and seed give the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, BOS, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(facts, random.Random(seed)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT_TOKENS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files; the template goes into `tokenizer_config.json`, where every reader looks."""
    tokenizer.save_pretrained(str(folder), save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    # The newest transformers writes a class name that older readers do not know; all know this one.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
