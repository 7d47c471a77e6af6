"""The compiler's collectives: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep import torch_private as private
from lockstep.torch_private import meetings

pytestmark = pytest.mark.usefixtures("world_of_one")


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put everything back that a stand-in replaces."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook
    from torch._dynamo import config, convert_frame, eval_frame
    from torch._dynamo.output_graph import OutputGraph

    def run_compiler_collective(self: Any) -> None:
        assert self.root_tx.distributed_state is None  # or dynamo would run its own

    monkeypatch.setattr(OutputGraph, "run_compiler_collective", run_compiler_collective)
    monkeypatch.setattr(convert_frame, "get_compile_pg", convert_frame.get_compile_pg)
    monkeypatch.setattr(eval_frame, "guard_collectives_hook", lambda result: result)
    torch._dynamo.reset()
    with config.patch(enable_compiler_collectives=False):
        yield
    set_guard_complete_hook(None)
    torch._dynamo.reset()


def test_stand_in_for_compiler_collectives() -> None:
    from torch._dynamo import config

    asked: list[Any] = []

    def gather(frame: str, mine: Any) -> list[Any]:
        other = {name: {**entry, "size": [9, *entry["size"][1:]]} for name, entry in mine.items()}
        asked.append((frame, mine))
        return [mine, other]

    private.stand_in_for_compiler_collectives(gather)
    config.enable_compiler_collectives = True
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    for rows in (4, 5, 6):  # another rank has 9 rows, so they are dynamic from the first graph on
        compiled(torch.ones(rows, 3))
    ((frame, mine),) = asked
    assert frame.startswith("<lambda> (test_meetings.py:")
    assert [entry["size"] for entry in mine.values()] == [[4, 3]]


def test_compiler_collectives_off() -> None:
    from torch._dynamo import config

    config.enable_compiler_collectives = True
    private.compiler_collectives_off()
    assert not config.enable_compiler_collectives


def test_stand_in_for_guard_collectives() -> None:
    torch.compiler.set_enable_guard_collectives(True)
    asked: list[bool] = []

    def agree(mine: bool) -> bool:
        asked.append(mine)
        return mine

    private.stand_in_for_guard_collectives(agree)  # the setting is on already
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    for rows in (4, 4, 5):
        compiled(torch.ones(rows, 3))
    assert asked == [True, False]


def test_guard_collectives_off() -> None:
    torch.compiler.set_enable_guard_collectives(True)
    private.guard_collectives_off()
    assert not torch.compiler.set_enable_guard_collectives(False)


def test_states_travel_as_plain_data() -> None:
    from torch._dynamo.pgo import FrameStateSizeEntry, InferStride, auto_dynamic, auto_unset
    from torch._dynamo.symbolic_convert import LocalState

    state = LocalState(
        {
            "x": FrameStateSizeEntry(auto_unset, (4, auto_dynamic), (InferStride(1), 1)),
            "n": FrameStateSizeEntry(3, auto_unset, auto_dynamic),
        }
    )
    assert meetings._heard(meetings._told(state)) == state
