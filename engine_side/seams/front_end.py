"""The front end: specs are checked where a request enters, and ends are seen as the client sees them.

``InputProcessor.process_inputs`` serves ``vllm serve`` and ``LLM`` alike. A bad spec raises ValueError there, which the
server answers with 400. A stop string looks like an abort inside the engine, so the front end reports its own end.

The server's request classes are wrapped too. Beam search would lose a spec, so it is refused with one. The ids of the
server's completions end in the number of their prompt, so these requests are marked. An id of the same form that a
caller of ``AsyncLLM`` made up has no such number.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from enum import Enum
from types import NoneType
from typing import Any, Final

import msgspec

from engine_side.config import EngineConfig, from_environment
from engine_side.front import admission
from engine_side.front.edit_admission import Admitted, Arming
from engine_side.front.rows_in_use import OF_ENGINE
from engine_side.front.ticket import COUNT_KEY, EDIT_KEY, KEY, LISTED_KEY, find
from engine_side.seams.media.prompts import image_positions, resend
from engine_side.seams.patching import wrap_when_imported
from engine_side.seams.ranks.pipeline import stages_of
from engine_side.tap.architectures import SHARED_OUT, lens_names
from engine_side.tap.shares import layout_of
from engine_side.tap.stages import Stage
from schemas.edits.arms import Arms
from schemas.edits.vectors import load_vector
from schemas.errors import EditError, SpecError, StartError
from schemas.probes import load_probe
from schemas.sites import SITES, has_heads, layers_by_site
from schemas.spec import armed_at

logger = logging.getLogger("vllm.tap")

_FIXED: Final = (str, int, float, bool, NoneType)
_CONTAINERS: Final = (list, set, dict)
_COMPLETION = re.compile(r"cmpl-.+-([0-9]+)", re.ASCII)


def connect() -> None:
    """Install the wrappers."""
    wrap_when_imported("vllm.entrypoints.openai.completion.protocol", {
        "CompletionRequest.to_beam_search_params": _to_beam_search_params,
        "CompletionRequest.to_sampling_params": _to_sampling_params,
    })
    wrap_when_imported("vllm.entrypoints.openai.chat_completion.protocol", {
        "ChatCompletionRequest.to_beam_search_params": _to_beam_search_params,
    })
    wrap_when_imported("vllm.v1.engine.input_processor", {
        "InputProcessor.__init__": _init,
        "InputProcessor.process_inputs": _process_inputs,
    })
    wrap_when_imported("vllm.v1.engine.output_processor", {
        "RequestState.from_new_request": _from_new_request,
        "RequestState._new_completion_output": _new_completion_output,
        "RequestState.make_request_output": _make_request_output,
    })


def _init(original: Callable[..., None]) -> Callable[..., None]:
    """Read what the engine has armed when its front end is made: one front end serves one engine."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.vllm_tap = from_environment()
        if self.vllm_tap is not None:
            self.vllm_tap_shape = _shape(self.vllm_config.model_config, self.vllm_tap,
                                         self.vllm_config.parallel_config.tensor_parallel_size,
                                         stages_of(self.vllm_config))
            OF_ENGINE.limit = self.vllm_tap.edit_rows
            self.vllm_tap_edits = Arming(_arms(self.vllm_config, self.vllm_tap, self.vllm_tap_shape))
            if self.vllm_tap.capture_all:
                _check_capture_all(self.vllm_tap.capture_all, self.vllm_tap_shape)
            admission.use(self.vllm_tap.endpoint, self.vllm_tap.curve)

    return init


def _shape(model: Any, config: EngineConfig, ranks: int = 1, stages: Sequence[Stage] = ()) -> admission.Shape:
    """The armed sites of a model, with their widths as far as its configuration states them, and what each rank sends
    of them: ``ranks`` of each of the ``stages``.
    """
    head, known = model.get_head_size(), widths_of(model)
    widths = {site: known.get(site) for site in layers_by_site(config.arm)}
    probes = {probe.name: load_probe(probe).about for probe in config.probes}
    armed = armed_at(config.arm, model.get_total_num_hidden_layers(), head, probes, lens_names(model.architectures))
    sure = {site: width for site, width in widths.items() if isinstance(width, int) and width > 0}
    # As if a head, or a rank's share of the MLP, were one number: for what is asked here widths do not matter.
    whole = {site: 1 if site not in SHARED_OUT else model.get_total_num_kv_heads()
             if SITES[site].width == "kv_heads" else ranks for site in armed.sites}
    shares = {site: max(1, width // ranks) for site, width in whole.items()}
    return admission.Shape(armed, sure, layout_of(armed.sites, shares, whole, ranks, stages))


def widths_of(model: Any) -> dict[str, Any]:
    """The widths that the model's own configuration states. The widths of experts differ too much to be read from it.
    """
    text, head = model.hf_text_config, model.get_head_size()
    if getattr(text, "v_head_dim", None) not in (None, head):  # heads of values are others, or all are compressed
        head = 0
    dense = not any("expert" in name and not name.startswith("_") for name in vars(text))
    known = {"hidden": model.get_hidden_size(), "q_heads": getattr(text, "num_attention_heads", 0) * head,
             "kv_heads": model.get_total_num_kv_heads() * head,
             "mlp": getattr(text, "intermediate_size", None) if dense else None}
    widths = {site: known.get(about.width) for site, about in SITES.items()}
    # Some are projected to the hidden size.
    return widths | {"embed": getattr(text, "word_embed_proj_dim", None) or known["hidden"]}


def _arms(vllm_config: Any, config: EngineConfig, shape: admission.Shape) -> Arms:
    """The places that requests may edit. A site whose width is not known is left to the worker, which refuses the
    start.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    n_layers, known = model.get_total_num_hidden_layers(), widths_of(model)
    without_when = ("a condition cannot be had with speculative decoding: which rows of a step stand is known after it"
                    if vllm_config.speculative_config is not None else "a condition cannot be had with data "
                    "parallelism: an engine's dummy steps write over what it asks" if parallel.data_parallel_size > 1
                    else "a condition cannot be had with pipeline parallelism: the stage that has a probe's rows does "
                    "not say what is sampled, nor edit the others' layers" if parallel.pipeline_parallel_size > 1
                    else _without_stops(vllm_config.scheduler_config.get_scheduler_cls()))
    layers = {site: list(range(n_layers)) if chosen is None else chosen
              for site, chosen in layers_by_site(config.edit).items()}
    return Arms(layers, {site: known[site] for site in layers if known[site]}, n_layers, config.edit_depth,
                {vector.name: load_vector(vector) for vector in config.vectors}, dict(shape.armed.names),
                config.edit_rows, model.max_model_len,
                {site: model.get_head_size() for site in layers if has_heads(site)},
                {name: probe.names for name, probe in shape.armed.probes.items()}, without_when)


def _without_stops(scheduler: type[Any]) -> str:
    """Why a scheduler may not be told that a probe has ended a request; empty for those of vLLM's own."""
    own = next((base for base in scheduler.__mro__ if not base.__module__.startswith("vllm.")
                and {"update_from_output", "_update_request_with_output"} & vars(base).keys()), None)
    return "" if own is None else (f"a condition cannot be had with the scheduler {own.__module__}.{own.__qualname__}, "
                                   "which takes what steps return in a way of its own: leave scheduler_cls out")


def _check_capture_all(spec: str, shape: admission.Shape) -> None:
    """Refuse such a spec now rather than at the first request."""
    try:
        admission.resolve_spec(spec, shape)
    except SpecError as error:
        raise StartError(f"vllm-tap: VLLM_ACT_CAPTURE=1: this model cannot capture every request as asked: {error}"
                         ) from None


def _process_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_inputs(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        # What is done here stands between a batch's requests, of those without a spec as well.
        extra = getattr(params, "extra_args", None) or {}
        try:
            if EDIT_KEY in extra:
                return edited(self, extra, request_id, prompt, params, *args, **kwargs)
            return plain(self, extra, request_id, prompt, params, *args, **kwargs)
        except SpecError as error:
            resend(self, prompt)
            raise _client_error(error) from None

    def plain(self: Any, extra: dict[str, Any], request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
              ) -> Any:
        if not _is_captured(self, extra, params, bool(kwargs.get("resumable"))):
            return original(self, request_id, prompt, params, *args, **kwargs)
        return ticketed(self, extra, request_id, prompt, params, *args, **kwargs)

    def edited(self: Any, extra: dict[str, Any], request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
               ) -> Any:
        """The request with its edits, and with a salt: no other request reads what it leaves in the prefix cache."""
        edits = _admit_edits(self, extra[EDIT_KEY], params, bool(kwargs.get("resumable")))
        rest = {key: value for key, value in extra.items() if key != EDIT_KEY}
        if edits is not None:  # what is changed has a manifest, though nothing be captured
            rest.setdefault(KEY, self.vllm_tap.capture_all or {"sites": []})
        request = plain(self, rest, request_id, prompt, _without_spec(params, rest), *args, **kwargs)
        if edits is None:
            return request
        _hand_on(request, edits)
        return request

    def ticketed(self: Any, extra: dict[str, Any], request_id: str, prompt: Any, params: Any, *args: Any,
                 **kwargs: Any) -> Any:
        own = KEY in extra
        if (text := _admitted(self, extra, request_id, params)) is None:
            return original(self, request_id, prompt, params, *args, **kwargs)
        rest = {key: value for key, value in extra.items() if key not in (KEY, COUNT_KEY, LISTED_KEY)}
        request = None
        try:
            request = original(self, request_id, prompt, _without_spec(params, rest), *args, **kwargs)
            images = _images(request)
        except BaseException as error:
            admission.forget(text)
            if own or request is None or not isinstance(error, SpecError):
                raise
            admission.count_uncaptured(error.reason)
            return request
        if (adapter := getattr(request, "lora_request", None)) is not None:
            text = admission.with_told(text, adapter=str(adapter.lora_name))
        if images:
            text = admission.with_images(text, images)
        request.sampling_params.extra_args = {**(request.sampling_params.extra_args or {}), KEY: text}
        return request

    return process_inputs


def _admitted(processor: Any, extra: dict[str, Any], request_id: str, params: Any) -> str | None:
    """The ticket of a request by its own spec, or by everybody's: None where it cannot have that one, which is counted.

    SpecError where its own cannot be had.
    """
    # Without a spec there is no id that the prompts of a list could share, and no such mark.
    listed = _COMPLETION.fullmatch(request_id) if LISTED_KEY in extra else None
    try:
        return admission.admit(extra.get(KEY, processor.vllm_tap.capture_all), extra.get(COUNT_KEY), n=params.n,
                               prompt_number=int(listed[1]) if listed else 0, shape=processor.vllm_tap_shape)
    except SpecError as error:
        if KEY in extra:
            raise
        admission.count_uncaptured(error.reason)
        return None


def _images(request: Any) -> list[tuple[int, int]]:
    """Positions of a prompt that images fill; SpecError where it cannot be captured."""
    if request.prompt_token_ids is None:
        raise SpecError("", "…", "a prompt of embeddings has no token ids, and rows need them; send text or token ids")
    return image_positions(request.mm_features or ())


def _hand_on(request: Any, edits: Admitted) -> None:
    """Give a request its edits, and a salt of theirs; EditError where there is no room for them."""
    held = request.sampling_params.extra_args
    try:
        salt = edits.salt(len(request.prompt_token_ids))
        OF_ENGINE.check(edits.rows_kept, request.sampling_params.n)
    except EditError:
        admission.forget(held[KEY])
        raise
    request.cache_salt = f"{request.cache_salt or ''}|vllm-tap-edit:{salt}"
    ticket = admission.with_told(held[KEY], edits=edits.told, rows=edits.rows_kept)
    request.sampling_params.extra_args = {**held, KEY: ticket, EDIT_KEY: edits.text}


def _admit_edits(processor: Any, value: object, params: Any, in_pieces: bool) -> Admitted | None:
    """A caller's edits, held against the engine; None where it asks for none. SpecError where they cannot be made."""
    if getattr(processor, "vllm_tap", None) is None:
        raise EditError("", value, "this engine was started without taps; start it with VLLM_TAP_ENDPOINT and "
                                   "VLLM_TAP_EDIT set")
    if not hasattr(params, "n"):
        raise EditError("", value, "a request for a pooled vector cannot be edited; leave the edits out")
    if in_pieces:
        raise EditError("", value, "a streamed prompt cannot be edited; send it whole")
    arming: Arming = processor.vllm_tap_edits
    return arming.admit(value)


def _without_spec(params: Any, rest: dict[str, Any]) -> Any:
    """Parameters with the ``rest`` of their extra arguments, of which vLLM takes a copy.

    vLLM copies them deeply unless they are marked as this request's own. That is a third of all its work for a request,
    and more where there is a spec. So they are made the request's own here, where they hold only numbers, texts and
    containers of them.
    """
    own = copy.copy(params)
    own.extra_args = rest or None
    if rest or params.__dict__ or getattr(params, "skip_clone", True):
        return own
    for name, value in zip(params.__struct_fields__, msgspec.structs.astuple(own), strict=True):
        if type(value) in _CONTAINERS and _is_flat(value):
            setattr(own, name, value.copy())
        elif type(value) not in _FIXED and not isinstance(value, Enum):
            return own
    own.__post_init__()  # as a deep copy does: what was assigned since they were made is checked, and seen to
    own.skip_clone = True
    return own


def _is_flat(value: Any) -> bool:
    parts = [*value, *value.values()] if type(value) is dict else value
    return all(type(part) in _FIXED for part in parts)


def _client_error(error: SpecError) -> SpecError:
    """Make a refused spec an error of the client: newer vLLM servers know that only of errors of their own class."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return error
    kind: type[SpecError] = type(type(error).__name__, (type(error), VLLMClientError), {})
    return kind(error.field, error.value, error.reason)


def _is_captured(processor: Any, extra: dict[str, Any], params: Any, in_pieces: bool) -> bool:
    """Whether a request is captured, by a spec of its own or by the one for every request; SpecError where its own
    cannot be fulfilled.
    """
    # One that was made before anything of ours was installed knows nothing of it.
    config = getattr(processor, "vllm_tap", None)
    if KEY not in extra:
        admission.check_names(extra)
        if config is None or not config.capture_all:
            return False
        lack = ("it asks for a pooled vector, and has no samples" if not hasattr(params, "n") else
                "its prompt is streamed in parts" if in_pieces else "")
        if lack:
            admission.count_uncaptured(lack)
        return not lack
    if config is None:
        raise SpecError("", extra[KEY], "this engine was started without taps; create it inside "
                                        "vllm_tap.recording(), or start it with VLLM_TAP_ENDPOINT set")
    admission.check_in_use(config.endpoint)
    if in_pieces:  # where it ends is not known when rows are chosen
        raise SpecError("", extra[KEY], "a streamed prompt cannot be captured; send it whole")
    admission.check_edit_names(extra)
    return True


def _to_beam_search_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_beam_search_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        extra = getattr(self, "vllm_xargs", None) or {}
        for key, error in ((KEY, SpecError), (EDIT_KEY, EditError)):
            if key in extra:
                raise error("", extra[key], "beam search cannot be captured or edited, because vLLM makes its own "
                                            "requests for it; leave use_beam_search out")
        return original(self, *args, **kwargs)

    return to_beam_search_params


def _to_sampling_params(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        params = original(self, *args, **kwargs)
        if params.extra_args and KEY in params.extra_args:
            params.extra_args = {**params.extra_args, LISTED_KEY: True}
        return params

    return to_sampling_params


def _from_new_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_new_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(cls, *args, **kwargs)
        request = kwargs.get("request") or next((arg for arg in args if hasattr(arg, "sampling_params")), None)
        ticket = find(getattr(request, "sampling_params", None))
        if ticket is not None:
            state.vllm_tap_capture = ticket.capture_of(state.request_id)
            if ticket.rows:
                OF_ENGINE.hold(state, ticket.rows)
            state.vllm_tap_captures = [ticket.capture(sample) for sample in range(ticket.n)]
        return state

    return from_new_request


def _new_completion_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_completion_output(self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any, *args: Any,
                              **kwargs: Any) -> Any:
        output = original(self, token_ids, finish_reason, stop_reason, *args, **kwargs)
        capture = getattr(self, "vllm_tap_capture", None)
        if finish_reason is not None and capture is not None:
            try:
                admission.report_finish(capture, str(finish_reason), stop_reason,
                                    list(self.detokenizer.output_token_ids))
            except Exception:
                logger.exception("vllm-tap: the client's view of the end of %s was not stored", capture)
        return output

    return new_completion_output


def _make_request_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the ids of the request's captures to the output that a caller of ``LLM`` gets."""

    def make_request_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        captures = getattr(self, "vllm_tap_captures", None)
        if output is not None and captures:
            reference = {"captures": captures}
            try:
                output.metrics.activation_manifest = reference
            except AttributeError:  # no metrics are kept, or they take no more names
                output.activation_manifest = reference
        return output

    return make_request_output
