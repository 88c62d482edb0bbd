"""The survey's comparison with Hugging Face: it takes rows for the sites that they are, and for no others."""

from __future__ import annotations

import pytest
import torch

from tests.support.models.blocks_reference import BlocksReference
from tests.support.models.families import family_model
from tests.support.models.unlisted import UNLISTED
from tests.survey.held import Key, Reference

TOKENS = [(7 * token + 11) % 490 + 8 for token in range(21)]
LAYERS = 3


def rows_of(family: str) -> dict[Key, torch.Tensor]:
    """What Hugging Face's blocks add to the stream, by the names that the family's modules have."""
    found = BlocksReference(family_model(family, "float32"), UNLISTED[family]).rows(tuple(TOKENS))
    return {key: torch.from_numpy(rows) for key, rows in found.items() if key[0] in ("attn_out", "mlp_out")}


# A pair, a factor, norms behind, both at once, a norm and a residual inside, mixers of two kinds, experts.
@pytest.mark.parametrize("family", ["granite", "glm4", "gptj", *(pytest.param(family, marks=pytest.mark.soak)
                                                                for family in ("bloom", "lfm2", "qwen2_moe"))])
def test_attention_and_mlp_are_told_apart(family: str) -> None:
    reference, rows = Reference(family_model(family, "float32"), TOKENS, LAYERS), rows_of(family)
    assert {site for site, _ in rows} == {"attn_out", "mlp_out"}
    held = reference.holds(rows)
    assert all(one.error < 1e-6 for one in held.values()), held
    exchanged = {("mlp_out" if site == "attn_out" else "attn_out", layer): one for (site, layer), one in rows.items()}
    wrong = reference.holds(exchanged)
    assert all(one.error > 0.1 for one in wrong.values()), wrong
