"""Verdicts of small classifiers whose weights are set by hand: a text is judged by the words that stand in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification

from deployments.classifiers.classifier import CHARS_PER_TOKEN, Classifier
from deployments.config import SafetyConfig
from engine.errors import CheckpointError, ConfigError, EngineError, RequestError
from tests.architecture.source_tree import ROOT
from tests.deployments.tiny_models import write_tokenizer

WINDOW = 32
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    def make(*, problem_type: str = "multi_label_classification", bias: tuple[float, ...] = (-9.0, 9.0)) -> Path:
        vocab_size = write_tokenizer(tmp_path)
        torch.manual_seed(3)
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=WINDOW,
            id2label=dict(enumerate(("hate", "safe"))),
            label2id={"hate": 0, "safe": 1},
            problem_type=problem_type,
        )
        model = BertForSequenceClassification(config)
        with torch.no_grad():
            model.classifier.bias.copy_(torch.tensor(bias))
        model.save_pretrained(tmp_path)
        return tmp_path

    return make


def classifier(folder: Path, **options: object) -> Classifier:
    return Classifier(SafetyConfig(model_path=str(folder), **options))  # type: ignore[arg-type]


def test_a_multi_label_classifier_scores_each_hazard_by_itself(make_folder: MakeFolder) -> None:
    (verdict,) = classifier(make_folder(bias=(9.0, 9.0))).judge(["hello"])
    assert verdict.flagged == ("hate", "safe")
    assert all(score > 0.99 for score in verdict.score_by_hazard.values())


def test_a_single_label_classifier_s_scores_sum_to_one_and_benign_labels_flag_nothing(make_folder: MakeFolder) -> None:
    folder = make_folder(problem_type="single_label_classification")
    both = classifier(folder)
    assert sum(both.judge(["hello"])[0].score_by_hazard.values()) == pytest.approx(1)
    (verdict,) = classifier(folder, benign_labels=("safe",)).judge(["hello"])
    assert list(verdict.score_by_hazard) == ["hate"]
    assert verdict.flagged == ()


def test_thresholds_hold_for_all_hazards_or_for_one(make_folder: MakeFolder) -> None:
    folder = make_folder(bias=(0.0, 0.0))
    (score, _) = classifier(folder).judge(["hello"])[0].score_by_hazard.values()
    above, below = min(1.0, score + 0.01), score - 0.01
    assert "hate" not in classifier(folder, threshold=above).judge(["hello"])[0].flagged
    flagged = classifier(folder, threshold=above, threshold_by_hazard={"hate": below}).judge(["hello"])[0].flagged
    assert "hate" in flagged


def test_a_text_longer_than_the_window_counts_as_its_worst_part(make_folder: MakeFolder) -> None:
    judge = classifier(make_folder(bias=(0.0, 0.0)))
    parts = ["quiet words " * 5, "LOUD! 123 " * 5, "äöü 日本 " * 5]
    whole = judge.judge(["".join(parts)])[0].score_by_hazard["hate"]
    alone = [judge.judge([part[:WINDOW]])[0].score_by_hazard["hate"] for part in parts]
    assert whole >= min(alone)
    (again,) = judge.judge(["".join(parts) * 3])
    assert again.score_by_hazard["hate"] >= whole - 1e-6


def test_a_text_is_judged_in_windows_of_the_configuration_if_the_checkpoint_reads_more(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8192 tokens at once held a call for minutes: other verdicts were late, and the classifier counted as hung."""
    judge = classifier(make_folder(), max_tokens=WINDOW // 2)
    longest: list[int] = []
    logits = judge._checkpoint.logits
    monkeypatch.setattr(
        judge._checkpoint,
        "logits",
        lambda rows: longest.append(max(len(row["input_ids"]) for row in rows)) or logits(rows),
    )
    judge.judge(["quiet words " * 20, "few"])
    assert max(longest) == WINDOW // 2
    assert max(map(len, judge.pieces("quiet words " * 100))) == CHARS_PER_TOKEN * WINDOW // 2


@pytest.mark.parametrize("is_bundled", [True, False], ids=["the bundled one", "one that transformers computes"])
def test_in_bfloat16_the_scores_are_nearly_the_same(make_folder: MakeFolder, is_bundled: bool) -> None:
    folder = ROOT / "models" / "guard" if is_bundled else make_folder(bias=(0.0, 0.0))
    texts = ["a", "some longer text than that, about the weather", "How do I build a bomb at home?", "x" * 500]
    exact, fast = (classifier(folder, dtype=dtype).judge(texts) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, fast, strict=True):
        assert other.score_by_hazard == pytest.approx(one.score_by_hazard, abs=0.02)
    assert fast != exact


@pytest.mark.parametrize("length", [0, 1, 8 * WINDOW, 8 * WINDOW + 1, 5000])
def test_pieces_cover_a_text_and_overlap(make_folder: MakeFolder, length: int) -> None:
    text = "".join(chr(0x4E00 + place) for place in range(length))
    pieces = classifier(make_folder()).pieces(text)
    assert all(len(piece) <= CHARS_PER_TOKEN * WINDOW for piece in pieces)
    overlap = CHARS_PER_TOKEN * WINDOW // 4
    assert pieces[0] + "".join(piece[overlap:] for piece in pieces[1:]) == text
    assert all(len(piece) > overlap for piece in pieces[1:])


def test_rows_share_a_forward_pass_only_if_little_of_it_is_padding(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.classifiers.classifier.PADDING_SLACK_TOKENS", 1)
    judge = classifier(make_folder(), max_batch=2)
    lengths = [9, 0, 3, 30, 4, 4, 21]
    passes = [[lengths[row] for row in chosen] for chosen in judge._passes(lengths)]
    assert passes == [[3, 4], [4, 9], [21, 30]]


def test_a_batch_judges_each_text_as_alone(make_folder: MakeFolder) -> None:
    judge = classifier(make_folder(bias=(0.0, 0.0)), max_batch=2)
    texts = ["a", "some longer text than that", "", "x" * 200, "middling words"]
    together = judge.judge(texts)
    assert together[2].flagged == ()
    for text, verdict in zip(texts, together, strict=True):
        (alone,) = judge.judge([text])
        assert verdict.score_by_hazard == pytest.approx(alone.score_by_hazard, abs=1e-5)
    assert judge.judge([]) == []


def test_numbers_that_are_not_finite_are_no_verdict(make_folder: MakeFolder) -> None:
    judge = classifier(make_folder(bias=(float("nan"), 0.0)))
    with pytest.raises(EngineError, match="not finite"):
        judge.judge(["hello"])


@pytest.mark.parametrize(("text", "words"), [("x" * 51, "at most 50"), ("\ud800", "lone surrogate")])
def test_a_text_that_cannot_be_judged_is_refused(make_folder: MakeFolder, text: str, words: str) -> None:
    judge = classifier(make_folder(), max_chars=50)
    with pytest.raises(RequestError, match=words):
        judge.check(text, field="input")


@pytest.mark.parametrize("option", [{"benign_labels": ("saef",)}, {"threshold_by_hazard": {"saef": 0.5}}])
def test_a_label_that_is_not_there_is_refused_with_those_that_are(
    make_folder: MakeFolder, option: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"'saef'; it has hate, safe"):
        classifier(make_folder(), **option)


def test_a_checkpoint_without_its_head_is_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    tensors = load_file(folder / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"classifier\.weight"):
        classifier(folder)


@pytest.mark.parametrize("problem", ["regression", "multi_label"])
def test_a_checkpoint_without_probabilities_is_refused(make_folder: MakeFolder, problem: str) -> None:
    """A softmax over the single number of a regression flagged every text with certainty."""
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": problem}))
    with pytest.raises(CheckpointError, match=f"problem_type is '{problem}'"):
        classifier(folder)


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "x"}, {"vocab_size": -5}, {"quantization_config": {"quant_method": "gptq", "bits": 4}}],
    ids=["a field of another type", "an impossible size", "a quantization whose library is missing"],
)
def test_what_transformers_cannot_load_is_refused_by_its_folder(
    make_folder: MakeFolder, change: dict[str, object]
) -> None:
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=f"^{folder}: "):
        classifier(folder)


def test_a_file_that_is_cut_off_is_refused_by_its_folder(make_folder: MakeFolder) -> None:
    weights = make_folder() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"^{weights.parent}: "):
        classifier(weights.parent)


def test_a_folder_that_is_no_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no safetensors file"):
        classifier(tmp_path)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        classifier(tmp_path / "nowhere")
