"""Room that a capture takes: bytes a token, memory of GPU and host, disk; counted as engine and service count it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import structs

from engine_side.tap.budget import RING_BYTES_MAX, STAGING_BYTES_MAX, ring_bytes, scratch_bytes, staging_sizes
from schemas.codecs import row_bytes
from schemas.errors import ArgumentError, SpecError
from schemas.sites import ask_site, site_meant
from schemas.spec import CaptureSpec, armed_at, resolve
from vllm_tap.serve.model_config import ModelConfig

__all__ = ["SiteSize", "Sizes", "size"]

_DAY_S: Final = 24 * 3600
_ITEMSIZE: Final = 2  # vLLM runs float32 models in 16 bits unless it is told otherwise


@dataclass(frozen=True, slots=True)
class SiteSize:
    """One captured site: ``token_bytes`` of all its layers, in its codec."""

    site: str
    layers: list[int]
    width: int
    codec: str
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a capture with these sites, and of the taps for it, on one GPU without tensor parallelism.

    ``token_bytes`` of encoded rows for one token; ``day_bytes`` of those at ``rate`` captured tokens a second.
    ``staging_bytes`` and ``scratch_bytes`` are on the GPU. ``ring_bytes`` to ``ring_bytes_max``, by what the store
    takes, are shared memory of the host.
    """

    model: str
    dtype: str
    sites: tuple[SiteSize, ...]
    token_bytes: int
    rate: float
    day_bytes: int
    step_tokens: int
    armed: dict[str, int]  # by site: layers
    staging_bytes: int
    scratch_bytes: int
    budget_bytes: int
    ring_bytes: int
    ring_bytes_max: int

    @property
    def refused(self) -> bool:
        """Whether an engine with the default budget does not start with these taps."""
        return self.staging_bytes + self.scratch_bytes > self.budget_bytes


def size(config: ModelConfig, spec: CaptureSpec, arm: tuple[str, ...] = (), *, step_tokens: int = 8192,
         rate: float = 1000.0) -> Sizes:
    """Sizes of a capture of ``spec`` on a model; ``arm``: what is armed, by default what is captured and no more.

    ``step_tokens``: vLLM's max_num_batched_tokens. ArgumentError or StartError where the model has no such site, layer
    or codec, or where its config.json does not say a width.
    """
    from engine_side.tap.architectures import lens_names

    if not 0 <= rate < 1e12:  # a sum of bytes a day must be a number
        raise ArgumentError("--rate", rate, "is a number of tokens a second, below 1e12")
    name = ", ".join(config.architectures)
    if not config.n_layers:
        raise ArgumentError("MODEL", name, "its config.json does not say how many layers it has")
    names = dict(lens_names(config.architectures))
    places = arm or tuple(dict.fromkeys(site_meant(ask_site(asked)[0], names, asked)
                                        for asked in spec.sites or ["resid_post"]))
    config.check_taps("--arm" if arm else "--sites", places, ())
    armed = armed_at(places, config.n_layers, config.head, {}, names)
    armed = structs.replace(armed, sites={site: _had(config, site, layers) for site, layers in armed.sites.items()})
    try:
        resolved = resolve(spec, armed, config.widths)
    except SpecError as error:
        raise ArgumentError(f"--{error.field}", error.value, error.reason) from None
    widths = {site: _width(config, site) for site in armed.sites}
    dtype = "float16" if "float16" in (config.said.get("dtype"), config.said.get("torch_dtype")) else "bfloat16"
    captured = tuple(
        SiteSize(site, layers, widths[site], codec := resolved.codec[site],
                 len(layers) * row_bytes(codec, widths[site], dtype))
        for site, layers in resolved.layers.items())
    taps = armed.sites if arm else resolved.layers
    staging = staging_sizes({site: widths[site] for site in taps}, taps, step_tokens, _ITEMSIZE)
    step, token = max(staging.values()), sum(each.token_bytes for each in captured)
    return Sizes(name, dtype, captured, token, rate, round(token * rate * _DAY_S), step_tokens,
                 {site: len(layers) for site, layers in taps.items()}, sum(staging.values()), scratch_bytes(step),
                 STAGING_BYTES_MAX, *_rings(step))


def _rings(step: int) -> tuple[int, int]:
    """Bytes of rings for such steps: of an unknown store, and of one that takes three seconds a step (the most)."""
    return ring_bytes(step, 8 * step), ring_bytes(step, 4 * RING_BYTES_MAX, step / 3)


def _had(config: ModelConfig, site: str, layers: list[int]) -> list[int]:
    """The layers that have the site, as far as that is known."""
    known = config.layers_of(site)
    return layers if known is None else [layer for layer in layers if layer in known]


def _width(config: ModelConfig, site: str) -> int:
    if site not in config.widths:
        raise ArgumentError("--sites", site, "its width does not follow from this model's config.json; `vllm-tap "
                                             "sites MODEL --prove` loads the model and prints it")
    return config.widths[site]
