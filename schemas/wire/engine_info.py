"""Description of an engine, in the first message of its stream: the model, what is armed, the ranks."""

from __future__ import annotations

import msgspec

from schemas.sites import PROBE, is_probe
from schemas.spec import Armed
from schemas.wire.layout import Part


class Editable(msgspec.Struct, frozen=True):
    """The places that requests may edit: layers by site, at most ``depth`` edits of one row, site and layer.
    ``vectors``: names that they may use. ``rows``: the number of rows that edits of requests may set at once.
    ``counted``: for each rank the places (layers by site, ``schemas.sites.edited_place``) where it counts what was
    done; empty where the leader counts all.
    """

    layers: dict[str, list[int]]
    depth: int
    vectors: list[str]
    rows: int = 0
    counted: list[dict[str, list[int]]] = []


class Ring(msgspec.Struct, frozen=True):
    """Memory of a rank for rows on their way to the writer: ``nbytes`` is its size and ``why`` the reason for this
    size. ``on_full`` says what happens when it is full ("drop": rows are dropped; "wait": generation waits).
    """

    nbytes: int
    why: str
    on_full: str


class Attends(msgspec.Struct, frozen=True):
    """The rule by which attention of some layers weighs keys, as ``schemas.attention.AttentionRule`` has it. ``beyond``
    names what no such rule says ("attention sinks"), "" where there is nothing of the kind. ``cache``: the dtype that
    the engine's cache rounds keys to ("fp8"), "" where they stay as they were computed.
    """

    layers: list[int]
    head_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    beyond: str = ""
    cache: str = ""


class Proved(msgspec.Struct, frozen=True):
    """The proof at the engine's start that rows of a site are right: the ``identity`` that they fulfil. ``off`` is the
    error of the rows in the layer where it is largest. The error of a sum is relative to the stream's numbers, that of
    equal rows to their length. None where no number is compared.
    """

    identity: str
    off: float | None = None


class Divided(msgspec.Struct, frozen=True):
    """An engine whose ranks send to several writers: the number of this one (0 is that of the first rank), and the
    armed layers by site that the others get. Ranks and layout are those that this writer hears.
    """

    writer: int
    elsewhere: dict[str, list[int]]


class EngineInfo(msgspec.Struct, frozen=True):
    """Description of an engine by itself: enough to name every number it sends."""

    model: str
    model_dtype: str
    fingerprint: str  # xxh3 of the model's configuration and of samples of its weights
    revision: str
    tokenizer: str
    n_layers: int
    armed: Armed
    widths: dict[str, int]  # numbers in a row, by armed site and by probe
    max_model_len: int
    vllm_version: str
    tap_version: str
    runner: str  # module and class of what runs its steps
    async_scheduling: bool = False
    speculative: str = ""  # how drafts are made ("ngram, 3 tokens"), "" where none are
    world_size: int = 1
    meaning: dict[str, str] = {}  # by site: what exactly the value is on this model
    sources: dict[str, str] = {}  # by site: "table" of architectures, or "structure" where the start's search found it
    edits: Editable | None = None  # None: nothing is armed for edits
    group: str = ""  # the same on all ranks of an engine whose rows several of them send, else ""
    layout: list[Part] = []  # what each of these sends: all ranks name the whole of it, and Hello.rank which they are
    attention: list[Attends] = []  # of the layers whose q_rot and k_rot are armed; one of none is not known
    name: str | msgspec.UnsetType = msgspec.UNSET  # by which a gateway in front of several engines knows it
    ring: Ring | msgspec.UnsetType = msgspec.UNSET  # of this rank
    instance: str | msgspec.UnsetType = msgspec.UNSET  # the group; an engine of one rank, which is in none, has one too
    proved: dict[str, Proved] | msgspec.UnsetType = msgspec.UNSET  # by armed site that the start's search found
    unproved: str = ""  # why it found none, where the sites are a table's
    divided: Divided | msgspec.UnsetType = msgspec.UNSET

    @property
    def sent(self) -> dict[str, list[int]]:
        """The layers by site, and by probe, that are sent to this writer."""
        armed = {**self.armed.sites, **{f"{PROBE}{name}": [probe.layer] for name, probe in self.armed.probes.items()}}
        if not isinstance(self.divided, Divided):
            return armed
        left = {site: sorted({*layers} - {*self.divided.elsewhere.get(site, ())}) for site, layers in armed.items()}
        return {site: layers for site, layers in left.items() if layers or site not in self.divided.elsewhere}

    @property
    def called(self) -> str:
        """The engine's name among those of its server, "" where it is not known."""
        return self.group or self.instance or ""

    def dtype_of(self, site: str) -> str:
        """The dtype of a site's rows before their codec: the model's, and float32 of a probe's scores."""
        return "float32" if is_probe(site) else self.model_dtype
