"""What people do between steps, in every mode that can be on a CPU: the result stays that of the loop, on all ranks."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multirank.harness import lockstep_only, run_ranks

pytestmark = [pytest.mark.multirank, lockstep_only]
PRELOAD = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch._functorch.aot_autograd")
VARIABLE = "LOCKSTEP_TEST_ATTACK"


class Model(nn.Module):
    """Reads what may change between steps: a number, a variable of the environment, the mode, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x))) * self.factor
        return self.last(h * 3 if os.environ.get(VARIABLE) else h)


class Broken(Exception):
    pass


def attack(mode: str, by_bucket: bool) -> list[Tensor]:
    import lockstep

    torch.manual_seed(0)
    rank = dist.get_rank()
    module = Model()
    model = lockstep.DDP(module, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    breaks = [False]

    def loss(m: Any, batch: Any) -> Any:
        value = (m(batch["x"]) - batch["y"]).square().mean()
        if breaks[0]:
            raise Broken
        return value

    step = lockstep.TrainStep(model, optimizer, loss, mode=mode, update_by_bucket=by_bucket)
    found = []

    def run(num: int, size: int = 5) -> None:
        for _ in range(num):
            generator = torch.Generator().manual_seed(100 * len(found) + rank)
            x, y = torch.randn(size, 6, generator=generator), torch.randn(size, 4, generator=generator)
            found.append(step({"x": x, "y": y}))

    run(3)
    module.factor = 0.5  # a number of Python
    run(3)
    os.environ[VARIABLE] = "1"
    run(3)
    del os.environ[VARIABLE]
    run(2)
    for size in (3, 5, 3, 4, 5, 3):  # shapes that alternate, other ones on one rank
        run(1, size + (rank == 1))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    run(3)
    model.eval()
    with torch.no_grad():
        found.append(model(torch.ones(2, 6)))  # an evaluation
    run(2)  # and steps with running statistics
    model.train()
    run(2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(3)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    run(3)
    module.last.bias.requires_grad_(False)
    run(3)
    module.last.bias.requires_grad_(True)
    run(3)
    breaks[0] = True  # on all ranks
    for _ in range(2):
        with pytest.raises(Broken):
            run(1)
        step.reset()
        model.reset_sync_window()
    breaks[0] = False
    run(3)
    if mode == "graph":
        assert step.explain().num_program_calls > 10, str(step.explain())
    return [*found, *(p.detach() for p in model.parameters()), *(b.detach() for b in model.buffers())]


def attack_all() -> None:
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph
    right = attack("loop", False)
    for mode, by_bucket in (("loop", True), ("graph", False), ("auto", True)):
        found = attack(mode, by_bucket)
        assert len(found) == len(right)
        for index, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            if mode == "graph":
                torch.testing.assert_close(mine, theirs, msg=lambda text, i=index: f"result {i}: {text}")
            else:
                assert torch.equal(mine, theirs), (mode, index)


@pytest.mark.parametrize("world", [1, 3])
def test_the_result_is_that_of_the_loop(world: int) -> None:
    run_ranks(world, attack_all, preload=PRELOAD)


def change_within_windows(places: tuple[int, ...], is_compiled: bool) -> None:
    """Programs and the loop take turns within a window, in each order: nothing is added up twice, or lost."""
    import lockstep
    from lockstep import torch_private

    if not is_compiled:
        torch_private.compile_program = lambda graph, *_: graph
    rank, num = dist.get_rank(), 4
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    model = lockstep.DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).sum() * num, accumulate=num, mode="graph")
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    kinds = set()
    for window in range(8):
        before, kind = module.weight.item(), ""
        for micro in range(num):
            if num * window + micro in places:
                os.environ[VARIABLE] = f"{window} {micro}"
            by_program = step.explain().num_program_calls
            step(torch.full((1, 1), float(10**micro * (rank + 1))))
            kind += "P" if step.explain().num_program_calls > by_program else "L"
        assert before - module.weight.item() == 1111 * mean, (window, kind)
        kinds.add(kind)
    assert any("LP" in kind for kind in kinds)
    assert any("PL" in kind for kind in kinds)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("places", [(9,), (10,), (11,), (9, 14, 19)], ids=str)
def test_a_program_and_the_loop_in_one_window(world: int, places: tuple[int, ...]) -> None:
    """What is tested is who takes which turn; the last places are tried on what the compiler makes of programs, too."""
    run_ranks(world, change_within_windows, places, len(places) > 1, preload=PRELOAD)


def freeze_within_a_window(mode: str) -> list[Tensor]:
    import lockstep

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = lockstep.DDP(module, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), accumulate=2, mode=mode)
    for call in range(12):
        if call in (5, 7, 8):  # frozen after its first micro-step, trained again within and between windows
            module[0].weight.requires_grad_(call != 5)
        step(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * call + dist.get_rank())))
    assert mode == "loop" or step.explain().num_program_calls > 4
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_frozen_within_a_window_keeps_what_it_had(world: int) -> None:
    right = run_ranks(world, freeze_within_a_window, "loop", preload=PRELOAD)
    found = run_ranks(world, freeze_within_a_window, "graph", preload=PRELOAD)
    for mine in found:
        torch.testing.assert_close(mine, right[0], rtol=1e-4, atol=1e-6)


def freeze_between_windows(mode: str) -> list[Tensor]:
    """A part of a bucket, and a bucket as a whole."""
    import lockstep
    from lockstep import torch_private

    torch_private.compile_program = lambda graph, *_: graph
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model = lockstep.DDP(module, bucket_cap_mb=5e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = lockstep.TrainStep(model, optimizer, lambda m, x: m(x).square().mean(), mode=mode)
    frozen: dict[int, list[Any]] = {3: [module[0].bias], 6: [module[0].weight], 9: [*module[2].parameters()], 12: []}
    for call in range(15):
        if call in frozen:
            for parameter in module.parameters():
                parameter.requires_grad_(all(parameter is not one for one in frozen[call]))
        step(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * call + dist.get_rank())))
    assert not step.explain().reasons, step.explain()
    assert mode == "loop" or step.explain().num_program_calls >= 9, step.explain()
    return [p.detach() for p in module.parameters()]


def test_what_is_frozen_between_windows_is_left_out_of_programs() -> None:
    right = run_ranks(3, freeze_between_windows, "loop", preload=PRELOAD)
    found = run_ranks(3, freeze_between_windows, "graph", preload=PRELOAD)
    for mine in found:
        torch.testing.assert_close(mine, right[0], rtol=1e-4, atol=1e-6)
