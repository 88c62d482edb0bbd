"""The self-test at the end of warm-up: an engine whose taps see nothing, or something else, does not start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from engine_side.seams.compiled.routing import check_routing, padded
from engine_side.seams.media.models import embed_noise, embeds_outside
from engine_side.seams.ranks.agreement import all_together, together
from engine_side.seams.ranks.pipeline import fill
from engine_side.seams.runner import check_fills, check_wrapped, input_ids
from engine_side.seams.unchanged import check_homes
from engine_side.tap.architectures import Embedding, Sum
from engine_side.tap.staging import Staging
from engine_side.worker import Worker
from schemas.errors import StartError
from schemas.sites import SITES

logger = logging.getLogger("vllm.tap")

_ROWS: Final = 2
_ATTENDED: Final = ("q", "k", "v", "q_rot", "k_rot")  # only attention reads them
_ROUNDINGS: Final = 8  # of a sum, in units of the dtype: vLLM makes it in that, or in float32
_MIXES: Final = "conv_ssm_forward"  # vLLM's name for what a state-space mixer does between its projections
_NOISE_ROWS: Final = 64  # a graph is padded to no more
_PLAIN_STEPS: Final = 4  # show how much a step differs by itself: not all kernels are deterministic
_FAR: Final = 8  # times that: more than chance
_UNLIKE: Final = 0.5  # of a row's length: more than rounding makes, or than one expert that is chosen otherwise


def self_test(runner: Any, current: Worker) -> None:
    """Run steps of the compiled model (on CUDA: replay its graph) on poisoned staging. StartError says what is wrong,
    on every rank of the engine.

    Every armed tap must have written. The rows that enter the first block must be those of the embedding table, bit for
    bit. The stream after attention and MLP must be the sum of what went into it. All of this is checked twice: the
    first step may still record a graph, the second replays it.
    """
    with all_together():
        _test(runner, current)
    logger.info("vllm-tap: %d taps are live on %s", sum(b.shape[0] for b in current.staging.buffers.values()),
                current.info.model)


def _test(runner: Any, current: Worker) -> None:
    check_wrapped(type(runner))
    if current.editor is not None:
        check_fills(runner)
    if getattr(runner, "adaptive_verification", None) is not None:
        raise StartError("vllm-tap: adaptive verification of drafts arranges a step's rows on the GPU, so the CPU "
                         "cannot tell which row belongs to which request; switch it off in speculative_config")
    where = f"{type(runner).__module__}.{type(runner).__name__}"
    check_model(current.model, runner.get_model(), where)
    check_homes(current.checks.homes, current.model)
    for _ in range(2):
        current.staging.poison()
        _hand_on_noise(runner)
        embed_noise(runner)
        with torch.inference_mode(), _noisy_attention(current.model):
            runner._dummy_run(_ROWS)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            _check_staged(runner, current, where)
    _check_routing(runner, current)
    if current.editor is not None:
        current.editor.warm()
        check_edits(runner, current, where)


def _check_routing(runner: Any, current: Worker) -> None:
    """StartError where routers whose sites are armed are misled by the compiled model."""
    if not torch.cuda.is_initialized() or not (routers := padded(current.model)):
        return
    rows = min(_NOISE_ROWS, runner.vllm_config.scheduler_config.max_num_batched_tokens)
    armed = [site for site in current.staging.buffers if SITES[site].width in ("experts", "chosen_experts")]
    with together(), torch.inference_mode():
        check_routing(routers, lambda: runner._dummy_run(rows, **_unattended(runner)), armed)


def _hand_on_noise(runner: Any) -> None:
    """Noise in the place of what the stage before hands on: dummy steps have none of it, and all rows would be zeros.
    Some runners make room for it in their first step.
    """
    if (tensors := getattr(runner, "intermediate_tensors", None)) is not None:
        with torch.inference_mode():
            fill(tensors, torch.Generator().manual_seed(1), _NOISE_ROWS)


def _check_staged(runner: Any, current: Worker, where: str) -> None:
    """StartError where what the taps have written is not what it must be."""
    with together():
        if dead := current.staging.unwritten(_ROWS):
            raise StartError(
                f"vllm-tap: after a step of the compiled model these taps had written nothing: {', '.join(dead)}; "
                f"looked for them in {where}. Start once with VLLM_DISABLE_COMPILE_CACHE=1, because a stale compile "
                "cache can cause this. Otherwise a fused module bypasses forward; arm other sites")
    if current.checks.embedding is not None and _takes_token_ids(runner):
        with together():  # ranks look up the table's rows by turns of their own
            _check_entry(current.staging, current.checks.embedding, input_ids(runner)[:_ROWS], where)
    with together():
        check_sums(current.staging, current.checks.sums, _ROWS, where)


def check_edits(runner: Any, current: Worker, where: str) -> None:
    """StartError where rows that are set at an armed place do not change the result of the compiled model. They must
    change it by far more than it differs from step to step by itself. StartError also where the result does not return
    to what it was after the edits are removed, and where the compiler alone changes the result.
    """
    assert current.editor is not None

    def returned(attended: bool) -> torch.Tensor:
        options = _unattended(runner) if attended else {}
        with torch.inference_mode(), _noisy_attention(current.model), _heard_attention(current.model):
            return _returned(runner, options)

    _check_compiled(current.model, lambda: returned(attended=True), where)
    places, before, noise = current.editor.tables.slots, dict[bool, torch.Tensor](), dict[bool, torch.Tensor]()
    for kind in sorted({site in _ATTENDED for site, _ in places}):
        returned(kind)  # the first may still record a graph
        before[kind], *others = (returned(kind) for _ in range(_PLAIN_STEPS))
        noise[kind] = torch.stack([_distance(before[kind], other) for other in others]).amax(dim=0)
    for place in places:
        kind = place[0] in _ATTENDED
        with current.editor.setting(place, _ROWS):
            moved = _distance(returned(kind), before[kind])
        with together():
            _check_moved(place, moved, noise[kind], where)
    for kind, rows in before.items():
        left = _distance(returned(kind), rows)
        by_chance = _ROUNDINGS * torch.finfo(rows.dtype).eps * rows.float().norm(dim=-1)  # of a kernel, and rarely
        with together():
            if bool((left > torch.maximum(_FAR * noise[kind].nan_to_num(), by_chance.nan_to_num())).any()):
                raise StartError("vllm-tap: after its edits were removed the compiled model does not return the same "
                                 f"rows as before them; looked at it in {where}. Leave --edit (VLLM_TAP_EDIT) out, and "
                                 "report it")
    logger.info("vllm-tap: edits act at %d places", len(current.editor.tables.slots))


def _check_compiled(model: torch.nn.Module, returned: Callable[[], torch.Tensor], where: str) -> None:
    """StartError where the compiled model, with places to edit in it, returns other rows than line by line."""
    parts = [module for module in model.modules() if getattr(module, "do_not_compile", True) is False]
    if not parts:
        return
    rows = returned().float()
    for part in parts:
        part.do_not_compile = True
    try:
        right = returned().float()
    finally:
        for part in parts:
            part.do_not_compile = False
    off = _distance(rows, right) / right.norm(dim=-1)
    with together():
        if bool((right.isfinite().all(dim=-1) & (off > _UNLIKE)).any()):
            raise StartError("vllm-tap: with edits armed the compiled model returns other rows than the same model "
                             f"without the compiler; they differ by {float(off.nan_to_num().max()):.1e} of their norm; "
                             f"looked at it in {where}. Start once with VLLM_DISABLE_COMPILE_CACHE=1, because a stale "
                             "compile cache can cause this. Otherwise arm fewer places (VLLM_TAP_EDIT), or start with "
                             "--enforce-eager")


def _returned(runner: Any, options: dict[str, Any]) -> torch.Tensor:
    """Rows that a dummy step returns or hands on to the next stage. One runner does not return the rows that it hands
    on.
    """
    handed_on = []

    def told(execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def execute(*args: Any, **kwargs: Any) -> Any:
            handed_on.append(execute_model(*args, **kwargs))
            return handed_on[-1]

        return execute

    with _around([runner] if hasattr(runner, "input_buffers") else [], "execute_model", told):
        returned: Any = runner._dummy_run(_ROWS, **options)[0]
    returned = handed_on[-1] if returned is None else returned
    parts = getattr(returned, "tensors", {"": returned}).values()
    return torch.cat([part[:_ROWS] for part in parts], dim=-1)


def _check_moved(place: tuple[str, int], moved: torch.Tensor, noise: torch.Tensor, where: str) -> None:
    """StartError where rows that an edit of a place ``moved`` so far do not show that it acts."""
    if (unproved := _unproved(moved, noise)):
        raise StartError(
            f"vllm-tap: cannot prove that edits of {_named(place)} act: after a step of the compiled model "
            f"{unproved}; looked at it in {where}. Possible causes are weights that are NaN or infinite, a dtype that "
            "overflows, or a kernel that does not write all of its output; leave "
            f"{_named(place)} out of --edit (VLLM_TAP_EDIT)")
    if bool((moved == 0).any()):
        raise StartError(
            f"vllm-tap: edits of {_named(place)} do not act: a step of the compiled model with other rows there "
            f"returned the same as without; looked at it in {where}. Start once with VLLM_DISABLE_COMPILE_CACHE=1, "
            "because a stale compile cache can cause this. Otherwise a fused module bypasses forward; leave "
            f"{_named(place)} out of --edit (VLLM_TAP_EDIT)")


def _distance(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Distance by row [rows]. It is 0 where all numbers are the same, NaN where both rows are NaN or infinite, and
    infinite where one of them is.
    """
    one, other = rows.float(), others.float()
    numbers = one.isfinite().all(dim=-1), other.isfinite().all(dim=-1)
    apart = (one - other).norm(dim=-1)
    apart = torch.where(numbers[0] & numbers[1], apart, torch.inf)
    return torch.where(numbers[0] | numbers[1], apart, torch.nan)


def _unproved(moved: torch.Tensor, noise: torch.Tensor) -> str:
    """The reason why moved rows prove nothing about an edit, "" if they prove that it acts. ``noise``: distance of rows
    between two steps without an edit.
    """
    if bool((moved.isnan() | noise.isinf()).any()):
        return "rows are NaN or infinite"
    if bool(((noise > 0) & (moved <= _FAR * noise)).any()):
        return (f"rows moved by {float(moved.min()):.1e} with edits of it, and by {float(noise.max()):.1e} from one "
                "step to the next without")
    return ""


def _unattended(runner: Any) -> dict[str, Any]:
    """Arguments of a runner for a dummy step of the compiled model that replays no graph and attends to nothing. In a
    graph the kernels attend to an empty cache, whatever they are given.
    """
    if hasattr(runner, "input_buffers"):
        return {"skip_attn": True, "is_profile": True}
    from vllm.config import CUDAGraphMode

    return {"cudagraph_runtime_mode": CUDAGraphMode.NONE}


@contextmanager
def _noisy_attention(model: torch.nn.Module) -> Iterator[None]:
    """Attention outputs on a CPU begin as noise, and those of state-space mixers on any device. A dummy step has
    nothing to attend to. On a CPU vLLM then hands on the memory as it finds it, often with NaN, so the sums could not
    be checked. (On a GPU it hands on zeros.) The noise has a generator of its own, so that vLLM's random samples stay
    the same.
    """
    generator = torch.Generator().manual_seed(0)

    def beginning_as_noise(forward: Callable[..., Any]) -> Callable[..., Any]:
        def attend(*args: Any, output: torch.Tensor | None = None, **options: Any) -> Any:
            if output is not None and output.device.type == "cpu":
                output.copy_(torch.randn(output.shape, generator=generator))
            return forward(*args, output=output, **options)

        return attend

    def mixed_of_noise(forward: Callable[..., None]) -> Callable[..., None]:
        def mix(*args: Any, output: torch.Tensor, **options: Any) -> None:
            output.copy_(torch.randn(output.shape, generator=generator))
            forward(*args, output=output, **options)

        return mix

    mixers = [module for module in model.modules() if hasattr(module, _MIXES)]
    with _attending(model, beginning_as_noise), _around(mixers, _MIXES, mixed_of_noise):
        yield


@contextmanager
def _heard_attention(model: torch.nn.Module) -> Iterator[None]:
    """Attention outputs of a step that attends to nothing tell what queries, keys and values it was given."""
    def told(forward: Callable[..., Any]) -> Callable[..., Any]:
        def attend(layer: Any, *args: Any, output: torch.Tensor | None = None, **options: Any) -> Any:
            result = forward(layer, *args, output=output, **options)
            if output is not None and len(args) > 4 and args[4] is None:  # query, key, value, cache, what to attend to
                shares = getattr(layer, "kv_sharing_target_layer_name", None) is not None
                for given in args[: 1 if shares else 3]:
                    if given is not None:
                        rows = given.reshape(given.shape[0], -1).float()
                        heard = (rows * torch.linspace(0.1, 1, rows.shape[1], device=rows.device)).mean(dim=1)
                        output.add_(heard.tanh().view(-1, *[1] * (output.dim() - 1))[: output.shape[0]])
            return result

        return attend

    with _attending(model, told):
        yield


@contextmanager
def _attending(model: torch.nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Attention kernels with something around their forward."""
    found = (getattr(module, "impl", None) for module in model.modules())
    kernels: list[Any] = list({id(kernel): kernel for kernel in found if hasattr(kernel, "forward")}.values())
    with _around(kernels, "forward", around):
        yield


@contextmanager
def _around(owners: list[Any], name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method of each owner with something around it."""
    before = [(owner, vars(owner).get(name)) for owner in owners]
    for owner in owners:
        setattr(owner, name, around(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, own in before:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def check_model(tapped: torch.nn.Module, running: torch.nn.Module, where: str) -> None:
    """StartError where the model that runs neither is the tapped one nor wraps it: a drafter may have been tapped."""
    if all(module is not tapped for module in running.modules()):
        raise StartError(f"vllm-tap: the taps are in a {type(tapped).__name__}, and {where} runs a "
                         f"{type(running).__name__}, which does not contain it, so captured rows would not be those of "
                         "the requests; report it with the command line")


def _check_entry(staging: Staging, entry: Embedding, ids: torch.Tensor, where: str) -> None:
    # Copies, because the embedding itself may be tapped: looking rows up below writes them again.
    staged = {site: staging.buffers[site][staging.index(site, 0), : len(ids)].clone() for site in entry.sites}
    rows = entry.embedding(ids)
    if wrong := [site for site, found in staged.items() if not torch.equal(found, rows.reshape(found.shape))]:
        raise StartError(
            f"vllm-tap: after a step of the compiled model the rows of {', '.join(f'{site}.0' for site in wrong)} are "
            f"not the rows of the embedding table for the tokens {ids.tolist()} of that step; looked at "
            f"{entry.path} in {where}. If the model changes its embeddings before the first block, it needs its own "
            "entry in engine_side/tap/architectures.py. Otherwise this vLLM computes rows elsewhere; report it")


def check_sums(staging: Staging, sums: Sequence[Sum], rows: int, where: str) -> None:
    """StartError where rows are not the sum that they must be. On a GPU a dummy step's attention leaves zeros, so only
    what the MLP adds is checked there. Rows that are NaN or infinite (random weights in float16) show nothing.
    """
    def staged(place: tuple[str, int]) -> torch.Tensor:
        site, layer = place
        return staging.buffers[site][staging.index(site, layer), :rows].float()

    for each in sums:
        total, terms = staged(each.total), [staged(term) for term in each.terms]
        length = sum((term.norm(dim=-1) for term in terms), total.norm(dim=-1))
        error = (total - sum(terms)).norm(dim=-1)
        allowed = _ROUNDINGS * torch.finfo(staging.buffers[each.total[0]].dtype).eps * length
        if bool((length.isfinite() & (error > allowed)).any()):
            off = float((error / length).nan_to_num().max())
            raise StartError(
                f"vllm-tap: after a step of the compiled model {_named(each.total)} is not "
                f"{' + '.join(map(_named, each.terms))}: the rows are off by {off:.1e} of their norm; looked "
                f"at them in {where}. One of these sites has another meaning on this model: its configuration has "
                "a switch that engine_side/tap/switches.py does not know, or this vLLM computes it differently; arm "
                "other sites, and report it")


def _named(place: tuple[str, int]) -> str:
    return f"{place[0]}.{place[1]}"


def _takes_token_ids(runner: Any) -> bool:
    """Whether dummy steps run on token ids through the plain embedding table: what rows can be held against."""
    model = runner.model_config
    return not (getattr(model, "enable_prompt_embeds", False) or embeds_outside(model)
                or getattr(runner, "lora_config", None) is not None)
