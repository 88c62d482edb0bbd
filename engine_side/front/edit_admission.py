"""Admission of edits at the front end: a caller's edits, held against the engine, with what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from engine_side.edits.edited import cut
from engine_side.front.json_key import KEY_BYTES_MAX, json_key
from schemas.edits.arms import Arms
from schemas.edits.resolve import resolve_edits
from schemas.edits.resolved import Edits, encode
from schemas.edits.spec import parse_edits
from schemas.errors import EditError, LimitError
from schemas.lru import Lru

__all__ = ["Admitted", "Arming"]

_KNOWN_MAX: Final = 64


class Admitted:
    """Edits that an engine can make; ``text``: as they travel to it."""

    def __init__(self, edits: Edits) -> None:
        self.text, self.told, self.rows_kept = encode(edits), edits.told, edits.rows_kept
        self._edits = edits
        self._salts = Lru[int, str](_KNOWN_MAX)

    def salt(self, prompt_len: int) -> str:
        """The salt of the prefix cache for a prompt of this length; EditError where such a prompt cannot have them."""
        if (found := self._salts.get(prompt_len)) is None:
            cut(self._edits, prompt_len)
            self._salts.put(prompt_len, found := self._edits.salt(prompt_len))
        return found


@dataclass(frozen=True, slots=True)
class Arming:
    """Places that an engine may edit, and the last edits that were held against them: most requests ask for what others
    did.
    """

    arms: Arms
    known: Lru[str | bytes, Admitted] = field(default_factory=lambda: Lru(_KNOWN_MAX))

    def admit(self, value: object) -> Admitted | None:
        """A caller's edits; None where it asks for none. EditError where they cannot be made."""
        key = json_key(value) if not isinstance(value, str) else value if len(value) <= KEY_BYTES_MAX else ""
        if key and (found := self.known.get(key)) is not None:
            return found
        try:
            specs = parse_edits(key or value)  # as it was then: its owner may change it meanwhile
        except LimitError as error:  # vLLM answers a ValueError with 400, anything else with 500
            raise EditError("", "…", str(error)) from None
        if not specs:
            return None
        admitted = Admitted(resolve_edits(specs, self.arms))
        if key:
            self.known.put(key, admitted)
        return admitted
