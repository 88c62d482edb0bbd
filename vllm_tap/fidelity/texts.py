"""Text to measure on: the standard library of the running Python, which every machine has, or a file of the user's."""

from __future__ import annotations

import io
import json
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from schemas.errors import ArgumentError, json_fault

__all__ = ["RUN", "Corpus", "Prompts", "commonest", "copying", "prompts_of", "read_text", "standard_library"]

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_HELD_OUT: Final = 20  # every so many documents one is held out
_LEFT_OUT: Final = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__", "turtledemo"}
_BYTES_MAX: Final = 1 << 30
_PIECE: Final = 8192  # characters of a document, of a file without any division
RUN: Final = 32  # tokens that come again and again where copying is asked for
_COMMON: Final = 8
_COUNTED, _COUNTED_CHARS = 64, 1 << 16  # documents that tokens are counted in, and characters of each


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in two parts: those that models, probes and scales are fitted on, and those held out to be judged by.

    ``digest``: XXH3 of all of it. ``python``: whether it is Python's source, which has labels.
    """

    name: str
    digest: str
    fitted: tuple[str, ...]
    held: tuple[str, ...]
    python: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one length.

    ``tokens`` is int64 [prompts, positions], ``document`` int64 [prompts]. ``labels`` is bool [prompts, positions],
    whether a token is in a string or a comment; None where the text is not Python's source.
    """

    tokens: I64
    document: I64
    labels: Bools | None


def standard_library() -> Corpus:
    """The modules of the running Python, without tests and tables; ArgumentError where this Python has no sources."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    if len(files) < 2 * _HELD_OUT:
        raise ArgumentError("--text", "stdlib", f"{root} has {len(files)} modules as sources: name a file of text")
    return _divided("stdlib", [path.read_text("utf-8", "ignore") for path in files], python=True)


def read_text(path: Path) -> Corpus:
    """The documents of a file: of JSON lines the field ``text``, of any other file pieces of 8,192 characters."""
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ArgumentError("--text", str(path), f"is larger than {_BYTES_MAX >> 30} GiB; give a part of it")
        text = path.read_text("utf-8")
    except OSError as error:
        raise ArgumentError("--text", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ArgumentError("--text", str(path), f"is not UTF-8 at byte {error.start}") from None
    if path.suffix != ".jsonl":
        return _divided(path.name, [text[at:at + _PIECE] for at in range(0, len(text), _PIECE)], python=False)
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            one = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = json_fault(error) if isinstance(error, ValueError) else "no object with a field text"
            raise ArgumentError("--text", str(path), f"line {number}: {why}") from None
        if not isinstance(one, str):
            raise ArgumentError("--text", str(path), f"line {number}: text must be a string")
        documents.append(one)
    return _divided(path.name, documents, python=False)


def _divided(name: str, documents: list[str], python: bool) -> Corpus:
    digest = xxhash.xxh3_128()
    for each in documents:
        digest.update(each.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    every = min(_HELD_OUT, max(2, len(documents) // _HELD_OUT))
    held = [at % every == every - 1 for at in range(len(documents))]
    return Corpus(name, digest.hexdigest(), tuple(each for each, out in zip(documents, held, strict=True) if not out),
                  tuple(each for each, out in zip(documents, held, strict=True) if out), python)


def prompts_of(corpus: Corpus, tokenizer: Any, count: int, length: int, held: bool = True) -> Prompts:
    """``count`` prompts of ``length`` tokens, from as many documents as there are, from anywhere in them.

    ``tokenizer``: one of Hugging Face's. ArgumentError where the text is too little.
    """
    documents = [each for each in (corpus.held if held else corpus.fitted) if each]
    order = np.random.default_rng(5).permutation(len(documents))
    windows: list[tuple[int, int, I64, Bools | None]] = []  # round, document, tokens, labels
    need = count
    for number in order.tolist():
        found = _windows(documents[number], tokenizer, length, corpus.python)
        found = [found[at] for at in np.random.default_rng(number).permutation(len(found))]
        windows += [(turn, number, tokens, labels) for turn, (tokens, labels) in enumerate(found)]
        need -= bool(found)
        if need <= 0:
            break
    if len(windows) < count:
        raise ArgumentError("--text", corpus.name, f"has {len(windows)} prompts of {length} tokens in its "
                            f"{'held-out' if held else 'other'} documents, {count} are needed: give more text, or "
                            "fewer or shorter prompts (--prompts, --tokens)")
    chosen = sorted(windows, key=lambda one: one[0])[:count]  # by rounds: one of each document first
    labels = np.stack([one[3] for one in chosen if one[3] is not None]) if corpus.python else None
    return Prompts(np.stack([one[2] for one in chosen]), np.array([one[1] for one in chosen]), labels)


def commonest(corpus: Corpus, tokenizer: Any) -> I64:
    """The eight commonest tokens of the documents that are not held out, the commonest first."""
    chosen = np.random.default_rng(7).permutation(len(corpus.fitted))[:_COUNTED].tolist()
    tokens = [tokenizer(corpus.fitted[number][:_COUNTED_CHARS], add_special_tokens=False, verbose=False)["input_ids"]
              for number in chosen]
    numbers, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *tokens]).astype(np.int64), return_counts=True)
    found: I64 = numbers[np.argsort(-counts, kind="stable")[:_COMMON]]
    return found


def copying(among: I64, count: int, length: int, rng: np.random.Generator, lead: int = 0) -> I64:
    """Prompts [count, length] of the token ``lead`` and then a run of tokens that comes again and again. The run has
    ``RUN`` random tokens out of ``among``. From its second time on, each token is the one ``RUN`` before it.
    """
    runs = np.tile(rng.choice(among, (count, RUN)), length // RUN + 1)
    found: I64 = np.concatenate([np.full((count, 1), lead, np.int64), runs], 1)[:, :length]
    return found


def _windows(text: str, tokenizer: Any, length: int, python: bool, most: int = 64) -> list[tuple[I64, Bools | None]]:
    """Consecutive prompts of a document, each led by the tokenizer's BOS (else EOS), if it has one."""
    lead = next((one for one in (tokenizer.bos_token_id, tokenizer.eos_token_id) if one is not None), None)
    step = length - (lead is not None)
    # A token has at least a byte; texts with more bytes a token than these are cut a little short.
    coded = tokenizer(text[:most * step * 8], add_special_tokens=False, return_offsets_mapping=python,
                      verbose=False)
    ids, inside = coded["input_ids"], None
    if python:
        marks = _marks(text)
        inside = [bool(marks[first:last].mean() > 0.5) if last > first else False
                  for first, last in coded["offset_mapping"]]
    found: list[tuple[I64, Bools | None]] = []
    for at in range(0, len(ids) - step + 1, step):
        first = [] if lead is None else [lead]
        labels = None if inside is None else np.array([*([False] * len(first)), *inside[at:at + step]])
        found.append((np.array([*first, *ids[at:at + step]], np.int64), labels))
    return found[:most]


def _marks(text: str) -> Bools:
    """A mask of the characters of Python's source that are in a string or a comment, by Python's own tokenizer."""
    marks, starts = np.zeros(len(text) + 1, bool), [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                (row, column), (last_row, last_column) = token.start, token.end
                marks[starts[row - 1] + column:starts[last_row - 1] + last_column] = True
    except (tokenize.TokenError, SyntaxError, IndexError):  # what was found before it stays
        pass
    return marks
