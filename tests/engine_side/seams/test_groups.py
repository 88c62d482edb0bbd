"""Engines of several ranks and of data-parallel groups: their names to the writer, and what they must be able to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_side.config import DRAWN, GROUP
from engine_side.seams.ranks.data import check_exchange
from engine_side.seams.ranks.tensor import group_of
from schemas.errors import StartError
from schemas.wire.layout import siblings


def named(instance: str = "ab1", **parallel: int) -> str:
    """The group of a rank whose vLLM has this configuration."""
    config: Any = SimpleNamespace(instance_id=instance, parallel_config=SimpleNamespace(**{
        "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1, "data_parallel_rank": 0,
        **parallel}))
    return group_of(config)


def test_data_parallel_engines_have_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model without mixtures are told that they are alone, and that each is the first."""
    monkeypatch.setenv(GROUP, f"{DRAWN}01A")
    mixtures = [named(data_parallel_size=2, data_parallel_rank=rank, data_parallel_index=rank) for rank in (0, 1)]
    others = [named(data_parallel_index=rank) for rank in (0, 1)]
    before = [named(data_parallel_size=2, data_parallel_rank=rank) for rank in (0, 1)]  # a vLLM without that number
    assert mixtures == others == before == ["01A-ab1-0", "01A-ab1-1"]
    assert len({siblings(group) for group in others}) == 1
    assert len({named(instance, data_parallel_index=0) for instance in ("ab1", "cd2")}) == 2
    assert siblings(named("ab1", data_parallel_index=0)) != siblings(named("cd2", data_parallel_index=0))


def test_ranks_of_several_hosts_are_one_engine_where_they_were_given_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host's vLLM draws an instance of its own; Ray's data-parallel engines put their number behind it."""
    monkeypatch.setenv(GROUP, "mine")
    assert named("1795599793947099912") == named("1795599793998279068") == "mine-0"
    monkeypatch.setenv(GROUP, f"{DRAWN}01A")
    ray = [named(f"ab1_dp{rank}", data_parallel_index=rank) for rank in (0, 1)]
    assert ray == ["01A-ab1-0", "01A-ab1-1"]


def test_an_engine_of_one_rank_has_no_group_and_ranks_that_nobody_named_are_refused(monkeypatch: pytest.MonkeyPatch
                                                                                     ) -> None:
    monkeypatch.delenv(GROUP, raising=False)
    assert named(tensor_parallel_size=1, data_parallel_index=1) == ""
    with pytest.raises(StartError, match=f"{GROUP} is not set .*; set it to the same text for all ranks of an engine"):
        named()


def test_engines_of_experts_that_cannot_exchange_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, as long as this vLLM's communicator there lacks it."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def start(engines: int = 2, experts: bool = True, device: str = "cpu") -> None:
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=engines),
                                      model_config=SimpleNamespace(is_moe=experts),
                                      device_config=SimpleNamespace(device_type=device))
        check_exchange(config)

    monkeypatch.setattr(CpuCommunicator, "all_gatherv", DeviceCommunicatorBase.all_gatherv)
    with pytest.raises(StartError, match=r"data_parallel_size=2: on a CPU .* set data_parallel_size to 1"):
        start()
    start(engines=1)
    start(experts=False)
    start(device="cuda")
    monkeypatch.setattr(CpuCommunicator, "all_gatherv", lambda *_: None)
    start()
