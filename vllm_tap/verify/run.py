"""``vllm-tap verify``: an engine in this process, with every place armed that is to be held against itself."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from schemas.checks import parse_arm
from schemas.edits.arms import EDITABLE, EditArms
from schemas.errors import ArgumentError, StartError
from vllm_tap.offline.engine import started
from vllm_tap.offline.recording import known_engine, recording
from vllm_tap.progress import ProgressReport, reporting
from vllm_tap.serve.model_config import check_arguments, without_tokenizer
from vllm_tap.sites.description import SiteList, as_found, describe, load_config
from vllm_tap.sites.prove import prove
from vllm_tap.verify.checks import Outcome, verify
from vllm_tap.verify.laboratory import Laboratory

__all__ = ["VerifyJob", "run"]

_WATCHED: Final = ("final_norm", "k_rot", "v")
_REFUSED: Final = ("--speculative-config", "-sc", "--data-parallel-size", "-dp")
_ROWS: Final = 8192  # of edits: those of several requests, as a request's are let go a moment after its end
_SHUTDOWN_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """The arguments of ``vllm-tap verify``; ArgumentError or StartError where they cannot be met. ``edit``: places to
    verify, as of ``serve``; empty: every site that can be edited.
    """

    model: str
    edit: str = ""
    engine_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        EditArms(self.edit).check("--edit", "", "")
        check_arguments(self.model, self.engine_args)
        for word, following in pairwise((*self.engine_args, "")):
            flag, given, value = word.partition("=")
            if flag in _REFUSED:
                raise ArgumentError(flag, value if given else following, "after --: one engine without drafts is "
                                                                         "verified; leave it out")


def run(job: VerifyJob, progress: ProgressReport = False) -> Outcome:
    """Start an engine and verify it. StartError where it does not start."""
    sites, fixed = _sites(job)
    places = job.edit or ",".join(name for name in EDITABLE if name in sites and name not in fixed)
    if not places:
        raise ArgumentError("MODEL", job.model, "has no site that can be edited")
    armed = {name.partition(".")[0] for name in parse_arm("--edit", places)}
    watched = ",".join(name for name in sites if name in armed or name in _WATCHED)
    _set_environment(job)
    with tempfile.TemporaryDirectory(prefix="vllm-tap-") as folder, \
            recording(Path(folder) / "captures", arm=watched, edit=places, durability="os") as tape:
        engine = started(job.model, (*without_tokenizer(job.model), *job.engine_args))
        try:
            chosen = known_engine(tape).armed.sites
            with reporting(progress, "verifying") as tell:
                found = verify(Laboratory(engine, tape.store, chosen), tell=tell)
            return replace(found, left_out=[] if job.edit else fixed)
        finally:
            engine.engine_core.shutdown(timeout=_SHUTDOWN_S)


def _sites(job: VerifyJob) -> tuple[list[str], list[str]]:
    """The sites that the model has, and those of them that cannot be edited; of one in no table as a search of the
    loaded model finds them.
    """
    from engine_side.edits.places import is_editable

    fixed: list[str] = []
    listed: SiteList = describe(job.model, load_config(job.model))
    if not listed.known:
        outcome = prove(job.model, job.engine_args, job.environment)
        if outcome.failed:
            raise StartError(f"MODEL = {job.model!r}: its sites are not proved: {outcome.failed}")
        listed = as_found(listed, outcome)
        fixed = [site for site, found in outcome.sites.items() if site in EDITABLE and not all(
            is_editable(site, place.rule, "structure") for place in found.places)]
    return [entry.site for entry in listed.sites], fixed


def _set_environment(job: VerifyJob) -> None:
    """The engine lives in this process, so that its K/V cache can be read; what it says goes to standard error."""
    os.environ |= {**job.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_TAP_EDIT_ROWS": str(_ROWS), "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; by default vLLM wants nearly all of a machine's memory
    if "PYTHONWARNINGS" not in os.environ:
        warnings.simplefilter("ignore")
