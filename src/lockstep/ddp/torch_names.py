"""Names that people and libraries reach for inside torch's DistributedDataParallel, each forwarded to who does the job.

Scripts, trainers and torch's own algorithms call these; most begin with an underscore in torch too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lockstep import torch_private
from lockstep.ddp import parameter_names
from lockstep.ddp.comm_hooks import builtin_comm_hook, check_comm_hook
from lockstep.ddp.logbook import throw

if TYPE_CHECKING:
    from lockstep.ddp import DistributedDataParallel
    from lockstep.ddp.options import Options
    from lockstep.ddp.parts import Parts
    from lockstep.ddp.peers import Peers
    from lockstep.ddp.setup import Wrapped


def _alias(path: str) -> Any:
    """Make a property that is ``self.<path>``, for reading and writing."""
    *owner, name = path.split(".")

    def read(self: Any) -> Any:
        return getattr(reduce(getattr, owner, self), name)

    def write(self: Any, value: Any) -> None:
        setattr(reduce(getattr, owner, self), name, value)

    return property(read, write)


def _computed(read: Callable[[Any], Any]) -> Any:
    """Make a property that only reads."""
    return property(read)


class TorchNames:
    """Aliases, mixed into the wrapper: nothing happens here."""

    module: Any
    logger: Any
    use_side_stream_for_tensor_copies: bool
    _options: Options
    _peers: Peers
    _wrapped: Wrapped
    _parts: Parts

    step = _alias("_parts.step")
    reducer = _alias("_parts.reducer")
    timeline = _alias("_parts.step.reducer.timeline")

    # ---------------------------------------------------------------- as the wrapper was made

    parameters_to_ignore = _alias("_wrapped.ignored")
    _module_parameters = _alias("_wrapped.parameters")
    process_group = _alias("_peers.group")
    device = _alias("_wrapped.placement.device")
    device_type = _alias("_wrapped.placement.device_type")
    device_ids = _alias("_wrapped.placement.device_ids")
    output_device = _alias("_wrapped.placement.output_device")
    is_multi_device_module = _alias("_wrapped.placement.is_multi_device")
    dim = _alias("_options.dim")
    check = _alias("_options.check")
    bucket_order = _alias("_options.bucket_order")
    mixed_precision = _alias("_options.mixed_precision")
    batched_grad_copy = _alias("_options.batched_grad_copy")  # a bucket is always packed by one kernel here
    lazy_bucket_allocation = _alias("_options.lazy_bucket_allocation")
    skip_all_reduce_unused_params = _alias("_parts.step.skips_unused_buckets")
    find_unused_parameters = _alias("_parts.step.finds_unused")
    static_graph = _alias("_parts.step.static.is_on")
    overlap = _alias("_parts.compilation.overlap")
    bucket_bytes_cap = _alias("_wrapped.caps.cap_bytes")
    broadcast_bucket_size = _alias("_parts.buffers.chunk_bytes")
    _graphs = _alias("_parts.keeper.graphs")
    _has_rebuilt_buckets = _alias("_parts.keeper.is_confirmed")

    gradient_as_bucket_view = _computed(lambda self: bool(self._options.gradient_as_bucket_view))
    bucket_bytes_cap_list = _computed(lambda self: list(self._wrapped.caps.per_bucket_bytes))
    bucket_bytes_cap_default = _computed(lambda self: self._wrapped.caps.first_cap_bytes < self.bucket_bytes_cap)
    _delay_all_reduce_all_params = _computed(lambda self: not self.step.reducer.slots)

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self._peers.group)

    # ---------------------------------------------------------------- inputs and outputs

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        device = torch.device(self._wrapped.placement.device_type, device_id)
        return torch_private.inputs_to_device(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        return cls._active_ddp_module  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- buffers

    forward_sync_buffers = broadcast_buffers = _alias("_parts.buffers.syncs_in_forward")
    require_forward_param_sync = _alias("_parts.buffers.is_due")
    buffer_hook = _alias("_parts.buffers.hook")
    named_module_buffers = _alias("_parts.buffers.named")

    modules_buffers = _alias("_parts.buffers.all")

    def will_sync_module_buffers(self) -> bool:
        return self._parts.buffers.will_sync

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = torch_private.BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise the buffers, before or after the forward.

        Futures it returns are waited for at the end of the backward.
        """
        self._parts.buffers.use_hook(state, hook, comm_hook_location)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self._parts.buffers.will_sync_before

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._parts.buffers.will_sync_after

    def _assign_modules_buffers(self) -> None:
        self._parts.buffers.find()

    def _sync_buffers(self) -> None:
        self._parts.buffers.sync(self._parts.uneven.buffer_source())

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        self._parts.buffers.exchange(authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        self._parts.buffers.broadcast(bufs, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        self._parts.buffers.broadcast(tensors, buffer_size, authoritative_rank)

    # ---------------------------------------------------------------- join

    _join_config = _alias("_parts.uneven._join_config")
    _authoritative_rank = _alias("_parts.uneven.authoritative_rank")
    _divide_by_initial_world_size = _alias("_parts.uneven._divide_by_initial_world_size")

    def join_hook(self, **kwargs: Any) -> Any:
        return self._parts.uneven.join_hook(**kwargs)

    @property
    def join_device(self) -> torch.device:
        return self._parts.uneven.join_device

    @property
    def join_process_group(self) -> Any:
        return self._parts.uneven.join_process_group

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        return self._parts.uneven.find_common_rank(input_rank, rank_cond)

    # ---------------------------------------------------------------- the end of a backward by hand

    @property
    def _require_manual_backward_finalization(self) -> bool:
        return self._parts.finalization.required

    def _check_manual_backward_finalization_supported(self) -> None:
        self._parts.finalization.require_supported()

    # ---------------------------------------------------------------- hooks

    def _check_comm_hook(self, hook: Any) -> None:
        check_comm_hook(hook, self.logger)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = str(comm_hook_type)
        self.step.reducer.set_comm_hook(self._peers.group, builtin_comm_hook(comm_hook_type), name)
        self.logger.values["comm_hook"] = name

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step ``optim`` for each bucket as soon as it is reduced."""
        overlapped = torch_private.as_overlapped_optimizer(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP.") from error

    # ---------------------------------------------------------------- logging and errors

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        throw(self.logger, err_type, err_msg)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return dict(self.logger.values)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self._parts.log.set_sample_rate(sample_rate)

    # ---------------------------------------------------------------- parameters and life cycle

    def _remove_autograd_hooks(self) -> None:
        self._parts.hooks.detach()

    def _check_reducer_finalized(self) -> None:
        self.step.require_finished()

    def _set_sparse_metadata(self, global_unique_ids: dict[str, Tensor]) -> None:
        """Which rows of each sparse parameter any rank will touch: they then travel as one dense block."""
        parameter_names.check_sparse(self.step.reducer.slots, global_unique_ids)
        self.step.reducer.mean.sparse_rows = dict(global_unique_ids)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Kept for callers: outputs are watched by hooks here and never cloned."""
        self._ddp_sink_clone = val

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Name parameters and buffers that stay local.  Call it before wrapping."""
        parameter_names.ignore(module, params_and_buffers_to_ignore)

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        return parameter_names.data_parallel(module, named=named_params)

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from m.parameters(recurse=recurse)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        self._parts.buffers.find()
        return parameter_names.trained(self.module, self.parameters_to_ignore)

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[nn.Parameter]) -> dict[int, str]:
        return parameter_names.by_position(self.module, self.parameters_to_ignore, parameters, self.logger)
