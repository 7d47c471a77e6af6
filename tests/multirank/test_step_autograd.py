"""Backward passes that someone else compiles, and an interpreter without assertions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from launching import Launch, write_script
from multirank.harness import lockstep_only
from multirank.mixes import (
    COMPILE_THEN_WRAP,
    EAGER,
    PRELOAD,
    TWO_AND_THREE,
    WHOLE,
    WRAP_THEN_COMPILE,
    Mix,
    Side,
    loss_of,
    one_net,
    params_of,
    run_mix,
    train,
)

pytestmark = [pytest.mark.multirank, lockstep_only]


# ---------------------------------------------------------------- loss.backward() inside of what is compiled


def step_function(side: Side) -> Callable[[Tensor], Tensor]:
    """The model and its backward in one function, which is compiled but for the reference."""
    model = side.models[0]

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model(x))
        loss.backward()
        return loss.detach()

    return step if side.is_reference else torch.compile(step, backend=side.backend)


def backward_inside(side: Side, t: int) -> None:
    """In steps 2 and 3 of two passes, of which the first does not synchronise."""
    if "step" not in side.memory:
        side.memory["step"] = step_function(side)
    for index in range(num_passes(t)):
        with side.no_sync(index < num_passes(t) - 1):
            side.memory["step"](side.draw(t, index))


def num_passes(t: int) -> int:
    return 2 if t in (2, 3) else 1


# ---------------------------------------------------------------- compiled autograd


def backward_outside(side: Side, t: int) -> None:
    for index in range(num_passes(t)):
        with side.no_sync(index < num_passes(t) - 1):
            side.loss(t, index).backward()


def backward_enabled(side: Side, t: int) -> None:
    for index in range(num_passes(t)):
        loss = side.loss(t, index)
        with side.no_sync(index < num_passes(t) - 1), compiled_autograd_of(side):
            loss.backward()


def compiled_autograd_of(side: Side) -> Any:
    if side.is_reference:
        return contextlib.nullcontext()
    return compiled_autograd._enable(torch.compile(backend=side.backend))


def with_comm_hook(side: Side) -> None:
    for ddp in side.wrappers:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)


ONE_OF_EACH = (EAGER, WRAP_THEN_COMPILE)
MIXES = {
    "backward_in_a_compiled_step": Mix(
        backward_inside, one_net, modes=WHOLE, by_inductor=True, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)
    ),
    "compiled_autograd": Mix(backward_inside, one_net, modes=WHOLE, worlds=TWO_AND_THREE, soaks=(2,)),
    "compiled_autograd_of_a_model": Mix(
        backward_outside, one_net, modes=(WRAP_THEN_COMPILE, COMPILE_THEN_WRAP), soaks=(COMPILE_THEN_WRAP,)
    ),
    "compiled_autograd_with_a_hook": Mix(backward_inside, one_net, modes=ONE_OF_EACH, after_wrapping=with_comm_hook),
    "compiled_autograd_with_python_reducer": Mix(
        backward_inside,
        one_net,
        modes=WHOLE,
        worlds=(3,),
        soaks=(EAGER, COMPILE_THEN_WRAP),
    ),
    "python_reducer_alone": Mix(backward_outside, one_net, modes=(WRAP_THEN_COMPILE,)),
    "enabled_autograd": Mix(backward_enabled, one_net, modes=WHOLE, worlds=(3,), soaks=(COMPILE_THEN_WRAP,)),
    "enabled_autograd_with_a_hook": Mix(backward_enabled, one_net, modes=ONE_OF_EACH, after_wrapping=with_comm_hook),
}


def run(name: str, mode: str, backend: str) -> list[str]:
    if name.startswith("compiled_autograd"):
        torch._dynamo.config.compiled_autograd = True
    if "python_reducer" in name:
        torch._dynamo.config.optimize_ddp = "python_reducer"
    return train(MIXES[name], mode, backend)


@pytest.mark.parametrize(("name", "mode", "backend", "world"), params_of(MIXES))
def test_mix(name: str, mode: str, backend: str, world: int) -> None:
    run_mix(run, MIXES, name, mode, backend, world)


# ---------------------------------------------------------------- python -O

OPTIMIZED = """
    import importlib, os, sys
    from importlib import _bootstrap_external as files
    # torch comes as it was compiled when it was installed: to compile all of it anew takes longer than this test.
    kept = files.cache_from_source
    files.cache_from_source = lambda path, *rest: kept(path, optimization="" if is_torch(path) else "1")

    def is_torch(path):
        return "/torch/" in path.rpartition("site-packages")[2]

    import torch
    import torch.distributed as dist
    from torch import nn
    import lockstep

    if __debug__:
        sys.exit("assertions are on")
    if not lockstep.__spec__.cached.endswith(".opt-1.pyc"):
        sys.exit("Lockstep has its assertions")
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:  # a part that this version of torch does not have
            pass
    other = os.fork()
    rank, world, where = int(other == 0), 2, sys.argv[1]
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x


    def batch(step, rank):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).double()


    for way in ("eager", "wrap_then_compile", "compile_then_wrap"):
        torch._dynamo.reset()
        torch.manual_seed(3)
        plain = Net().double()
        module = Net().double()
        module.load_state_dict(plain.state_dict())
        inner = torch.compile(module, backend="aot_eager") if way == "compile_then_wrap" else module
        ddp = lockstep.DDP(inner, bucket_cap_mb=0.0001)
        if len(ddp.plan.buckets) < 3:
            sys.exit("too few buckets")
        model = torch.compile(ddp, backend="aot_eager") if way == "wrap_then_compile" else ddp
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, plain)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batch(step, rank)).pow(2).mean().backward()
            torch.stack([plain(batch(step, r)).pow(2).mean() for r in range(world)]).mean().backward()
            for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, msg=lambda m: f"step {step}, {name}: {m}")
            for optimizer in optimizers:
                optimizer.step()
        sys.stdout.write(f"{rank} {way} launches: {lockstep.explain(ddp).num_launches}\\n")
    dist.barrier()
    dist.destroy_process_group()
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_without_assertions(tmp_path: Path) -> None:
    script = write_script(tmp_path / "train.py", OPTIMIZED)
    command = [sys.executable, "-O", script, tmp_path / "store", *PRELOAD]
    done = Launch(command, tmp_path, {"GLOO_SOCKET_IFNAME": "lo"}).finish(1000)
    assert done.exit_code == 0, str(done)
    told = dict(line.split(" launches: ") for line in done.lines if " launches: " in line)
    for rank in range(2):
        assert int(told[f"{rank} eager"]) == 0, str(done)
        assert int(told[f"{rank} wrap_then_compile"]) > 0, str(done)
        assert int(told[f"{rank} compile_then_wrap"]) > 0, str(done)
