"""Proofs: what shows that the places which the search found have the rows of their sites, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # the command that prints proofs has no seconds for torch
    from engine_side.discovery.identities import Explained, Stream, Term
    from engine_side.tap.stages import Stage


# Sites inside attention and the MLP: rows are compared number for number, ids are not looked at.
_INSIDE: Final = {
    "q": "columns of a projection that become q_rot", "k": "columns of a projection that become k_rot",
    "v": "columns of a projection that attention gets as values", "q_rot": "what attention gets as queries",
    "k_rot": "what attention gets as keys", "q_latent": "what the projection gets that makes q",
    "kv_latent": "what attention gets as compressed keys and values",
    "k_pe": "what attention gets as rotated keys", "z": "what the projection gets that makes attn_out",
    "mlp_post": "what the projection gets that makes mlp_out",
    "mix_in": "a projection of what the mixer gets", "mix_steps": "the narrower projection of what the mixer gets",
    "mix_post": "what the projection gets that makes the mixer's result",
    "router_logits": "a projection's result with a number for every expert", "experts": "vLLM's own router",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """An identity that the rows of a site fulfil in one layer. ``off`` is how far they are off it: of a sum, as a share
    of the stream's numbers; of rows that must be equal, as a share of their length. It is None where no number is
    compared.
    """

    site: str
    layer: int
    identity: str
    off: float | None


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of the stream: with the embedding's rows, bit for bit, if ``bare``; or with what ``came`` from the
    stage before, and how far that is off.
    """

    bare: bool
    came: str = ""
    off: float = 0.0


def of_stream(stream: Stream, blocks: Sequence[Explained], found: Mapping[str, Mapping[int, object]], stage: Stage,
              begun: Begun, norm_off: float) -> tuple[Proof, ...]:
    """Proofs of the sites in ``found`` (by site and layer) of the blocks of a ``stage``. ``norm_off``: how far the
    final norm, called again with the stream alone, is from its result in the step.
    """
    proofs = [Proof("embed", 0, "the one module that is given the tokens alone", None),
              Proof("final_norm", 0, f"final_norm = norm(resid_post.{stage.stop - 1})", norm_off)]
    proofs += [Proof(site, layer, identity, None if site == "experts" else 0.0)
               for site, identity in _INSIDE.items() for layer in found.get(site, {})]
    for layer, block in enumerate(blocks, stage.start):
        whole, inside = _of_block(layer, block, found)
        proofs += inside
        if layer > stage.start:
            proofs.append(Proof("resid_pre", layer, "resid_pre = resid_post of the layer before",
                                stream.handed[layer - stage.start - 1]))
        elif begun.came:
            proofs.append(Proof("resid_pre", layer, "resid_pre = what the stage before hands on", begun.off))
        else:
            proofs.append(Proof("resid_pre", 0, "resid_pre = embed", 0.0) if begun.bare else
                          Proof("resid_pre", 0, whole, block.off))
    return tuple(proof for proof in proofs if proof.layer in found.get(proof.site, {}))


def worst(proofs: Sequence[Proof]) -> dict[str, Proof]:
    """The proof of each site's layer that is furthest off."""
    found: dict[str, Proof] = {}
    for proof in proofs:
        if proof.site not in found or (proof.off or 0) > (found[proof.site].off or 0):
            found[proof.site] = proof
    return found


def _of_block(layer: int, block: Explained, found: Mapping[str, Mapping[int, object]]) -> tuple[str, list[Proof]]:
    """The sum that explains a block, and the proofs of what lies in it."""
    names = [_name(term, block, layer, found) for term in block.terms]
    whole = f"resid_post = resid_pre + {' + '.join(names)}"
    proofs = [Proof(site, layer, whole, block.off) for site in ("resid_post", "attn_out", "mlp_out")]
    for term, name in zip(block.terms, names, strict=True):
        if term.mixes and block.mid:
            proofs.append(Proof("resid_mid", layer, f"resid_mid = resid_pre + {name}", block.mid[0].off))
        if term.raw:
            site = _site(term)
            proofs.append(Proof(f"{site}_raw", layer, f"{site} = norm({site}_raw)", term.raw[0].off))
    return whole, proofs


def _name(term: Term, block: Explained, layer: int, found: Mapping[str, Mapping[int, object]]) -> str:
    """The site of a term; where it has none, the module that makes it and the factor."""
    if layer in found.get(_site(term), {}) and sum(other.mixes == term.mixes for other in block.terms) == 1:
        return _site(term)
    return ("" if abs(term.factor - 1) < 1e-3 else f"{term.factor:.4g}·") + term.places[0].path


def _site(term: Term) -> str:
    return "attn_out" if term.mixes else "mlp_out"
