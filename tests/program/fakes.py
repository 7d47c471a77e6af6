"""A machine without a GPU: what a capture would record is run by Python again in each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.program.batch import tensors_in


def _state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    found = [*model.parameters(), *model.buffers()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
    return found


class FakeMachine:
    """Captures a step by running it and undoing what it did, and replays it by running it.

    A real capture executes nothing and a replay runs no Python; here a replay runs the step's Python while counting is
    put back, so that what the code around it does per replay is seen.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], extra: Sequence[Tensor] = ()):
        self._model = model
        self._optimizers = optimizers
        self._extra = list(extra)
        self.num_records = self.num_replays = self.num_asides = 0
        self.places: list[str] = []
        self.wrappers: list[Any] = []
        self.units: list[Any] = []  # of sharded models
        self.refusal: Exception | None = None
        self.around_replay: Callable[[Callable[[], Any]], Any] = lambda run: run()

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.num_asides += 1
        yield

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        found: list[str] = []
        yield found
        found += self.places

    def record(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        self.num_records += 1
        if self.refusal is not None:
            raise self.refusal
        before = [(t, t.detach().clone()) for t in (*_state_of(self._model, self._optimizers), *self._extra)]
        grads = [None if p.grad is None else p.grad.detach() for p in self._model.parameters()]
        before += [(g, g.clone()) for g in grads if g is not None]
        randomness = torch.get_rng_state()
        with self._nothing_sent():
            outputs = run()
        torch.set_rng_state(randomness)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        return FakeRecording(self, run, outputs, grads), outputs

    @contextmanager
    def _nothing_sent(self) -> Iterator[None]:
        """A capture runs no collective: ranks may capture at different times."""
        reducers = [wrapper.step.reducer for wrapper in self.wrappers]
        before = [reducer.exchange for reducer in reducers]
        for reducer in reducers:
            reducer.exchange = Silent(reducer.exchange)
        units = [unit for unit in self.units if not unit.mesh.is_alone]
        comms = [(unit, unit.gather_comm, unit.scatter_comm) for unit in units]
        for unit, _, _ in comms:
            unit.gather_comm, unit.scatter_comm = SilentGather(), silent_scatter
        try:
            yield
        finally:
            for unit, gather, scatter in comms:
                unit.gather_comm, unit.scatter_comm = gather, scatter
            for reducer, exchange in zip(reducers, before, strict=True):
                reducer.exchange = exchange

    def inbox(self, tensors: Sequence[Tensor]) -> FakeInbox:
        return FakeInbox(tensors)

    def mark(self) -> FakeMark:
        return FakeMark()

    def read_later(self, counter: Tensor) -> Callable[[], int]:
        value = int(counter)
        return lambda: value


class Silent:
    """An exchange with nobody."""

    def __init__(self, exchange: Any) -> None:
        self.is_linear, self.keeps_order, self.name = exchange.is_linear, exchange.keeps_order, exchange.name
        self.scale = exchange.scale

    def start(self, bucket: Any, flat: Tensor, *, is_last: bool) -> Any:
        from lockstep.engine.flight import Landed

        return Landed()


class SilentGather:
    """An all-gather with nobody: whatever others have is taken to be what this rank has."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output: Tensor, mine: Tensor, *_: Any, **__: Any) -> None:
        output.view(-1, mine.numel()).copy_(mine)


def silent_scatter(output: Tensor, mine: Tensor, *_: Any, **__: Any) -> None:
    """A reduce-scatter with nobody."""
    output.copy_(mine[: output.numel()])


class FakeRecording:
    def __init__(self, machine: FakeMachine, run: Callable[[], Any], outputs: Any, grads: Any) -> None:
        self._machine, self._run, self._outputs = machine, run, outputs
        self._grads = grads

    def replay(self) -> None:
        self._machine.num_replays += 1
        # A replay finds gradients by their addresses, whatever Python has in .grad.
        for parameter, grad in zip(self._machine._model.parameters(), self._grads, strict=True):
            parameter.grad = None if grad is None else grad.detach()
        results = self._machine.around_replay(self._run)
        with torch.no_grad():
            for place, value in zip(tensors_in(self._outputs), tensors_in(results), strict=True):
                place.copy_(value)


class FakeInbox:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [torch.empty_like(t) for t in tensors]

    def put(self, tensors: Sequence[Tensor]) -> None:
        for mine, given in zip(self.tensors, tensors, strict=True):
            mine.copy_(given)


class FakeMark:
    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any) -> None:
        return None

    def seconds_since(self, earlier: Any) -> float:
        return 0.0


def captured_on_a_stand_in(step: Any, setup: Any) -> FakeMachine:
    """Let a step that was made with mode="captured" run as if the CPU could capture."""
    from lockstep.program.captured import Captured
    from lockstep.program.windows import WindowCounts

    machine = FakeMachine(setup.module, setup.optimizers)
    recipe = step._recipe
    machine.wrappers = recipe.parallel.wrappers
    machine.units = [unit for root in recipe.parallel.roots for unit in root.units]
    if recipe.average is not None:
        machine._extra += recipe.average.values
    if setup.scaler is not None:
        setup.scaler.scale(torch.zeros(()))
        machine._extra += [setup.scaler._scale, setup.scaler._growth_tracker]
    runner = step._runner = Captured(recipe, step._together, machine, step._record)
    machine._extra.append(runner._counter)

    def around_replay(run: Callable[[], Any]) -> Any:
        """A replay runs no Python: put back what its stand-in counts, and hold the rates as a program does."""
        counts = WindowCounts(recipe.parallel)
        with runner._rates.in_place():
            result = run()
        counts.put_back()
        return result

    machine.around_replay = around_replay
    return machine
