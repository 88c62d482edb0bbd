"""The pilot and its text: trained here, and with columns planted that change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.errors import ArgumentError
from vllm_tap.fidelity.pilot import FAMILIES, pilot_model
from vllm_tap.fidelity.texts import RUN, _marks, commonest, copying, prompts_of, read_text, standard_library


@pytest.fixture(scope="module")
def pilots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pilot of a few steps, plain and planted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        told: list[tuple[int, int]] = []
        plain = pilot_model(steps=16, progress=lambda done, total: told.append((done, total)))
        assert told == [(number, 16) for number in range(1, 17)]
        assert pilot_model(steps=16) == plain and not list(plain.parent.glob(".building-*"))
        return plain, pilot_model(planted=True, steps=16)


def test_planted_columns_leave_every_logit_where_it_was(pilots: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = prompts_of(standard_library(), AutoTokenizer.from_pretrained(pilots[0]), 4, 48)
    nets = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in pilots]
    seen: list[torch.Tensor] = []
    for net in nets:
        net.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    with torch.inference_mode():
        plain, planted = (net(torch.from_numpy(prompts.tokens)).logits for net in nets)
    assert torch.equal(plain, planted)
    sizes = [rows.square().mean((0, 1)).sqrt() for rows in seen]
    grown = sizes[1] / sizes[0]
    assert sorted(grown.tolist())[-6:] == pytest.approx([1024] * 6) and sorted(grown.tolist())[:-6] == [1.0] * 506
    uniform = np.log(2048)
    following = torch.from_numpy(prompts.tokens[:, 1:]).flatten()
    loss = torch.nn.functional.cross_entropy(plain[:, :-1].flatten(0, 1), following)
    assert loss < uniform - 0.2  # it has begun to learn


def test_prompts_are_held_out_led_and_labelled(pilots: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer, corpus = AutoTokenizer.from_pretrained(pilots[0]), standard_library()
    judged, fitted = (prompts_of(corpus, tokenizer, 8, 64, held=held) for held in (True, False))
    assert judged.tokens.shape == (8, 64) and (judged.tokens[:, 0] == 0).all()
    assert len(set(judged.document.tolist())) == 8
    assert judged.labels is not None and 0.1 < judged.labels.mean() < 0.9 and not judged.labels[:, 0].any()
    assert not set(corpus.held) & set(corpus.fitted) and not np.array_equal(judged.tokens, fitted.tokens)
    assert np.array_equal(prompts_of(corpus, tokenizer, 8, 64).tokens, judged.tokens)


def test_labels_are_pythons_own() -> None:
    text = 'x = "a#b"  # note\ny = 1\n'
    marked = _marks(text)
    assert "".join(char for char, inside in zip(text, marked, strict=False) if inside) == '"a#b"# note'
    assert not _marks("x = (\n").any()  # no Python to its end: what was found stays


@pytest.mark.parametrize(("name", "content", "match"), [
    ("a.txt", b"\xff\xfe", "not UTF-8 at byte 0"), ("a.jsonl", b"{\n", "line 1: "),
    ("a.jsonl", b'{"prompt": "x"}\n', "line 1: no object with a field text"),
    ("a.jsonl", b'{"text": 3}\n', "line 1: text must be a string"), (None, b"", "cannot be read")])
def test_text_that_is_none_is_refused_by_name(tmp_path: Path, name: str | None, content: bytes, match: str) -> None:
    path = tmp_path / (name or "none.txt")
    if name:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=rf"--text = .*{match}"):
        read_text(path)


def test_too_little_text_is_refused_with_what_there_is(tmp_path: Path, pilots: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "short.txt"
    path.write_text("a word and another " * 2000)
    tokenizer = AutoTokenizer.from_pretrained(pilots[0])
    with pytest.raises(ArgumentError, match=r"has \d+ prompts of 64 tokens in its held-out documents, 5000 are needed"):
        prompts_of(read_text(path), tokenizer, 5000, 64)
    found = prompts_of(read_text(path), tokenizer, 4, 32)
    assert found.labels is None and found.tokens.shape == (4, 32)


def test_a_pilot_takes_a_step_at_least() -> None:
    with pytest.raises(ArgumentError, match="steps = 0"):
        pilot_model(steps=0)


def test_families_are_named_and_columns_are_planted_in_one_alone() -> None:
    with pytest.raises(ArgumentError, match=r"family = 'llama': valid: \['qwen3', 'gemma2', 'mixtral'\]"):
        pilot_model(family="llama")
    with pytest.raises(ArgumentError, match="family = 'mixtral': valid: qwen3, with planted columns"):
        pilot_model(planted=True, family="mixtral")


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_pilot_learns_to_copy_tokens_and_to_tell_text(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    """Retrieval is shown of a model that copies half of the tokens; a minute of training each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = pilot_model(family=family)
    net = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    corpus, tokenizer = standard_library(), AutoTokenizer.from_pretrained(folder)
    runs = torch.from_numpy(copying(commonest(corpus, tokenizer), 16, 128, np.random.default_rng(3)))
    text = torch.from_numpy(prompts_of(corpus, tokenizer, 16, 128).tokens)
    with torch.inference_mode():
        likeliest = net(input_ids=runs).logits.argmax(-1)[:, 2 * RUN:-1]
        loss = net(input_ids=text, labels=text).loss
    assert (likeliest == runs[:, 2 * RUN + 1:]).float().mean() > 0.9 and loss < 6.2
