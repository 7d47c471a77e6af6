"""The order of gathers and scatters in a compiled step: begun one ahead, waited for where needed, and never many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from lockstep import fully_shard
from multirank.harness import lockstep_only, run_ranks

pytestmark = lockstep_only
NUM_BLOCKS = 4


class Link:
    """Gathers or scatters of one unit, written down as they begin and are waited for."""

    def __init__(self, log: list[tuple[str, str]], what: str, name: str) -> None:
        self._log, self._what, self._name = log, what, name

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: torch.Tensor, mine: torch.Tensor, group: Any, *_: Any, **__: Any) -> Any:
        self._log.append((f"{self._what} begins", self._name))
        if self._what == "gather":
            work = dist.all_gather_into_tensor(output, mine, group=group, async_op=True)
        else:
            work = dist.reduce_scatter_tensor(output, mine, group=group, async_op=True)
        return _Noted(work, self._log, (f"{self._what} is there", self._name))


class _Noted:
    def __init__(self, work: Any, log: list[tuple[str, str]], entry: tuple[str, str]) -> None:
        self._work, self._log, self._entry = work, log, entry

    def wait(self, *args: Any) -> Any:
        self._log.append(self._entry)
        return self._work.wait(*args)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(NUM_BLOCKS)))


def logged_step(backend: str, max_inputs: int) -> list[tuple[str, str]]:
    """What the second step of a compiled model did, unit by unit."""
    torch._dynamo.reset()
    log: list[tuple[str, str]] = []
    module = built()
    for number, block in enumerate(module):
        sharded: Any = fully_shard(block)
        sharded.set_custom_all_gather(Link(log, "gather", str(number)))
        sharded.set_custom_reduce_scatter(Link(log, "scatter", str(number)))
    whole: Any = fully_shard(module)
    whole.set_reduce_scatter_max_input_buffers(max_inputs)
    model = torch.compile(module, backend=backend, fullgraph=True)
    plain = built()
    for step in range(2):
        log.clear()
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
    return log


def most_at_once(log: list[tuple[str, str]], what: str) -> int:
    most = now = 0
    for event, _ in log:
        now += (event == f"{what} begins") - (event == f"{what} is there")
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("backend", "max_inputs"),
    [("aot_eager", 1), ("aot_eager", 2), ("inductor", 1), pytest.param("inductor", 2, marks=pytest.mark.soak)],
)
def test_the_next_unit_travels_while_this_one_computes(backend: str, max_inputs: int) -> None:
    for log in run_ranks(2, logged_step, backend, max_inputs, limit_s=300):
        gathers = [entry for entry in log if entry[0].startswith("gather")]
        order = [str(n) for n in range(NUM_BLOCKS)]
        forward = [("gather begins", "0")]
        for this, following in zip(order, [*order[1:], None], strict=True):
            forward += [("gather begins", following)] if following is not None else []
            forward += [("gather is there", this)]
        assert gathers[: len(forward)] == forward
        # The backward may keep the unit that ran last; the others come in reverse, again one ahead.
        backward = gathers[len(forward) :]
        begun = [name for event, name in backward if event == "gather begins"]
        assert begun == sorted(begun, reverse=True)
        assert set(begun) >= set(order[1:-1])
        for name in begun[1:]:
            before = begun[begun.index(name) - 1]
            assert backward.index(("gather begins", name)) < backward.index(("gather is there", before))
        assert most_at_once(gathers, "gather") == 2
        scatters = [entry for entry in log if entry[0].startswith("scatter")]
        assert [name for event, name in scatters if event == "scatter begins"] == order[::-1]
        assert most_at_once(scatters, "scatter") == max_inputs
        # A scatter is not waited for as soon as it has begun: what comes before it in the model is gathered meanwhile.
        first_wait = log.index(("scatter is there", order[-1]))
        assert log.index(("scatter begins", order[-2])) > log.index(("scatter begins", order[-1]))
        assert first_wait > log.index(("gather is there", order[-2]))
