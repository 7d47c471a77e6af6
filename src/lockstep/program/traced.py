"""The whole step as one function of tensors: what is traced, and then compiled as one program.

Parameters, buffers, the state of optimizers, averages and accumulated gradients go in and are changed in place; so do
the scale of a gradient scaler and its count.  Learning rates go in, and settings of optimizers that keep changing.
What comes out is what the loss function returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.engine.bucket import local_part
from lockstep.graph.compare import place_of
from lockstep.program.batch import Batch, map_tensors, tensors_in
from lockstep.program.deliver import Delivery
from lockstep.program.held import InPlaceOf, Likenesses
from lockstep.program.places import operator_shown
from lockstep.program.recipe import Recipe, loss_of
from lockstep.program.shard_trace import ShardTrace
from lockstep.program.shards import Shards
from lockstep.program.untraceable import Untraceable


class StateIsMissing(Exception):
    """An optimizer has not made its state yet: a scaler has skipped every step so far."""


@dataclass
class Inputs:
    """Everything that a program of the whole step reads or changes, in one order."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    batch: list[Tensor]
    state: list[Tensor]
    rates: list[Tensor]
    averages: list[Tensor]
    gradients: list[Tensor]  # added up over the micro-batches
    scale: list[Tensor]

    def flat(self) -> list[Tensor]:
        return [tensor for part in vars(self).values() for tensor in part]

    def split(self, flat: Sequence[Tensor]) -> Inputs:
        """The same parts, of other tensors."""
        following = iter(flat)
        return Inputs(*([next(following) for _ in part] for part in vars(self).values()))


class _Holder(nn.Module):
    """The model with its loss, so that one call can be given other parameters."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.model = recipe.options.model
        self._loss = recipe.options.loss

    def forward(self, batch: Any, backward: Any) -> Any:
        """Run the backward too: what it computes again (a checkpoint) is of the same parameters."""
        return backward(self._loss(self.model, batch))


class WholeStep:
    """One kind of micro-step of one recipe, as a function of tensors."""

    def __init__(
        self, recipe: Recipe, batch: Batch, delivery: Delivery | Shards | None, index: int, is_last: bool
    ) -> None:
        self._recipe = recipe
        self._options = recipe.options
        self._batch = batch
        self._delivery = delivery if isinstance(delivery, Delivery) else None
        self._trace = ShardTrace(delivery) if isinstance(delivery, Shards) else None
        self._is_first, self._is_last = index == 0, is_last
        self._names = {id(p): name for name, p in recipe.options.model.named_parameters()}
        self._require_known(recipe)
        self._buffers = dict(recipe.options.model.named_buffers())
        # Where in the state of which optimizer each tensor belongs.
        self._state = [
            (optimizer, parameter, name)
            for optimizer in recipe.options.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        self.results: Any = None  # what the loss function returned, with places for the tensors
        self.has_norm = False

    def _require_known(self, recipe: Recipe) -> None:
        """A parameter that is not the model's, or that came to it since, would be a constant."""
        given = set(map(id, recipe.parameters))
        if not given <= self._names.keys():
            raise Untraceable("an optimizer holds a parameter that is not, or no longer, the model's")
        for key, name in self._names.items():
            if key not in given:
                raise Untraceable(f"{name} came to the model after the step was made, and no optimizer has it")

    def inputs(self, batch: Sequence[Tensor], rates: Sequence[Tensor], gradients: Sequence[Tensor]) -> Inputs:
        """The tensors as they are now."""
        options, average = self._options, self._recipe.average
        return Inputs(
            parameters=[local_part(p).detach() for p in self._recipe.parameters],
            buffers=list(self._buffers.values()),
            batch=list(batch),
            state=[local_part(optimizer.state[parameter][name]) for optimizer, parameter, name in self._state],
            rates=list(rates) if self._is_last else [],
            averages=list(map(local_part, average.values)) if average is not None and self._is_last else [],
            gradients=list(gradients),
            scale=list(torch_private.scaler_tensors(options.scaler)) if options.scales else [],
        )

    def named(self, inputs: Inputs) -> dict[str, Tensor]:
        """What of the inputs is there before a step and after it, with names for people."""
        names = [self._names[id(p)] for p in self._recipe.parameters]
        found = dict(zip(names, inputs.parameters, strict=True)) | self._buffers
        found |= {
            f"{name} (of the optimizer, for {self._names[id(parameter)]})": tensor
            for (_, parameter, name), tensor in zip(self._state, inputs.state, strict=True)
        }
        return found | {f"the average of {number}": tensor for number, tensor in enumerate(inputs.averages)}

    def examples(self, inputs: Inputs) -> Inputs:
        """The inputs to trace and compile for; see shards.py, [Note: shards that share memory]."""
        if self._trace is None:
            return inputs
        return replace(inputs, parameters=[torch.empty_like(tensor) for tensor in inputs.parameters])

    # ---------------------------------------------------------------- the step

    def function(self, like: Inputs) -> Any:
        """What is traced: takes the flat inputs."""

        def run(*flat: Tensor) -> list[Tensor]:
            given = like.split(flat)
            result, gradients = self._forward_backward(given)
            outputs = [t.detach() for t in tensors_in(result)]
            self.results = map_tensors(result, lambda _: torch.empty(0, device="meta"))
            gradients = self._accumulated(given, gradients)
            if self._is_last:
                norm = self._update(given, gradients)
                self.has_norm = norm is not None
                outputs += [norm] if norm is not None else []
            if self._trace is not None:
                self._trace.use({})  # forget what it has made
            return outputs

        return run

    def _forward_backward(self, given: Inputs) -> tuple[Any, dict[int, Tensor]]:
        originals = self._recipe.parameters
        if self._trace is not None:
            self._trace.use(dict(zip(map(id, originals), given.parameters, strict=True)))
            return self._forward_backward_of_shards(given, self._trace)
        leaves = [t.detach().requires_grad_(p.requires_grad) for t, p in zip(given.parameters, originals, strict=True)]
        named = {f"model.{self._names[id(p)]}": leaf for p, leaf in zip(originals, leaves, strict=True)}
        named |= {f"model.{name}": tensor for name, tensor in zip(self._buffers, given.buffers, strict=True)}
        trained = [(p, leaf) for p, leaf in zip(originals, leaves, strict=True) if leaf.requires_grad]

        def backward(result: Any) -> tuple[Any, Any]:
            share = self._share(result, given)
            return result, torch.autograd.grad(share, [leaf for _, leaf in trained], allow_unused=True)

        with torch.enable_grad(), _plain_forwards(self._recipe):
            result, found = self._run(given, named, backward)
        if any(leaf.grad is not None for leaf in leaves):
            raise Untraceable("the loss function runs a backward of its own, which adds to .grad")
        gradients = {id(p): g.detach() for (p, _), g in zip(trained, found, strict=True) if g is not None}
        if self._delivery is not None or self._options.accumulate > 1:
            self._require_all(gradients)
        return result, gradients

    def _forward_backward_of_shards(self, given: Inputs, trace: ShardTrace) -> tuple[Any, dict[int, Tensor]]:
        named = {f"model.{name}": tensor for name, tensor in zip(self._buffers, given.buffers, strict=True)}

        def backward(result: Any) -> tuple[Any, Any]:
            return result, trace.gradients(self._share(result, given))

        with torch.enable_grad(), _plain_forwards(self._recipe), trace.running():
            result, gradients = self._run(given, named, backward)
        self._require_all(gradients)
        return result, gradients

    def _run(self, given: Inputs, named: dict[str, Tensor], backward: Callable[[Any], tuple[Any, Any]]) -> Any:
        """Run forward and backward with these tensors in the place of the model's."""
        own = dict(self._recipe.options.model.named_parameters(remove_duplicate=False)) | self._buffers
        pairs = [(own[name.removeprefix("model.")], tensor) for name, tensor in named.items()]
        batch = self._batch.rebuilt(given.batch)
        likenesses = Likenesses(pairs)
        with InPlaceOf(pairs):
            result = torch.func.functional_call(_Holder(self._recipe), named, (batch, backward))
        likenesses.require_unchanged()
        return result

    def _share(self, result: Any, given: Inputs) -> Tensor:
        """What the backward of a micro-step begins with."""
        loss = loss_of(result)
        share = loss / self._options.accumulate if self._options.accumulate > 1 else loss
        if self._options.scales:
            share = share * given.scale[0].to(share.dtype)
        if _has_reentrant_checkpoint(share.grad_fn):
            raise Untraceable("a checkpoint with use_reentrant=True runs a backward of its own inside of the backward")
        return share

    def _require_all(self, gradients: dict[int, Tensor]) -> None:
        unused = [self._names[id(p)] for p in self._recipe.parameters if p.requires_grad and id(p) not in gradients]
        if unused:
            raise Untraceable(f"{', '.join(unused[:5])} get no gradient")

    def _accumulated(self, given: Inputs, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        if self._options.accumulate == 1:
            return gradients
        trained = [id(p) for p in self._recipe.parameters if p.requires_grad]
        for key, sum_so_far in zip(trained, given.gradients, strict=True):
            if self._is_last:
                gradients[key] = sum_so_far + gradients[key]
            elif self._is_first:
                sum_so_far.copy_(gradients[key])
            else:
                sum_so_far.add_(gradients[key])
        return gradients

    # ---------------------------------------------------------------- the update

    def _update(self, given: Inputs, gradients: dict[int, Tensor]) -> Tensor | None:
        options = self._options
        if self._delivery is not None and self._delivery.is_needed:
            gradients = self._delivery.reduced(gradients)
        if self._trace is not None:
            gradients = self._trace.reduced(gradients)
        parameters = dict(zip(map(id, self._recipe.parameters), given.parameters, strict=True))
        found_inf: dict[int, Tensor] = {}
        if options.scales:
            inverse = given.scale[0].double().reciprocal().float()
            gradients = {key: g * inverse.to(g.dtype) for key, g in gradients.items()}
            found_inf = self._not_finite(gradients)
        norm = self._clip(gradients)
        rates = iter(given.rates)
        state = dict(zip(((id(o), id(p), n) for o, p, n in self._state), given.state, strict=True))
        for optimizer in options.optimizers:
            self._step(optimizer, parameters, gradients, state, rates, found_inf.get(id(optimizer)))
        if options.scales:
            _update_scale(options.scaler, given.scale, list(found_inf.values()))
        average = self._recipe.average
        if average is not None and given.averages:
            ids = [id(p) for p in options.model.parameters()]
            torch_private.foreach_lerp(given.averages, [parameters[key] for key in ids], 1.0 - average.decay)
        return norm

    def _not_finite(self, gradients: dict[int, Tensor]) -> dict[int, Tensor]:
        """Whether any gradient of an optimizer is not finite, on any rank."""
        optimizers = self._options.optimizers
        found = [_any_not_finite(optimizer, gradients) for optimizer in optimizers]
        if self._trace is not None:
            found = list(self._trace.sum(torch.stack(found)).clamp(max=1.0).unbind())
        return dict(zip(map(id, optimizers), found, strict=True))

    def _clip(self, gradients: dict[int, Tensor]) -> Tensor | None:
        options = self._options
        present = [gradients[id(p)] for p in self._recipe.parameters if id(p) in gradients]
        if options.clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(present)
            norm = norm if self._trace is None else self._trace.total_norm(norm)
            shrink = torch.clamp(options.clip_norm / (norm + 1e-6), max=1.0)
            for key, gradient in gradients.items():
                gradients[key] = gradient * shrink.to(gradient.dtype)
            return norm
        if options.clip_value is not None:
            for key, gradient in gradients.items():
                gradients[key] = gradient.clamp(-options.clip_value, options.clip_value)
        return None

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[int, Tensor],
        gradients: dict[int, Tensor],
        state: dict[tuple[int, int, str], Tensor],
        rates: Iterator[Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """Run a stand-in for the optimizer, which has the program's tensors in the place of its own."""
        # Where a step may be skipped, it is computed beside the old values, and one of the two is kept.
        mine: dict[int, Tensor] = {}
        stand_in: Any = object.__new__(type(optimizer))
        vars(stand_in).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        stand_in.state = defaultdict(dict)
        stand_in.param_groups = []
        pairs: list[tuple[Tensor, Tensor]] = []

        def own(tensor: Tensor) -> Tensor:
            if found_inf is None:
                return tensor
            copied = tensor.clone()
            pairs.append((tensor, copied))
            return copied

        numbers = self._recipe.numbers
        for index, group in enumerate(optimizer.param_groups):
            changed = {**group, "params": [], **numbers.in_place(optimizer, index, rates)}
            # Its own kernels are the compiler's to make; one launch per group would only be in their way.
            changed |= {name: value for name, value in _COMPILED_SETTINGS.items() if name in group}
            for parameter in group["params"]:
                if id(parameter) not in gradients:
                    continue
                tensor = mine[id(parameter)] = own(parameters[id(parameter)])
                tensor.grad = gradients[id(parameter)]
                changed["params"].append(tensor)
                stand_in.state[tensor] = {
                    name: own(state[id(optimizer), id(parameter), name]) if isinstance(value, Tensor) else value
                    for name, value in optimizer.state.get(parameter, {}).items()
                }
            stand_in.param_groups.append(changed)
        with torch.no_grad(), torch_private.as_if_compiling(), numbers.as_inputs():
            type(optimizer).step(stand_in)
        for parameter, tensor in [
            (p, mine[id(p)]) for group in optimizer.param_groups for p in group["params"] if id(p) in mine
        ]:
            tensor.grad = None
            known = optimizer.state.get(parameter, {})
            if any(
                isinstance(v, Tensor) and not isinstance(known.get(n), Tensor)
                for n, v in stand_in.state[tensor].items()
            ):
                raise StateIsMissing  # it would be made anew by every run, and lost
        for old, new in pairs:
            assert found_inf is not None
            old.copy_(torch.where(found_inf > 0, old, new))


_COMPILED_SETTINGS = {"foreach": True, "fused": False, "capturable": True}


def _any_not_finite(optimizer: torch.optim.Optimizer, gradients: dict[int, Tensor]) -> Tensor:
    found = [
        gradients[id(p)].isfinite().all()
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) in gradients
    ]
    return 1.0 - torch.stack(found).all().float()


def _update_scale(scaler: Any, scale: Sequence[Tensor], found_inf: Sequence[Tensor]) -> None:
    """What ``GradScaler.update`` does, without asking the device."""
    value, held = scale
    is_bad = torch.stack(list(found_inf)).sum() > 0
    held_now = held + 1
    grown = value * scaler.get_growth_factor()
    is_full = held_now == scaler.get_growth_interval()
    grown = torch.where(is_full & grown.isfinite(), grown, value)
    value.copy_(torch.where(is_bad, value * scaler.get_backoff_factor(), grown))
    held.copy_(torch.where(is_bad | is_full, torch.zeros_like(held), held_now))


def _has_reentrant_checkpoint(root: Any) -> bool:
    """Whether autograd's graph has such a checkpoint in it: its gradients would be added to ``.grad``, out of sight."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        following = {inner for inner, _ in node.next_functions if inner is not None} - seen
        seen |= following
        waiting += following
    return False


def why_no_program(graph: Any) -> str:
    """Why a step that was traced cannot be a program all the same; empty if it can.

    Collectives in place are C++ that takes a process group as an object; a trace of one also draws random numbers of
    Python.  A size that depends on values is a symbol in the trace, and a program has none.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        return f"the step asks for a number at {_place(node)}"
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "c10d":
            name = str(node.target).removeprefix("c10d.").removesuffix(".default").strip("_")
            what = f"a collective of torch.distributed ({name}) runs in place at {_place(node)}"
            return f"{what}; functional ones can be traced"
        if "mkldnn_rnn_layer" in str(node.target):
            return f"a recurrent layer runs by oneDNN at {_place(node)}, which keeps nothing for a backward of ours"
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            what = f"the shape of what {operator_shown(node.target)} returns depends on the values of a tensor"
            return f"{what} (at {_place(node)})"
    return ""


def _place(node: Any) -> str:
    return place_of(node) or "a line of the loss function"


@contextmanager
def _plain_forwards(recipe: Recipe) -> Iterator[None]:
    """Let wrappers call their module and do nothing else, and compiled modules run as they were written."""
    wrappers = recipe.parallel.wrappers
    for wrapper in wrappers:
        vars(wrapper)["forward"] = _plain_forward(wrapper)
    try:
        with torch_private.tracing_compiled_modules():
            yield
    finally:
        for wrapper in wrappers:
            del vars(wrapper)["forward"]


def _plain_forward(wrapper: Any) -> Any:
    return lambda *args, **kwargs: wrapper.module(*args, **kwargs)
