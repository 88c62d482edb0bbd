"""Tapping of a loaded model: where its rows would be whole, staging for them, and what sends them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from msgspec import UNSET, structs
from torch import nn

from engine_side import worker
from engine_side.config import TAP_VERSION, EngineConfig, untested
from engine_side.discovery.proofs import worst
from engine_side.edits.editor import Editor
from engine_side.edits.places import call_of, edit_arguments, edit_results, keep
from engine_side.edits.tables import Size, room, tables
from engine_side.seams import projections, unchanged
from engine_side.seams.compiled import fusions, residuals
from engine_side.seams.front_end import widths_of
from engine_side.seams.kept import finite
from engine_side.seams.kept.attends import attends_of, joined, one_window
from engine_side.seams.media.models import check_media, takes_media
from engine_side.seams.ranks import tensor
from engine_side.seams.ranks.agreement import all_here, all_together, of_stages
from engine_side.seams.ranks.data import check_exchange
from engine_side.seams.ranks.pipeline import stage_of, stages_of
from engine_side.seams.ranks.writers import stores_reached
from engine_side.seams.recorded_step import discover, prove, unproved
from engine_side.tap.architectures import (
    BY_TRANSFORMERS,
    SHARED_OUT,
    Family,
    TapPoint,
    family_of,
    find_adding,
    find_carried,
    find_embedding,
    find_points,
    find_sums,
    has_blocks,
    is_known,
)
from engine_side.tap.probe_scores import scorer
from engine_side.tap.shares import layout_of
from engine_side.tap.stages import Has, Stage, of_engine
from engine_side.tap.staging import Staging, allocate
from engine_side.tap.survey import Survey, armed_layers, edited_places, probe_places
from engine_side.tap.taps import install
from engine_side.tap.writers import divided
from schemas.errors import StartError
from schemas.probes import LoadedProbe, Registered, load_probe
from schemas.sites import PROBE, SITES, edited_place, has_heads, layers_by_site
from schemas.spec import Armed
from schemas.wire.engine_info import Editable, EngineInfo, Proved

logger = logging.getLogger("vllm.tap")
_WHOLE: Final = "full_attention"  # kinds of layers, as configurations name them
_WINDOW: Final = "sliding_attention"
_PIECEWISE: Final = ("set cudagraph_mode to PIECEWISE "
                     """(--compilation-config '{"cudagraph_mode": "PIECEWISE"}')""")


@dataclass(frozen=True, slots=True)
class ArmingPlan:
    """Sites and probes to arm on a model of ``family``, as they are known before its weights are read.

    Without a family the sites are found by structure once they are.
    """

    config: EngineConfig
    family: Family | None
    asked: Mapping[str, list[int] | None]  # layers by site; None: all that have it
    probes: Mapping[Registered, LoadedProbe]

    @property
    def tapped(self) -> list[str]:
        """Sites that are armed, or that a probe reads."""
        return list(dict.fromkeys([*self.asked, *(loaded.about.site for loaded in self.probes.values())]))

    @property
    def touched(self) -> list[str]:
        """Sites that are tapped, or that requests may have edited."""
        return list(dict.fromkeys([*self.tapped, *layers_by_site(self.config.edit)]))


def tap_model(model: nn.Module, vllm_config: Any, plan: ArmingPlan) -> None:
    """Allocate staging, install taps, make recorder and sender; StartError where rows would not be what they should."""
    config, stage = plan.config, stage_of(vllm_config)
    _warn(config, vllm_config)
    survey = _survey(model, vllm_config, plan, stage)
    with all_together():  # a stage may have what is refused, or no room for what is armed, by itself
        layers = armed_layers(plan.asked, survey)
        armed = Armed(layers, vllm_config.model_config.get_total_num_hidden_layers(),
                      {site: head for site in layers if (head := survey.has[site].head)},
                      {probe.name: loaded.about for probe, loaded in plan.probes.items()},
                      dict(_family(plan).names))
        editable = _check_edits(vllm_config, config, survey)
        tapped = _tap(model, vllm_config, plan, survey, stage, armed)
        attending = set(layers.get("q_rot", ())) & set(layers.get("k_rot", ()))
        mine = attends_of(model, vllm_config, attending)
    attention = joined(each for told in of_stages(mine) for each in told)
    if editable is not None:
        editable = structs.replace(editable, counted=_counted(tapped.editor, vllm_config.parallel_config))
    info = structs.replace(_info(model, vllm_config, armed, plan, survey), edits=editable, attention=attention)
    stores, seat = stores_reached(config, info), tensor.seat_of(vllm_config.parallel_config)
    with all_together():
        info, rank = divided(info, seat.rank, stores)
        worker.start(config, info, model, tapped, replace(seat, rank=rank))


def _family(plan: ArmingPlan) -> Family:
    assert plan.family is not None
    return plan.family


def _survey(model: nn.Module, vllm_config: Any, plan: ArmingPlan, stage: Stage) -> Survey:
    """The engine's places of the sites that are asked for, and those of this rank."""
    model_config, family = vllm_config.model_config, _family(plan)
    find = partial(find_points, model, family, list(model_config.architectures),
                   n_layers=model_config.get_total_num_hidden_layers(), hidden=model_config.get_hidden_size(),
                   stage=None if stage.count == 1 else stage)
    points, refused = list[TapPoint](), dict[str, str]()
    edited = (edited_place(site, 1)[0] for site in layers_by_site(plan.config.edit))
    for site in dict.fromkeys([*plan.touched, *edited]):
        try:
            points += find(sites=(site,))
        except StartError as error:
            refused[site] = str(error)
    head, own = model_config.get_head_size(), dict[str, Has]()
    for point in points:
        layers = [*own[point.site].layers, point.layer] if point.site in own else [point.layer]
        own[point.site] = Has(layers, point.width, tensor.whole_width(point, model_config),
                              head if has_heads(point.site) and point.width % head == 0 else 0, point.meaning,
                              point.source)
    told = of_stages((own, refused))
    with all_together():
        has = of_engine([each for each, _ in told])
    return Survey(points, has, told[0][1] | refused)


def _tap(model: nn.Module, vllm_config: Any, plan: ArmingPlan, survey: Survey, stage: Stage, armed: Armed
         ) -> worker.Tapped:
    """Allocate staging and install the taps of this rank."""
    config, family, model_config = plan.config, _family(plan), vllm_config.model_config
    points = survey.here([*((site, layer) for site, layers in armed.sites.items() for layer in layers),
                          *probe_places(plan.probes, survey)])
    layers = {site: [point.layer for point in points if point.site == site] for site in plan.tapped}
    dtype, device = model_config.dtype, next(model.parameters()).device
    check_ids(points, dtype)
    staging, scratch = allocate({point.site: point.width for point in points}, layers, _tokens_max(vllm_config), dtype,
                                device, config.staging_bytes_max, config.scratch_bytes)
    _make_scorers({probe: loaded for probe, loaded in plan.probes.items()
                   if loaded.about.layer in layers[loaded.about.site]}, staging, model, device)
    places, editor = _arm_edits(vllm_config, config, survey, device)
    adding = {} if takes_media(model_config) else find_adding(model, family)
    points = residuals.at_norms(points, adding)
    classes, homes = unchanged.classes(model), unchanged.homes(model, points)
    compilation = vllm_config.compilation_config
    reduced = fusions.reduced(model, {*family.block, *family.found}, vllm_config.parallel_config.tensor_parallel_size)
    fusions.warn(fusions.computed_apart(points, compilation, reduced, places))
    changed = {id(place.module) for place in places}  # what is written into staging itself is not changed any more
    writers = {module: write for module, write in projections.find_writers(model, compilation.pass_config).items()
               if module not in changed}
    if editor is not None:
        keep(model, editor.tables)
        edit_results(places, editor.tables)
    install(projections.copied_where_quantized(points), staging, writers)
    if editor is not None:
        edit_arguments(places, editor.tables)
        if config.edit and device.type == "cpu":
            finite.guard(model)
    residuals.read_back(find_carried(model, family, adding, points), staging, vllm_config)
    unchanged.check_classes(classes, model)
    first_block = tuple(site for site in armed.sites if stage.first and 0 in layers[site])
    checks = worker.Checks(homes, find_embedding(model, family, first_block), find_sums(family, layers))
    return worker.Tapped(staging, scratch, editor, checks)


def _check_edits(vllm_config: Any, config: EngineConfig, survey: Survey) -> Editable | None:
    """The places that requests may edit, None where there are none; StartError where the engine has it not."""
    if not config.edit:
        return None
    asked, n_layers = layers_by_site(config.edit), vllm_config.model_config.get_total_num_hidden_layers()
    layers = armed_layers(asked, survey)
    for site, chosen in asked.items():
        if chosen is None and (lacking := sorted(set(range(n_layers)) - set(layers[site]))):
            raise StartError(f"vllm-tap: VLLM_TAP_EDIT={','.join(config.edit)!r}: layers {lacking} have no {site}; "
                             f"name single layers that have it, such as {site}.{min(layers[site])}")
    return Editable(layers, config.edit_depth, [vector.name for vector in config.vectors], config.edit_rows)


def _counted(editor: Editor | None, parallel: Any) -> list[dict[str, list[int]]]:
    """Places by the rank that counts edits of them: the first of each stage, whose others edit alike; none where the
    leader counts all.
    """
    mine: dict[str, list[int]] = {}
    for site, layer in () if editor is None else editor.tables.slots:
        mine.setdefault(site, []).append(layer)
    stages = of_stages(mine)
    others: list[dict[str, list[int]]] = [{}] * (parallel.tensor_parallel_size - 1)
    return [] if len(stages) == 1 else [each for stage in stages for each in (stage, *others)]


def _arm_edits(vllm_config: Any, config: EngineConfig, survey: Survey, device: torch.device
               ) -> tuple[list[TapPoint], Editor | None]:
    """The places of this rank that requests may have edited, and what edits them; StartError where one cannot be."""
    if not (config.edit or config.probes):  # what a probe sees may end a request
        return [], None
    places = survey.here(edited_places(armed_layers(layers_by_site(config.edit), survey)))
    known = widths_of(vllm_config.model_config)
    for point in places:
        call_of(point)
        if known[point.site] != point.width:
            raise StartError(f"vllm-tap: cannot edit {point.site} on this model: its rows have {point.width} numbers, "
                             f"and {known[point.site]} by its configuration; leave it out of --edit (VLLM_TAP_EDIT)")
    widths = {(point.site, point.layer): point.width for point in places}
    head = vllm_config.model_config.get_head_size()
    heads = {point.width: point.width // head for point in places if has_heads(point.site)}
    size = Size(_tokens_max(vllm_config), vllm_config.scheduler_config.max_num_seqs, config.edit_depth,
                config.edit_rows)
    if (nbytes := room(widths, size, heads)) > config.staging_bytes_max:
        raise StartError(f"vllm-tap: edits need {nbytes / 2**20:,.1f} MiB; the budget is "
                         f"{config.staging_bytes_max / 2**20:,.1f} MiB: arm fewer sites (VLLM_TAP_EDIT), lower "
                         "max_num_seqs or VLLM_TAP_EDIT_ROWS, or raise VLLM_TAP_STAGING_BYTES_MAX")
    logger.info("vllm-tap: %d places may be edited; tables of %.1f MiB", len(places), nbytes / 2**20)
    return places, Editor(tables(widths, size, heads, device))


def look_into(model: nn.Module, vllm_config: Any, plan: ArmingPlan) -> ArmingPlan:
    """The plan with the family of a model that is loaded, as vLLM wrote it: nothing is around its layers yet.

    StartError where its sites are not found, or are not what its table says.
    """
    if plan.family is not None and not has_blocks(model, plan.family):  # a class of another vLLM, by the same name
        plan = replace(plan, family=None)
        _check_parallel(plan, vllm_config)
        _check_unknown(list(vllm_config.model_config.architectures), vllm_config)
    if plan.family is not None and vllm_config.parallel_config.data_parallel_size > 1:
        return replace(plan, family=unproved(model, plan.family, "other engines of a data-parallel group would have to "
                                             "take the search's step too"))
    all_here()
    begin = time.monotonic()
    with all_together():
        family = discover(model, vllm_config) if plan.family is None else prove(model, vllm_config, plan.family)
    logger.info("vllm-tap: the search for sites took %.2f s of the start", time.monotonic() - begin)
    return replace(plan, family=family)


def plan_arming(vllm_config: Any, config: EngineConfig) -> ArmingPlan:
    """Plan what to arm, before the weights are read: that may take minutes.

    StartError where vLLM would run the model so that a rank lacks rows, has parts of them, or overwrites some, or where
    it would run another's code.
    """
    model_config = vllm_config.model_config
    names = list(model_config.architectures)
    known = is_known(names)
    if known and "transformers" in str(getattr(model_config, "model_impl", "")) and not (
            BY_TRANSFORMERS & set(names)):
        raise StartError(f"vllm-tap: model_impl='transformers': the sites of {', '.join(names)} are known in vLLM's "
                         "own code only; leave model_impl out")
    family = family_of(names, model_config.hf_text_config) if known else None
    plan = ArmingPlan(config, family, layers_by_site(config.arm),
                      {probe: load_probe(probe) for probe in config.probes})
    check_media(model_config, plan.touched, vllm_config.lora_config is not None)
    _check_parallel(plan, vllm_config)
    check_exchange(vllm_config)
    if family is None:
        _check_unknown(names, vllm_config)
    return plan


def _check_unknown(names: list[str], vllm_config: Any) -> None:
    """StartError where sites of an architecture that is not in the table cannot be found by structure."""
    start = (f"vllm-tap: {', '.join(names)} is not in the table of architectures, and its sites cannot be found by "
             "structure")
    if vllm_config.parallel_config.data_parallel_size > 1:
        raise StartError(f"{start} with data_parallel_size={vllm_config.parallel_config.data_parallel_size}; set it to "
                         "1")


def _check_parallel(plan: ArmingPlan, vllm_config: Any) -> None:
    parallel, tapped = vllm_config.parallel_config, plan.touched
    if (ranks := getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise StartError(f"vllm-tap: prefill_context_parallel_size={ranks}: each rank has only its share of a prompt's "
                         "rows; set it to 1")
    drafter = getattr(vllm_config.speculative_config, "method", None)
    if "embed" in tapped and drafter not in (None, "ngram", "ngram_gpu", "suffix"):
        raise StartError(f"vllm-tap: cannot arm embed with speculative decoding by {drafter}: the drafter may use the "
                         "same embedding module and overwrite the rows; arm resid_pre.0, which has the same rows on "
                         "most models")
    if getattr(vllm_config.cache_config, "kv_sharing_fast_prefill", False):
        raise StartError("vllm-tap: kv_sharing_fast_prefill: some layers would run only a part of a prompt, and its "
                         "rows would be stored under wrong positions; switch it off")
    if parallel.use_ubatching:
        raise StartError("vllm-tap: dual-batch overlap (enable_dbo, ubatch_size): the parts of a step would overwrite "
                         "each other's rows; switch it off")
    if parallel.tensor_parallel_size > 1:
        _check_shared(plan, parallel.tensor_parallel_size)
        if fusions.fuses(vllm_config.compilation_config.pass_config, "enable_sp", "sequence_parallel", "gemm_comms",
                         "async_tp"):
            raise StartError("vllm-tap: sequence parallelism (pass_config.enable_sp, fuse_gemm_comms): each rank has "
                             "only its share of a step's rows between two operations; switch it off")
    if parallel.pipeline_parallel_size > 1:
        _check_stages(plan, vllm_config)
    if parallel.data_parallel_size > 1 and plan.config.edit:
        raise StartError(f"vllm-tap: data_parallel_size={parallel.data_parallel_size}: an engine runs steps "
                         "without requests there, and edits are not tested in such steps; leave --edit "
                         "(VLLM_TAP_EDIT) out, or set data_parallel_size to 1")
    _check_routed(tapped, parallel)


def _check_routed(tapped: list[str], parallel: Any) -> None:
    """StartError for what routers say where theirs are not the rows of the engine's own tokens.

    With experts on several ranks and the tokens of all (expert and tensor parallelism alone) every rank's router sees
    all rows of a step, and chooses alike.
    """
    if not (routed := [site for site in tapped if SITES[site].width in ("experts", "chosen_experts")]):
        return
    if (engines := parallel.data_parallel_size) > 1:
        raise StartError(f"vllm-tap: data_parallel_size={engines}: a router sees rows of other engines too, or only a "
                         f"rank's share of them; arm other sites than {', '.join(routed)}, or set data_parallel_size "
                         "to 1")
    if getattr(parallel, "use_sequence_parallel_moe", False):
        raise StartError("vllm-tap: enable_expert_parallel with sequence parallelism: a rank's router sees only its "
                         f"share of a step's tokens; arm other sites than {', '.join(routed)}, or choose another "
                         "all2all_backend")


def _check_stages(plan: ArmingPlan, vllm_config: Any) -> None:
    """StartError for what has not been shown to be right on the stages of a pipeline."""
    parallel = vllm_config.parallel_config
    start = f"vllm-tap: pipeline_parallel_size={parallel.pipeline_parallel_size}"
    if vllm_config.speculative_config is not None:
        raise StartError(f"{start}: vLLM's runners have no drafter on stages but the last, and end; leave "
                         "speculative_config out, or run on one device")
    on_gpu = vllm_config.device_config.device_type == "cuda"
    if vllm_config.lora_config is not None and (plan.config.edit or not on_gpu):
        why = "edits beside adapters are not tested" if on_gpu else "vLLM's CPU build ends with adapters"
        raise StartError(f"{start}: {why} on the stages of a pipeline; leave enable_lora out, or run on one device")
    if parallel.data_parallel_size > 1:
        raise StartError(f"{start} with data_parallel_size={parallel.data_parallel_size}: they are not tested "
                         "together; set one of them to 1")
    kinds = list(getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ())
    if on_gpu and len(set(kinds)) > 1 and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        for stage in stages_of(vllm_config):
            here = set(kinds[stage.start : stage.stop])
            if not {_WHOLE} <= here <= {_WHOLE, _WINDOW}:
                raise StartError(f"{start}: stage {stage.number} has layers {stage.start} to {stage.stop - 1} "
                                 f"({', '.join(sorted(here))}). If a CUDA graph holds a whole step, vLLM's own answers "
                                 "are wrong at times where all layers of a stage have a window (seen with vLLM 0.26, "
                                 f"without taps too), and other kinds than {_WHOLE} and {_WINDOW} are not tested; "
                                 f"{_PIECEWISE}, or deal the layers out otherwise (VLLM_PP_LAYER_PARTITION), so that "
                                 f"each stage has one of {_WHOLE} and no other kind but {_WINDOW}")


def _check_shared(plan: ArmingPlan, ranks: int) -> None:
    """StartError where a probe, an edit or the search of a model that is not in the table needs rows of which a rank
    has a share.
    """
    needed = {loaded.about.site for loaded in plan.probes.values()} | set(layers_by_site(plan.config.edit)) | set(
        () if plan.family else plan.asked)
    if shared := [site for site in plan.touched if site in needed and site in SHARED_OUT]:
        what = "probe or edit" if plan.family else "arm"
        raise StartError(f"vllm-tap: tensor_parallel_size={ranks}: each rank has only its share of "
                         f"{', '.join(shared)}; {what} other sites, or run on one device")


def _warn(config: EngineConfig, vllm_config: Any) -> None:
    """Warn the operator who starts the engine."""
    on_gpu = vllm_config.device_config.device_type != "cpu"
    if warning := untested(_vllm_version(), on_gpu):
        logger.warning("vllm-tap: %s", warning)
    # FlashAttention 3 plans a step ahead if all layers have one window; PR 54374 of vLLM calls that plan wrong.
    if on_gpu and (window := one_window(vllm_config)) and (
            vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()):
        logger.warning("vllm-tap: all attention layers here have one window (%d). vLLM's own answers were wrong then "
                       "at times, without taps too, if a CUDA graph held a whole step (vLLM 0.26 on Hopper); %s",
                       window, _PIECEWISE)
    if config.capture_all:
        logger.warning("vllm-tap: requests without a spec of their own are captured too, with %s", config.capture_all)


def _make_scorers(probes: Mapping[Registered, LoadedProbe], staging: Staging, model: nn.Module, device: torch.device
                  ) -> None:
    """Probes on the device: the scores of each are a site of ``staging``."""
    for probe, loaded in probes.items():
        staging.probes[f"{PROBE}{probe.name}"] = made = scorer(loaded, device)
        # A deep sleep gives away what was allocated while the model was loaded, but for its buffers.
        model.register_buffer(f"vllm_tap_directions_{probe.name}", made.directions, persistent=False)
        model.register_buffer(f"vllm_tap_bias_{probe.name}", made.bias, persistent=False)
        logger.info("vllm-tap: probe %s: %d %s", probe, len(loaded.bias), loaded.about.meaning)


def _info(model: nn.Module, vllm_config: Any, armed: Armed, plan: ArmingPlan, survey: Survey) -> EngineInfo:
    """The engine's description for the writer, the same on every rank."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    probes = {f"{PROBE}{probe.name}": loaded for probe, loaded in plan.probes.items()}
    scores = {site: len(loaded.bias) for site, loaded in probes.items()}
    has = {site: survey.has[site] for site in plan.tapped}
    whole = {site: each.whole for site, each in has.items()} | scores
    layers = {**armed.sites, **{site: [loaded.about.layer] for site, loaded in probes.items()}}
    stages = stages_of(vllm_config)
    return EngineInfo(
        model=str(model_config.served_model_name or model_config.model),
        model_dtype=str(model_config.dtype).removeprefix("torch."),
        fingerprint=tensor.fingerprint(model, model_config),
        revision=str(model_config.revision or ""),
        tokenizer=str(model_config.tokenizer or ""),
        n_layers=armed.n_layers,
        armed=armed,
        widths={site: whole[site] for site in layers},
        max_model_len=model_config.max_model_len,
        vllm_version=_vllm_version(),
        tap_version=TAP_VERSION,
        runner="",  # known once a step is run
        async_scheduling=bool(vllm_config.scheduler_config.async_scheduling),
        speculative=_speculative(vllm_config.speculative_config),
        world_size=parallel.world_size,
        meaning={**{site: f"raw weights; {each.meaning}" for site, each in has.items()},
                 **{site: loaded.about.meaning for site, loaded in probes.items()}},
        sources={site: each.source for site, each in has.items()},
        proved={site: Proved(proof.identity, proof.off) for site, proof in worst(_family(plan).proofs).items()
                if site in has},
        unproved=_family(plan).unproved,
        group=tensor.group_of(vllm_config),
        instance=tensor.instance_of(vllm_config) or UNSET,
        name=plan.config.name or UNSET,
        layout=layout_of(layers, {site: each.width for site, each in has.items()} | scores, whole,
                         parallel.tensor_parallel_size, stages if len(stages) > 1 else ()),
    )


def check_ids(points: list[TapPoint], dtype: torch.dtype) -> None:
    """Ids share the staging of the model's dtype: they must be whole numbers that it holds exactly."""
    ids_max = round(2 / torch.finfo(dtype).eps)
    for point in points:
        if point.ids - 1 > ids_max:
            raise StartError(f"vllm-tap: cannot arm {point.site}: the model has ids up to {point.ids - 1}, and its "
                             f"dtype {str(dtype).removeprefix('torch.')} is exact up to {ids_max} only; leave "
                             f"{point.site} out of --arm (VLLM_TAP_ARM)")


def _speculative(config: Any) -> str:
    """Method of speculative decoding, "" where there is none."""
    return "" if config is None else f"{config.method}, {config.num_speculative_tokens} tokens"


def _tokens_max(vllm_config: Any) -> int:
    """Rows that one step may write: the scheduler's budget, or the largest captured graph."""
    sizes = getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or [0]
    return int(max(vllm_config.scheduler_config.max_num_batched_tokens, *sizes))


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
