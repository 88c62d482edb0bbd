"""A model's own configuration, held against what is asked: known at once, where an engine takes a minute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from schemas import limits
from schemas.edits.arms import Arms, EditArms, parse_edit_places
from schemas.edits.vectors import load_vector
from schemas.errors import ArgumentError, SpecError, StartError
from schemas.probes import Registered, load_probe
from schemas.sites import SITES, has_heads, layers_by_site
from schemas.spec import CaptureSpec, armed_at, resolve

__all__ = ["ModelConfig", "check_arguments", "config_of", "fetched", "read_config", "takes_more_than_text",
           "without_tokenizer"]

# Architectures whose heads, in vLLM's code, share the hidden size where head_dim is not said; and those whose keys have
# as many heads as their queries where nothing else is said, or whatever is said.
_EVEN: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM",
                          "MixtralForCausalLM", "OPTForCausalLM", "GPTNeoXForCausalLM"})
_KEYS_LIKE_QUERIES: Final = frozenset({"LlamaForCausalLM", "Phi3ForCausalLM"})
_ALWAYS: Final = frozenset({"OPTForCausalLM", "GPTNeoXForCausalLM"})
_TAKE_IMAGES: Final = frozenset({"HCXVisionV2ForCausalLM", "MuseGlimmerForCausalLM"})  # vLLM lists them under text
_CHANGE_IT: Final = ("--config", "--hf", "--model")  # how the names of vLLM's arguments begin that do


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The part of a configuration that decides about captures; numbers that it does not say are 0.

    They are not guessed from others: a model's class has defaults of its own.
    """

    architectures: tuple[str, ...]
    n_layers: int
    hidden: int
    head: int  # columns of one
    heads: int
    kv_heads: int
    said: Mapping[str, Any] = field(default_factory=dict)  # all that it says of the language model
    encoder_decoder: bool = False

    def check_sites(self, flag: str, sites: Sequence[str]) -> None:
        """StartError where the model has none of a site, or is of an architecture or a configuration without taps.

        A site that only some models of an architecture have is refused once the engine has loaded its own.
        """
        from engine_side.front.media import DECODER_READS
        from engine_side.tap.architectures import family_of, is_known

        if not is_known(self.architectures):
            if self.encoder_decoder and takes_more_than_text(self.architectures):
                raise StartError(f"{flag}: {', '.join(self.architectures)}: {DECODER_READS}")
            return
        family = family_of(self.architectures, self.said)
        offered = [site for site in (*family.block, *family.model) if self.layers_of(site) != []]
        for site in sites:
            if site in family.refused:
                raise StartError(f"{flag} = {site!r}: {family.refused[site]}; valid: {', '.join(offered)}")
            if site not in offered:
                raise StartError(f"{flag} = {site!r}: the architecture {', '.join(self.architectures)} has no such "
                                 f"site; valid: {', '.join(offered)}")

    def layers_of(self, site: str) -> list[int] | None:
        """The layers in which a model of the table has a site that its family has; None where it is not known."""
        from engine_side.tap.layers import site_layers

        return site_layers(self.architectures, self.said, site, self.n_layers) if self.n_layers else None

    def check_taps(self, flag: str, places: Sequence[str], probes: Sequence[Registered]) -> None:
        """StartError where the model cannot have what ``flag`` arms, or what a probe reads."""
        asked = layers_by_site(places)
        self.check_sites(flag, list(asked))
        for site, layers in asked.items():
            if self.n_layers and layers and layers[-1] >= self.n_layers:
                raise StartError(f"{flag} = {site}.{layers[-1]}: this model has layers 0 to {self.n_layers - 1}")
        for probe in probes:
            self.check_probe(probe)

    def check_probe(self, probe: Registered) -> None:
        """StartError where the model has no such layer, or rows of another width there."""
        loaded = load_probe(probe)
        site, layer, width = loaded.about.site, loaded.about.layer, loaded.directions.shape[1]
        self.check_sites("--probe", [site])
        if self.n_layers and layer >= self.n_layers:
            raise StartError(f"--probe = {str(probe)!r}: layer = {layer}: this model has layers 0 to "
                             f"{self.n_layers - 1}")
        if width != (known := self.widths.get(site, width)):
            raise StartError(f"--probe = {str(probe)!r}: directions have {width} numbers, rows of {site} have {known} "
                             "in this model")

    def check_spec(self, spec: CaptureSpec, armed: Sequence[str], probes: Sequence[Registered]) -> None:
        """ArgumentError that names the flag of what an engine with these taps would refuse."""
        from engine_side.tap.architectures import lens_names

        if not self.n_layers:
            return
        known = armed_at(armed, self.n_layers, self.head,
                         {probe.name: load_probe(probe).about for probe in probes}, lens_names(self.architectures))
        try:
            resolve(spec, known, self.widths)
        except SpecError as error:
            raise ArgumentError(f"--{error.field}", error.value, error.reason) from None

    def armed_for_edits(self, asked: EditArms, probes: Sequence[Registered]) -> Arms | None:
        """The arms of an engine that is started so, which it holds edits against; None where they are not known before.

        Of the longest request nothing is known.
        """
        from engine_side.config import EngineConfig
        from engine_side.tap.architectures import lens_names

        layers = {site: list(range(self.n_layers)) if chosen is None else chosen
                  for site, chosen in layers_by_site(parse_edit_places("--edit", asked.places)).items()}
        if not self.n_layers or not layers.keys() <= self.widths.keys():
            return None
        depth, rows = (int(EngineConfig.__dataclass_fields__[name].default) if given is None else given  # type: ignore
                       for name, given in (("edit_depth", asked.depth), ("edit_rows", asked.rows)))
        return Arms(layers, self.widths, self.n_layers, depth, {each.name: load_vector(each) for each in asked.vectors},
                    dict(lens_names(self.architectures)), rows, limits.position_max,
                    {site: self.head for site in layers if self.head and has_heads(site)},
                    {probe.name: load_probe(probe).about.names for probe in probes})

    @property
    def widths(self) -> dict[str, int]:
        """Numbers in a row, by site, as far as they are known."""
        by_rule = {"hidden": self.hidden, "q_heads": self.heads * self.head, "kv_heads": self.kv_heads * self.head,
                   **self._of_mlp}
        known = {name: width for name, site in SITES.items() if (width := by_rule.get(site.width, 0))}
        return known | ({"embed": own} if (own := _number(self.said, "word_embed_proj_dim")) else {})

    @property
    def _of_mlp(self) -> dict[str, int]:
        """Sizes in the MLP of a model of the table, by what a width follows."""
        from engine_side.tap.architectures import is_known

        if not is_known(self.architectures):
            return {}
        return {"mlp": _number(self.said, "ffn_dim" if "OPTForCausalLM" in self.architectures else "intermediate_size"),
                "experts": _number(self.said, "num_local_experts") or _number(self.said, "num_experts"),
                "chosen_experts": _number(self.said, "num_experts_per_tok")}


def read_config(model: str, engine_args: Sequence[str]) -> ModelConfig | None:
    """The configuration of a folder, or of a name on the hub that was fetched before; None where vLLM has to ask
    for it, or it may become another.
    """
    own = Path(model) / "config.json"
    try:
        path = own if own.is_file() else fetched(model, engine_args)
        if path is None or any(map(_may_change_it, engine_args)):
            return None
        return config_of(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # vLLM says what is wrong with it


def config_of(whole: Mapping[str, Any]) -> ModelConfig:
    """The facts that a config.json states for captures; KeyError, TypeError, AttributeError where it is none of a
    model.
    """
    text = whole.get("text_config", whole)
    names = tuple(map(str, whole["architectures"]))
    n_layers, hidden, heads = (_number(text, *keys) for keys in (
        ("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"), ("num_attention_heads", "n_head")))
    head, kv_heads = _number(text, "head_dim"), _number(text, "num_key_value_heads")
    if _EVEN & set(names) and heads and (not head or _ALWAYS & set(names)):
        head = hidden // heads
    if _number(text, "v_head_dim") not in (0, head) or _number(text, "kv_lora_rank"):
        head = 0  # heads of values are others, or all are compressed
    if _ALWAYS & set(names) or (_KEYS_LIKE_QUERIES & set(names) and "num_key_value_heads" not in text):
        kv_heads = heads
    if not n_layers:  # hybrids may say the kind of each layer alone
        kinds = next((text[key] for key in ("layers_block_type", "hybrid_override_pattern") if key in text), ())
        n_layers = len(kinds) if isinstance(kinds, list | str) else 0
    return ModelConfig(names, n_layers, hidden, head, heads, kv_heads, text, whole.get("is_encoder_decoder") is True)


def takes_more_than_text(names: Sequence[str]) -> bool:
    """Whether a model of these architectures takes images or sound: by their names, and by the table of the
    vLLM beside this project, where there is one.
    """
    from engine_side.seams.patching import declared_keys

    known = any(name.endswith("ForConditionalGeneration") or name in _TAKE_IMAGES for name in names)
    return known or not declared_keys(
        "vllm.model_executor.models.registry", "_MULTIMODAL_MODELS").isdisjoint(names)


def without_tokenizer(model: str) -> tuple[str, ...]:
    """vLLM's arguments for an engine that is given token ids alone: of a model that takes images it needs a tokenizer
    all the same.
    """
    known = read_config(model, ())
    return () if known is not None and takes_more_than_text(known.architectures) else ("--skip-tokenizer-init",)


def fetched(model: str, engine_args: Sequence[str]) -> Path | None:
    """The file of a hub model's configuration, if this machine has it and vLLM will take that one."""
    if Path(model).exists() or any("revision" in flag or "download" in flag for flag in engine_args):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found) if isinstance(found, str) else None


def check_arguments(model: str, engine_args: Sequence[str]) -> None:
    """StartError where vLLM is told to run a model by another library's code, which taps do not know."""
    from engine_side.tap.architectures import BY_TRANSFORMERS

    known = read_config(model, ())
    if known is None or BY_TRANSFORMERS & set(known.architectures):
        return
    words = [word for argument in engine_args for word in argument.split("=", 1)]
    for flag, value in pairwise(words):
        short = flag.replace("_", "-")  # vLLM takes it cut short too
        if len(short) > len("--model-") and "--model-impl".startswith(short) and value == "transformers":
            raise StartError(f"--model-impl = {value!r} after --: the sites of {', '.join(known.architectures)} are "
                             "known in vLLM's own code only; leave it out")


def _may_change_it(argument: str) -> bool:
    """vLLM takes names of arguments with underscores, cut short, or with a key after a dot too."""
    flag = argument.partition("=")[0].replace("_", "-")
    return flag.startswith("--") and any(flag.startswith(name) or name.startswith(flag) for name in _CHANGE_IT)


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The number under the first of ``names`` that is there; 0 where it is none."""
    found = next((config[name] for name in names if name in config), 0)
    return found if isinstance(found, int) else 0
