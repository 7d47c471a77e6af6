"""Training runs in which a step is not like the one before, next to plain copies of what every rank does.

A mix says what modules there are and what a rank does in a step.  Each rank runs it on its wrapped modules, and also,
on plain copies, for every rank of the world one after the other.  What must be in ``.grad`` is then the mean over the
copies: by the definition of data parallel, and whatever a rank did with hooks, penalties or several passes.

A step may be a generator; it yields where gradients are to be compared in between, and the copies averaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from multirank.compare import Tensors, assert_close
from multirank.harness import inductor_cache, run_ranks

EAGER, WRAP_THEN_COMPILE, COMPILE_THEN_WRAP, BLOCKS = MODES = (
    "eager",
    "wrap_then_compile",
    "compile_then_wrap",
    "blocks",  # wrapped, and the modules in .blocks are compiled one by one
)
WHOLE = MODES[:3]
TWO_AND_THREE = (2, 3)  # ranks; what three do holds what two do, so one mix of a kind runs on both
INDUCTOR = "inductor"
BUCKET_CAP_MB = 0.001
DTYPE = torch.float64
ROWS = 4
# What a first compilation imports; once in the server is cheaper than once per rank.
PRELOAD = (
    "torch._inductor.compile_fx",
    "torch._inductor.compiler_bisector",
    "torch._dynamo.backends.debugging",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.repro.after_dynamo",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._subclasses.schema_check_mode",
    "torch.export._trace",
    "torch.distributed.tensor.experimental",
)


@dataclass(frozen=True)
class Mix:
    step: Callable[[Side, int], Iterator[None] | None]
    build: Callable[[], Sequence[nn.Module]]
    options: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 6
    dtype: torch.dtype | None = DTYPE
    tolerance: float | None = None
    # One for all parameters, or one for each module, which the step itself zeroes and steps.
    one_optimizer: bool = True
    set_to_none: bool = True
    is_built_backwards: bool = False  # the wrappers, last module first
    modes: tuple[str, ...] = WHOLE
    worlds: tuple[int, ...] = (2,)
    by_inductor: bool = False
    # Of these modes, worlds and backends make test leaves to make faults what another mix of the kind shows.
    soaks: tuple[str | int, ...] = ()
    after_wrapping: Callable[[Side], None] | None = None
    compares_before_step: bool = True  # gradients; after the optimizer's step they are compared in any case


class Side:
    """Who runs the steps: this rank with its wrapped modules, or any rank with plain ones."""

    def __init__(self, mix: Mix, rank: int, mode: str | None, backend: str = "aot_eager") -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.modules = list(mix.build())
        if mix.dtype is not None:
            for module in self.modules:
                module.to(mix.dtype)
        self.rank, self.world, self.mode, self.backend = rank, dist.get_world_size(), mode, backend
        self.is_reference = mode is None
        self.memory: dict[str, Any] = {}  # what a mix wants to keep between steps
        self.wrappers: list[Any] = []
        self.models: list[Any] = list(self.modules)
        if mode is not None:
            self._wrap(mode, {"bucket_cap_mb": BUCKET_CAP_MB, **mix.options}, mix.is_built_backwards)
        if mix.after_wrapping is not None:
            mix.after_wrapping(self)
        self.parameters: dict[str, nn.Parameter] = {}
        groups: list[list[nn.Parameter]] = []
        for index, module in enumerate(self.modules):
            known = set(map(id, self.parameters.values()))
            new = {f"{index}.{name}": p for name, p in module.named_parameters() if id(p) not in known}
            self.parameters.update(new)
            groups.append(list(new.values()))
        if mix.one_optimizer:
            groups = [[p for group in groups for p in group]]
        self.optimizers = [torch.optim.SGD(group, lr=0.05) for group in groups]

    def _wrap(self, mode: str, options: dict[str, Any], is_backwards: bool) -> None:
        import lockstep

        how: dict[str, Any] = {"backend": self.backend}
        order = list(range(len(self.modules)))
        wrappers: dict[int, Any] = {}
        for index in reversed(order) if is_backwards else order:
            module = self.modules[index]
            wrappers[index] = lockstep.DDP(
                torch.compile(module, **how) if mode == COMPILE_THEN_WRAP else module, **options
            )
            for block in module.blocks if mode == BLOCKS else ():
                block.compile(**how)
            num_buckets = len(wrappers[index].plan.buckets)
            assert num_buckets >= 3, f"a mix needs several buckets to mix up, got {num_buckets}"
        self.wrappers = [wrappers[index] for index in order]
        self.models = [torch.compile(w, **how) if mode == WRAP_THEN_COMPILE else w for w in self.wrappers]

    # ---------------------------------------------------------------- what a step is made of

    def draw(self, step: int, *key: int, shape: Sequence[int] = (ROWS, 8)) -> Tensor:
        """Numbers of this rank's own, which are the same on its copy."""
        seed = 10_000 * self.rank + 100 * step
        for part in key:
            seed = 31 * seed + part + 1
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)

    def loss(self, step: int, *key: int, index: int = 0) -> Tensor:
        return loss_of(self.models[index](self.draw(step, *key)), step)

    @contextlib.contextmanager
    def uncompiled(self, is_on: bool = True) -> Iterator[None]:
        if self.is_reference or not is_on:
            yield
        else:
            with torch.compiler.set_stance("force_eager"):
                yield

    def no_sync(self, is_on: bool = True, index: int = 0) -> Any:
        return contextlib.nullcontext() if self.is_reference or not is_on else self.wrappers[index].no_sync()

    # ---------------------------------------------------------------- gradients and weights

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else p.grad.detach().clone() for name, p in self.parameters.items()}

    def digest(self) -> str:
        """Of all weights, to compare ranks bit by bit."""
        hashed = hashlib.sha256()
        for parameter in self.parameters.values():
            hashed.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()


def loss_of(output: Tensor, step: int = 0) -> Tensor:
    """Neither even nor linear in the output, so that no factor and no sign is lost."""
    return functional.mse_loss(output, torch.full_like(output, 0.3 + 0.1 * (step % 3)))


def average(sides: Sequence[Side]) -> Tensors:
    """The mean of the copies, put into each; what has no gradient anywhere stays without one."""
    means: dict[str, Tensor | None] = {}
    for name in sides[0].parameters:
        owners = [side.parameters[name] for side in sides]
        gradients = [p.grad for p in owners if p.grad is not None]
        means[name] = mean = torch.stack(gradients).sum(0) / len(sides) if gradients else None
        for parameter in owners:
            parameter.grad = None if mean is None else mean.clone()
    return means


def walk(mix: Mix, step: int, ours: Side, copies: Sequence[Side]) -> Iterator[None]:
    """Runs a step on every side as far as the next place to compare."""
    runs = [iter(mix.step(side, step) or ()) for side in (ours, *copies)]
    while True:
        ended = [next(run, "ended") == "ended" for run in runs]
        assert len(set(ended)) == 1, "the sides of a mix yield equally often"
        yield
        if ended[0]:
            return


def train(mix: Mix, mode: str, backend: str) -> list[str]:
    """Compares after every pass; returns the digests of the weights of this rank."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    world = dist.get_world_size()
    ours = Side(mix, dist.get_rank(), mode, backend)
    copies = [Side(mix, rank, None) for rank in range(world)]
    digests = []
    for step in range(mix.num_steps):
        what = f"rank {ours.rank}, {mode}, step {step}"
        for side in (ours, *copies):
            for optimizer in side.optimizers if mix.one_optimizer else ():
                optimizer.zero_grad(set_to_none=mix.set_to_none)
        for place, _ in enumerate(walk(mix, step, ours, copies)):
            expected = average(copies)
            if mix.compares_before_step:
                assert_close(ours.gradients(), expected, f"{what}, place {place}", mix.tolerance)
        for side in (ours, *copies):
            for optimizer in side.optimizers if mix.one_optimizer else ():
                optimizer.step()
        assert_close(ours.gradients(), expected, f"{what}, after the step", mix.tolerance)
        digests.append(ours.digest())
    if mode != EAGER and ours.rank == 1:  # in some mixes, rank 0 does not compile
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    return digests


def params_of(mixes: Mapping[str, Mix]) -> list[Any]:
    """Every mix in each of its modes and worlds, and some compiled by Inductor too."""
    params = []
    for name, mix in mixes.items():
        for mode, world in product(mix.modes, mix.worlds):
            marks = [pytest.mark.soak] if is_soak(mix, mode, world) else []
            params.append(pytest.param(name, mode, "aot_eager", world, id=f"{name}-{mode}-{world}", marks=marks))
        if mix.by_inductor:
            mode = next(mode for mode in mix.modes if mode != EAGER)
            marks = [pytest.mark.slow, *([pytest.mark.soak] if INDUCTOR in mix.soaks else [])]
            params.append(pytest.param(name, mode, INDUCTOR, 2, id=f"{name}-{mode}-{INDUCTOR}", marks=marks))
    return params


def is_soak(mix: Mix, mode: str, world: int) -> bool:
    return mode in mix.soaks or world in mix.soaks


def run_mix(
    run: Callable[[str, str, str], list[str]], mixes: Mapping[str, Mix], name: str, mode: str, backend: str, world: int
) -> None:
    """``run`` calls train on the ranks, by the name of a mix; afterwards all must have the same weights."""
    mix = mixes[name]
    if backend == INDUCTOR:
        env = {"TORCHINDUCTOR_CACHE_DIR": inductor_cache()}
        by_rank = run_ranks(world, run, name, mode, backend, preload=PRELOAD, limit_s=500, env=env)
    else:
        modes = tuple(other for other in mix.modes if is_soak(mix, other, world) == is_soak(mix, mode, world))
        by_rank = Together.of(run, name, modes, backend, world).digests(mode)
    for rank, digests in enumerate(by_rank):
        assert digests == by_rank[0], f"the weights of rank {rank} are not those of rank 0"


def run_modes(module: str, function: str, name: str, modes: Sequence[str], backend: str) -> dict[str, list[str]]:
    run = getattr(importlib.import_module(module), function)
    return {mode: run(name, mode, backend) for mode in modes}


class Together:
    """The modes of a mix, one after the other on the same ranks: a compiler that has compiled before is quicker.

    Where that fails, each mode is run on ranks of its own, so that each test has its own outcome; the last one fails if
    none of them did, unless there was only no time for all of them on a busy machine.
    """

    _all: dict[tuple[Any, ...], Together] = {}

    def __init__(self, run: Callable[..., Any], name: str, modes: tuple[str, ...], backend: str, world: int) -> None:
        self._alone = lambda mode: run_ranks(world, run, name, mode, backend, preload=PRELOAD)
        self._waiting, self._has_failed_alone, self._was_late = set(modes), False, False
        self._values: list[dict[str, list[str]]] = []
        self._error: AssertionError | None = None
        try:
            words = (run.__module__, run.__qualname__, name, modes, backend)
            self._values = run_ranks(world, run_modes, *words, preload=[*PRELOAD, run.__module__], limit_s=270)
        except AssertionError as error:
            self._error = error
            self._was_late = "did not end within" in str(error)

    @classmethod
    def of(cls, *key: Any) -> Together:
        if key not in cls._all:
            cls._all[key] = cls(*key)
        return cls._all[key]

    def digests(self, mode: str) -> list[list[str]]:
        """By rank, of the weights after each step."""
        if self._error is None:
            return [value[mode] for value in self._values]
        self._waiting.discard(mode)
        try:
            values = self._alone(mode)
        except AssertionError:
            self._has_failed_alone = True
            raise
        if not self._waiting and not self._has_failed_alone and not self._was_late:
            raise AssertionError("each mode passes alone, but not one after the other") from self._error
        return values


# ---------------------------------------------------------------- modules


class Block(nn.Module):  # dynamo does not compile an nn.Sequential on its own
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks and a head, with what a mix may switch in a later step."""

    breaks = False  # the graph, in the middle
    twice = False  # the second block
    fails = False
    uses_extra = False

    def __init__(self, inputs: int = 8, outputs: int = 3, *, width: int = 16, has_extra: bool = False) -> None:
        super().__init__()
        widths = [inputs, width, width, width]
        self.blocks = nn.ModuleList(Block(a, b) for a, b in pairwise(widths))
        self.extra = nn.Linear(width, width) if has_extra else None
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.breaks:
            torch._dynamo.graph_break()
        if self.twice:
            x = self.blocks[1](x)
        if self.fails:
            raise ZeroDivisionError
        if self.uses_extra:
            x = x + self.extra(x)
        return self.head(self.blocks[2](x))


class NetWithBreak(Net):
    breaks = True


class Towers(nn.Module):
    """Two nets that share nothing."""

    breaks = False  # the graph, between the two

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Net(), Net()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left = self.left(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return left, self.right(x)


class TowersWithBreak(Towers):
    breaks = True


def one_net() -> list[nn.Module]:
    return [Net()]


def towers() -> list[nn.Module]:
    return [Towers()]
