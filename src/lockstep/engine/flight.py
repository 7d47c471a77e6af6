"""A collective that has been started: what to wait for, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.agree.watch import Watch
from lockstep.errors import BadHookResult
from lockstep.observe.timeline import now

# Names a wait in messages; made only when there is something to say.
Moment = Callable[[], str]


class Flight(Protocol):
    landed_ns: int | None

    def is_done(self) -> bool: ...

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        """Wait; return the reduced buffer if it is another tensor than the one that was launched."""


class WorkFlight:
    """A collective of the process group, in place on the launched buffer."""

    def __init__(
        self,
        work: Any,
        blocks_host: bool,
        after: Callable[[], Tensor] | None = None,
        on_stream: Callable[[Moment], None] | None = None,
    ) -> None:
        self._work = work
        self._on_stream = on_stream  # told when a stream was let wait for it
        self._blocks_host = blocks_host
        self._after = after
        self.landed_ns: int | None = None

    def note_landing(self) -> None:
        """Take the time when the collective ends, wherever the waiting rank is then."""
        if not self._blocks_host:
            return

        def landed(_: object) -> None:
            self.landed_ns = now()

        self._work.get_future().add_done_callback(landed)

    def then(self, after: Callable[[], Tensor]) -> WorkFlight:
        """The same collective, whose result is what ``after`` makes of it."""
        self._after = after
        return self

    def future(self) -> Any:
        """torch's own handle on the collective."""
        return self._work.get_future()

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        if self._blocks_host:
            watch.wait_work(self._work, moment)
        else:
            self._work.wait()  # only makes the current stream wait
            if self._on_stream is not None:
                self._on_stream(moment)
        return self._after() if self._after is not None else None


class HookFlight:
    """What a communication hook returned: a future that holds the reduced buffer."""

    def __init__(
        self,
        future: torch.futures.Future[Any],
        hook_name: str,
        on_stream: Callable[[Moment], None] | None = None,
    ) -> None:
        self._future = future
        self._on_stream = on_stream
        self._hook_name = hook_name
        self.landed_ns: int | None = None

    def is_done(self) -> bool:
        return self._future.done()

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        value = watch.wait_future(self._future, moment)
        if self._on_stream is not None:
            self._on_stream(moment)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Tensor):
            raise BadHookResult(
                f"The communication hook {self._hook_name} returned a future that holds {type(value).__name__}; it "
                "must hold one tensor, the reduced buffer."
            )
        return value


class Landed:
    """Nothing to wait for: there was nobody to send to, or it was done when it was started."""

    landed_ns: int | None = None

    def __init__(self, result: Tensor | None = None) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def land(self, watch: Watch, moment: Moment) -> Tensor | None:
        return self._result
