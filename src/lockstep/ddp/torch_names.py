"""Names that people and libraries reach for inside torch's DistributedDataParallel, each doing its job here.

Scripts, trainers and torch's own algorithms call these; most begin with an underscore in torch too.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from lockstep import torch_private
from lockstep.ddp import setup
from lockstep.engine.grad_bucket import GradBucket
from lockstep.engine.module_state import broadcast_tensors
from lockstep.state_dict import rename_keys

if TYPE_CHECKING:
    from lockstep.ddp import DistributedDataParallel


@dataclass
class BufferHook:
    """A hook that synchronises buffers in place of the broadcast."""

    hook: Callable[..., Any]
    state: Any
    location: Any


class TorchNames:
    """Mixed into the wrapper; ``self`` is a DistributedDataParallel throughout."""

    # ---------------------------------------------------------------- inputs and outputs

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)  # type: ignore[attr-defined]

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: Any) -> Any:
        ddp: Any = self
        device = torch.device(ddp.device_type, device_id)
        return torch_private.inputs_to_device(inputs, kwargs, device, ddp.use_side_stream_for_tensor_copies)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)  # type: ignore[attr-defined]

    # ---------------------------------------------------------------- which wrapper is running

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        return cls._active_ddp_module  # type: ignore[attr-defined]

    @contextmanager
    @torch_private.frame_without_compiler
    def _inside_ddp_forward(self) -> Iterator[None]:
        owner: Any = _wrapper_class(type(self))
        before = owner._active_ddp_module
        owner._active_ddp_module = torch_private.TorchDDP._active_ddp_module = self
        try:
            yield
        finally:
            owner._active_ddp_module = torch_private.TorchDDP._active_ddp_module = before

    # ---------------------------------------------------------------- static graph

    def _set_static_graph(self) -> None:
        ddp: Any = self
        if ddp.static_graph:
            warnings.warn("static_graph is already set; there is no need to set it again.", stacklevel=2)
            return
        if ddp.step.num_windows or ddp.step.state.value != "idle":
            ddp._log_and_throw(
                RuntimeError,
                "_set_static_graph should be called before training loop starts, that is before the first backward.",
            )
        ddp.static_graph = True
        ddp.step.static.is_on = True
        ddp.logger.values["static_graph"] = 1
        if ddp.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True is not needed with static_graph=True: the first iteration shows which "
                "parameters are unused. Make sure that this set does not change during training.",
                stacklevel=2,
            )

    # ---------------------------------------------------------------- buffers

    @property
    def broadcast_buffers(self) -> bool:
        return self.forward_sync_buffers  # type: ignore[attr-defined, has-type]

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        ddp: Any = self
        return ddp.require_forward_param_sync and ddp.forward_sync_buffers and len(ddp.modules_buffers) > 0

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: Any = torch_private.BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise the buffers, before or after the forward.

        Futures it returns are waited for at the end of the backward.
        """
        if not callable(hook):
            raise TypeError(f"A buffer communication hook must be callable, got {type(hook).__name__}.")
        self.buffer_hook = BufferHook(hook, state, comm_hook_location)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_location() != "POST_FORWARD"

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_location() == "POST_FORWARD"

    def _buffer_hook_location(self) -> str:
        hook = getattr(self, "buffer_hook", None)
        return "PRE_FORWARD" if hook is None else hook.location.name

    def _assign_modules_buffers(self) -> None:
        """Look the buffers up anew: modules may replace theirs at any time."""
        ddp: Any = self
        self.named_module_buffers = {
            name: buffer for name, buffer in ddp.module.named_buffers() if name not in ddp.parameters_to_ignore
        }
        self.modules_buffers = list(self.named_module_buffers.values())

    def _sync_buffers(self) -> None:
        ddp: Any = self
        with torch.no_grad():
            source = 0
            if ddp._join_config.enable:  # rank 0 may have run out of data and hold stale buffers
                source = self._find_common_rank(self._distributed_rank, True)
            self._assign_modules_buffers()
            with torch_private.preserve_version_counter(self.modules_buffers):
                self._sync_module_buffers(source)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        ddp: Any = self
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = hook.hook(hook.state, self.named_module_buffers)
        if futures is not None:
            ddp.step.add_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        ddp: Any = self
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            ddp.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(self, tensors: Any, buffer_size: int, authoritative_rank: int = 0) -> None:
        ddp: Any = self
        broadcast_tensors(tensors, ddp.process_group, authoritative_rank, buffer_size, ddp._watch)

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The highest rank for which ``rank_cond`` holds."""
        ddp: Any = self
        rank = torch.tensor([input_rank if rank_cond else -1], device=ddp.device)
        transport = ddp.step.reducer.transport
        transport.land(transport.start_max(rank), "the search for a rank that has data")
        found = int(rank.item())
        assert found >= 0, "no rank met the condition"
        return found

    # ---------------------------------------------------------------- hooks

    def _check_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        try:
            signature = inspect.signature(hook, eval_str=True)
        except Exception:  # an annotation that cannot be resolved from here
            signature = inspect.signature(hook)
        names = list(signature.parameters)
        if len(names) < 2:
            self._log_and_throw(
                TypeError, f"A communication hook takes (state, bucket); {hook!r} takes {tuple(names)}."
            )
        bucket = signature.parameters.get("bucket", signature.parameters[names[1]])
        if bucket.annotation not in (inspect.Parameter.empty, Any, GradBucket, torch_private.GradBucket):
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        returns = signature.return_annotation
        if returns not in (inspect.Signature.empty, Any, torch.futures.Future, torch.futures.Future[Tensor]):
            self._log_and_throw(
                ValueError,
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
            )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        ddp: Any = self
        builtin: dict[Any, Any] = {
            torch_private.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            torch_private.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in builtin:
            raise ValueError(f"Unknown built-in hook {comm_hook_type!r}; known: {[str(k) for k in builtin]}.")
        ddp.step.reducer.set_comm_hook(ddp.process_group, builtin[comm_hook_type], str(comm_hook_type))
        ddp.logger.values["comm_hook"] = str(comm_hook_type)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step ``optim`` for each bucket as soon as it is reduced."""
        overlapped = torch_private.as_overlapped_optimizer(optim, optim_params, *args, **kwargs)
        try:
            overlapped.register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP.") from error

    # ---------------------------------------------------------------- logging and errors

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> None:
        self.logger.set_error_and_log(f"{err_type}: {err_msg}")  # type: ignore[attr-defined]
        raise err_type(err_msg)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return dict(self.logger.values)  # type: ignore[attr-defined]

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1, got " + str(sample_rate),
            )
        self.logger.sample_rate = sample_rate  # type: ignore[attr-defined]

    def _log_construction(self) -> None:
        ddp: Any = self
        plan = ddp.reducer.plan
        sizes = ", ".join(str(bucket.num_bytes) for bucket in plan)
        ddp.logger.set_construction(
            {
                "module_name": type(ddp.module).__name__,
                "world_size": ddp.process_group.size(),
                "rank": ddp.process_group.rank(),
                "device_ids": "" if ddp.device_ids is None else ", ".join(map(str, ddp.device_ids)),
                "output_device": -1 if ddp.output_device is None else ddp.output_device,
                "broadcast_buffers": ddp.forward_sync_buffers,
                "has_sync_bn": ddp._has_sync_batch_norm(),
                "bucket_cap_bytes": ddp.bucket_bytes_cap,
                "bucket_sizes": sizes,
                "find_unused_parameters": ddp.find_unused_parameters,
                "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
                "is_multi_device_module": ddp.is_multi_device_module,
                "num_parameter_tensors": len(plan.parameters),
                "total_parameter_size_bytes": plan.num_bytes,
                "plan_digest": plan.digest,
            },
            [spec.dtype for spec in plan.parameters],
            dist.get_backend(ddp.process_group),
        )

    def _runtime_facts(self) -> dict[str, str | int]:
        ddp: Any = self
        reducer, step = ddp.step.reducer, ddp.step
        by_name = {slot.name: slot.position for slot in reducer.slots}
        unused = [slot for slot in reducer.slots if slot.found_unused]
        is_final = not ddp.find_unused_parameters or ddp.static_graph
        return {
            # The layout is fixed before the first backward; torch's users read here whether it may still change.
            "has_rebuilt_buckets": int(is_final),
            "rebuilt_bucket_sizes": ", ".join(str(bucket.num_bytes) for bucket in reducer.plan),
            "rebuilt_per_bucket_param_indices": ", ".join(
                " ".join(str(by_name[name]) for name in bucket.names) for bucket in reducer.plan
            ),
            "num_buckets_reduced": reducer.num_buckets_reduced,
            "unused_parameter_size": sum(slot.num_elements * slot.parameter.element_size() for slot in unused),
            "prev_iteration_grad_ready_order_indices": ", ".join(str(slot.position) for slot in step.ready_order),
            "can_set_static_graph": int(not step.unused_changed),
        }

    # ---------------------------------------------------------------- life cycle

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)  # type: ignore[attr-defined]

    def _remove_autograd_hooks(self) -> None:
        self._hooks.detach()  # type: ignore[attr-defined]

    def _check_reducer_finalized(self) -> None:
        self.step.require_finished()  # type: ignore[attr-defined]

    def _set_sparse_metadata(self, global_unique_ids: dict[str, Tensor]) -> None:
        """Which rows of each sparse parameter any rank will touch: they then travel as one dense block."""
        ddp: Any = self
        known = {slot.name for slot in ddp.reducer.slots if slot.bucket.spec.sparse}
        for name in global_unique_ids:
            if name not in known:
                raise ValueError(f"{name!r} is not a parameter with sparse gradients; these are: {sorted(known)}.")
        ddp.step.reducer.mean.sparse_rows = dict(global_unique_ids)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Kept for callers: outputs are watched by hooks here and never cloned."""
        self._ddp_sink_clone = val

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with another group (a changed world); the window in progress is forgotten."""
        ddp: Any = self
        ddp.step.reset()
        ddp._has_rebuilt_buckets = False
        if not torch_private.rank_not_in_group(new_process_group):
            ddp.process_group = new_process_group
            ddp._reopen_board()
            ddp._use_group()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Name parameters and buffers that stay local.  Call it before wrapping."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        ignored = set(params_and_buffers_to_ignore)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in ignored:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _get_parameters(self, m: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from m.parameters(recurse=recurse)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        ddp: Any = self
        slots = setup.trainable_slots(ddp.module, ddp.parameters_to_ignore)
        sparse = setup.sparse_parameter_names(ddp.module)
        self._assign_modules_buffers()
        return [slot.parameter for slot in slots], [slot.name in sparse for slot in slots]

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        ddp: Any = self
        positions = {id(p): i for i, p in enumerate(parameters)}
        names: dict[int, str] = {}
        for slot in setup.trainable_slots(ddp.module, ddp.parameters_to_ignore):
            if id(slot.parameter) not in positions:
                self._log_and_throw(
                    ValueError,
                    f"Param with name {slot.name} is trained by the module but not in the given list.",
                )
            names[positions[id(slot.parameter)]] = slot.name
        if len(names) != len(parameters):
            self._log_and_throw(
                ValueError,
                f"Expected param to name mapping to cover {len(parameters)} parameters, but only {len(names)} of them "
                "belong to the module.",
            )
        return names

    # ---------------------------------------------------------------- state and pickling

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        rename_keys(state_dict, prefix, set(self.module.state_dict(prefix=f"{prefix}module.")))  # type: ignore[attr-defined]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]

    def _check_default_group(self) -> None:
        try:
            is_default = self.process_group == torch_private.default_group()  # type: ignore[attr-defined]
        except (RuntimeError, ValueError):
            is_default = False
        if not is_default:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group.",
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for live in (
            "process_group",
            "reducer",
            "step",
            "_hooks",
            "_graphs",
            "logger",
            "timeline",
            "_board",
            "_watch",
            "_dist_autograd",
            "_precision",
            "_delayed",
            "device_mesh",
            "_region",
        ):
            state.pop(live, None)
        state["_saved_plan"] = self.plan.to_json()  # type: ignore[attr-defined]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        ddp: Any = self
        saved_plan = state.pop("_saved_plan")
        super().__setstate__(state)  # type: ignore[misc]
        ddp.process_group = torch_private.default_group()
        ddp._resume(saved_plan)


def _wrapper_class(kind: type) -> type:
    """The class in the hierarchy that holds ``_active_ddp_module``, which compilers ask by name."""
    return next(base for base in kind.__mro__ if "_active_ddp_module" in base.__dict__)
