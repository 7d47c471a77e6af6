"""Parameters that bring their own all-gather: tensors with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

    pre   makes of a shard what is to travel (float8 data and a scale, say), and a note for the other end
    post  makes the whole parameter of what came from all ranks; from the second time on, in the one it made first

What all such parameters of a unit send travels as bytes in one buffer.  The tensors that ``post`` is given are the same
objects each time, since the parameter may lie in them; their memory comes and goes, and that of what ``post`` says is
to be freed with the parameter.  The shards stay as they are: they may be of a class that knows more than their numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from lockstep import torch_private
from lockstep.engine.flight import Flight, Moment
from lockstep.engine.transport import Transport
from lockstep.shard.deliveries import Deliveries
from lockstep.shard.layout import contiguous, flat_layouts
from lockstep.shard.parameter import ShardedParameter


class _Travelling:
    """One parameter: what it sent the last time, and the tensors that everyone's parts are put together in."""

    def __init__(self, parameter: ShardedParameter) -> None:
        self.parameter = parameter
        self.note: Any = None
        self.shapes: list[tuple[int, ...]] = []
        self.outputs: list[Tensor] = []
        self.sizes: dict[Tensor, int] = {}  # of all whose memory comes and goes, in bytes

    def inputs(self, device: torch.device, policy: Any) -> list[Tensor]:
        """What this rank sends."""
        parameter = self.parameter
        local = parameter.local
        if local.device != device:
            local = local.to(device, non_blocking=True)
        pre = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        num_arguments = len(inspect.signature(pre).parameters)
        if num_arguments not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather of {parameter.name}: it takes {num_arguments} arguments; expected (mesh) "
                "or (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        arguments: tuple[Any, ...] = (parameter.mesh.shard_mesh,)
        if num_arguments == 5:
            size = torch.Size(parameter.sharded.shape)
            arguments += (size, contiguous(tuple(size)), parameter.owners[0][0](), policy)
        sent, self.note = pre(*arguments)
        sent = [sent] if isinstance(sent, Tensor) else list(sent)
        if num_arguments == 5:
            self._require_padded(local, sent)
        self.shapes = [tuple(tensor.shape) for tensor in sent]
        return sent

    def _require_padded(self, local: Tensor, sent: Sequence[Tensor]) -> None:
        parameter = self.parameter
        padded = list(parameter.shape)
        padded[parameter.dim] = -(-padded[parameter.dim] // parameter.mesh.world)
        if list(local.shape) != padded and any(list(tensor.shape) != padded for tensor in sent):
            raise AssertionError(
                f"Parameter {parameter.name} of shape {parameter.shape} is unevenly sharded over "
                f"{parameter.mesh.world} ranks, so fsdp_pre_all_gather must return tensors of the padded size "
                f"{tuple(padded)}, but got {[tuple(tensor.shape) for tensor in sent]}"
            )

    def put_together(self, parts: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Make the whole parameter of everyone's parts, or fill the one that is there."""
        parameter = self.parameter
        post = parameter.local.fsdp_post_all_gather  # type: ignore[attr-defined]
        is_first = parameter.full is None
        if is_first:
            self.outputs = [part.clone() for part in parts]
        else:
            for tensor, num_bytes in self.sizes.items():
                tensor.untyped_storage().resize_(num_bytes)
            with torch_private.preserve_version_counter(self.outputs):
                for output, part in zip(self.outputs, parts, strict=True):
                    output.copy_(part)
        arrived = tuple(self._laid_out(*each) for each in zip(self.outputs, self.shapes, strict=True))
        if parameter.full is not None:
            with torch_private.preserve_version_counter([parameter.full]):
                post(arrived, self.note, dtype, out=parameter.full)
            return
        whole, inner = post(arrived, self.note, dtype)
        whole = torch.as_strided(whole, parameter.shape, contiguous(parameter.shape), 0)
        parameter.take_full(whole)
        self.sizes = {tensor: tensor.untyped_storage().nbytes() for tensor in (*self.outputs, *inner)}

    def _laid_out(self, output: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Everyone's parts, one behind the other; without what pads the last ones."""
        whole, parameter = output.view(-1, *shape[1:]), self.parameter
        num_rows = parameter.shape[0]
        is_padded = shape == (-(-num_rows // parameter.mesh.world), *parameter.shape[1:])
        return whole[:num_rows] if is_padded and parameter.dim == 0 else whole

    def free(self) -> None:
        for tensor in self.sizes:
            tensor.untyped_storage().resize_(0)


class OwnStore:
    """Parameters of one dtype of a unit that have their own all-gather, on this rank."""

    home: Tensor | None = None  # there is no buffer of all shards

    def __init__(self, parameters: Sequence[ShardedParameter], device: torch.device, policy: Any) -> None:
        self.parameters = list(parameters)
        self.device = device
        self._policy = policy
        self._travelling = [_Travelling(parameter) for parameter in parameters]
        mesh = parameters[0].mesh
        self.rank, self.world = mesh.rank, mesh.world
        self.name_anew()
        self._parts: list[tuple[_Travelling, list[Tensor]]] | None = None
        self._gathered: Tensor | None = None
        self._flight: Flight | None = None
        self.deliveries = Deliveries()  # none: it is in no graph

    @property
    def is_laid_out_for_them(self) -> bool:
        """Whether these are still parameters for this kind of store."""
        dtypes = {str(p.sharded.dtype).removeprefix("torch.") for p in self.parameters}
        return dtypes == {self.layout.dtype} and all(p.gathers_itself for p in self.parameters)

    def name_anew(self) -> None:
        """Take up the names that parameters have from the root."""
        (self.layout,) = flat_layouts([p.spec for p in self.parameters], self.world)

    def settle(self) -> None:
        """Nothing: shards stay where they are."""

    def follow(self) -> None:
        """Nothing, as above."""

    def forget_accumulator(self) -> None:
        """Nothing: no graph holds such a unit."""

    @property
    def versions(self) -> list[int]:
        """Changes whenever a shard is written to."""
        return [p.sharded._version + p.local._version for p in self.parameters]

    def make_whole(self, transport: Transport, moment: Moment) -> None:
        """Make the whole parameters, which takes a first gathering: only they know what they will be."""
        if any(p.full is None for p in self.parameters):
            self.start(transport, None, "first gather")
            self.finish(transport, moment)
            self.free()

    def start(self, transport: Transport, comm: Any, name: str) -> None:
        """Start gathering; a program's own all-gather is for plain tensors, and not asked."""
        with torch.no_grad():
            self._parts = [(each, each.inputs(self.device, self._policy)) for each in self._travelling]
            mine = torch.cat([_as_bytes(tensor) for _, sent in self._parts for tensor in sent])
            self._gathered = mine.new_empty(self.world * mine.numel())
            if self.world == 1:
                self._gathered.copy_(mine)
            else:
                self._flight = transport.start_all_gather(self._gathered, mine, name)

    def take_part(self, transport: Transport, comm: Any, name: str) -> Flight:
        """Start a gather whose result nobody wants here: others have started it (level.py)."""
        with torch.no_grad():
            sent = [_as_bytes(tensor) for each in self._travelling for tensor in each.inputs(self.device, self._policy)]
            mine = torch.cat(sent)
            return transport.start_all_gather(mine.new_empty(self.world * mine.numel()), mine, name)

    def finish(self, transport: Transport, moment: Moment) -> None:
        """Wait for what was started; the whole parameters have their values then."""
        if self._flight is not None:
            self._flight.land(transport.watch, moment)
            self._flight = None
        parts, gathered = self._parts, self._gathered
        if parts is None or gathered is None:
            return
        self._parts = self._gathered = None
        by_rank, offset = gathered.view(self.world, -1), 0
        with torch.inference_mode(False), torch.no_grad():  # whole parameters outlive an evaluation
            for each, sent in parts:
                arrived = []
                for tensor in sent:
                    size = prod(tensor.shape) * tensor.element_size()
                    # A copy, which begins where its dtype may begin.
                    arrived.append(by_rank[:, offset : offset + size].clone().view(-1).view(tensor.dtype))
                    offset += size
                each.put_together(arrived, self._policy.param_dtype or each.parameter.sharded.dtype)

    def free(self) -> None:
        """Give the memory of the whole back."""
        for each in self._travelling:
            each.free()

    # ---------------------------------------------------------------- where fewer ranks keep the whole: these do not

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the whole parameters, which are freed."""
        return any(tensor is parameter.full for parameter in self.parameters)

    def share_among(self, num_keepers: int) -> None:
        """Nothing: after a forward they are gathered from all ranks again."""

    def keep_part(self, number: int) -> None:
        """Nothing, as above."""

    def forget_part(self) -> None:
        """Nothing, as above."""

    has_part = False

    def start_among_keepers(self, transport: Transport, name: str) -> None:
        """Nothing, as above."""

    def take_part_among_keepers(self, transport: Transport, name: str) -> Flight:
        """As above: never asked for."""
        raise AssertionError("no part is kept of parameters with their own all-gather")


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
