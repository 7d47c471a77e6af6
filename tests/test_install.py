"""``lockstep.install()`` and ``uninstall()``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.nn.parallel
import torch.nn.parallel.distributed

import lockstep
from launching import run_command, write_script


@pytest.fixture(autouse=True)
def _uninstalled_afterwards() -> Iterator[None]:
    yield
    lockstep.uninstall()


@pytest.fixture
def early_user() -> Iterator[ModuleType]:
    """A module that took torch's class before ``install()``, under two names."""
    module = ModuleType("early_user")
    exec(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from torch.nn.parallel.distributed import DistributedDataParallel\n"
        "class Sub(DDP): pass\n",
        vars(module),
    )
    sys.modules["early_user"] = module
    yield module
    del sys.modules["early_user"]


def torch_names() -> list[object]:
    return [
        torch.nn.parallel.DistributedDataParallel,
        torch.nn.parallel.distributed.DistributedDataParallel,
        sys.modules["torch.distributed.checkpoint.state_dict"].DDP,  # one that torch itself took by import
    ]


def test_every_place_in_torch_holds_our_class_until_uninstall() -> None:
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    original = torch_names()
    assert lockstep.DistributedDataParallel not in original
    assert lockstep.install() is None
    assert torch_names() == [lockstep.DistributedDataParallel] * 3
    assert lockstep.uninstall() is None
    assert torch_names() == original


def test_modules_that_imported_the_name_before(early_user: ModuleType) -> None:
    original = dict(vars(early_user))
    lockstep.install()
    assert early_user.DDP is lockstep.DistributedDataParallel
    assert early_user.DistributedDataParallel is lockstep.DistributedDataParallel
    # A class that was already derived from torch's stays what it is.
    assert early_user.Sub is original["Sub"]
    lockstep.uninstall()
    assert dict(vars(early_user)) == original


def test_install_twice_is_install_once() -> None:
    before = torch.nn.parallel.DistributedDataParallel
    lockstep.install()
    lockstep.install()
    assert torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
    lockstep.uninstall()
    assert torch.nn.parallel.DistributedDataParallel is before
    lockstep.uninstall()
    assert torch.nn.parallel.DistributedDataParallel is before


def test_install_again_reaches_modules_loaded_in_between(early_user: ModuleType) -> None:
    original = early_user.DDP
    lockstep.install()
    early_user.DDP = original
    lockstep.install()
    assert early_user.DDP is lockstep.DistributedDataParallel
    lockstep.uninstall()
    assert early_user.DDP is original


def test_a_reference_changed_by_someone_else_is_left_alone(early_user: ModuleType) -> None:
    lockstep.install()
    early_user.DDP = "mine"
    lockstep.uninstall()
    assert early_user.DDP == "mine"


def test_lockstep_itself_keeps_torchs_class_in_sight() -> None:
    module = ModuleType("lockstep.made_for_this_test")
    module.torch_ddp = original = torch.nn.parallel.DistributedDataParallel  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        lockstep.install()
        assert torch.nn.parallel.DistributedDataParallel is not original
        assert vars(module)["torch_ddp"] is original
    finally:
        del sys.modules[module.__name__]


def test_a_lazy_module_is_not_made_to_load() -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"install() asked a lazy module for {name}")

    sys.modules["lazy_user"] = Lazy("lazy_user")
    sys.modules["not_a_module"] = object()  # type: ignore[assignment]
    try:
        lockstep.install()
        lockstep.uninstall()
    finally:
        del sys.modules["lazy_user"], sys.modules["not_a_module"]


def test_what_shards_models() -> None:
    import torch.distributed.checkpoint.state_dict as states
    from torch.distributed import fsdp
    from torch.distributed.fsdp import fully_sharded_data_parallel as older

    names = ("fully_shard", "FullyShardedDataParallel", "register_fsdp_forward_method")
    original = [vars(fsdp)[name] for name in names]
    user = ModuleType("early_user_of_shards")
    exec("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard", vars(user))
    sys.modules[user.__name__] = user
    try:
        lockstep.install()
        assert fsdp.fully_shard is vars(user)["fully_shard"] is lockstep.fully_shard
        assert fsdp.FullyShardedDataParallel is vars(user)["FSDP"] is lockstep.FullyShardedDataParallel
        assert older.FullyShardedDataParallel is lockstep.FullyShardedDataParallel
        assert vars(fsdp)["register_fsdp_forward_method"].__module__ == "lockstep.shard.module"
        assert vars(states)["FSDP"] is original[1]  # torch's checkpoints know its own flat parameters by it
        lockstep.uninstall()
        assert [vars(fsdp)[name] for name in names] == original
        assert vars(user)["fully_shard"] is original[0]
    finally:
        del sys.modules[user.__name__]


def test_a_function_taken_from_torch_shards_with_lockstep(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import torch, torch.distributed as dist
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel as FSDP, fully_shard
        import lockstep

        lockstep.install()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = fully_shard(torch.nn.Linear(2, 1))
        assert isinstance(model, FSDPModule)
        model(torch.ones(1, 2)).sum().backward()
        older = FSDP(torch.nn.Linear(2, 1))
        older(torch.ones(1, 2)).sum().backward()
        assert isinstance(older, torch.distributed.fsdp.FullyShardedDataParallel)
        print(model.plan.shard_bytes > 0, model.weight.grad.full_tensor().tolist(), type(older).__module__)
        dist.destroy_process_group()
        """,
    )
    done = run_command([sys.executable, script])
    assert done.exit_code == 0, done
    assert done.lines == ["True [[1.0, 1.0]] lockstep.shard.older"]


@pytest.mark.parametrize(("chosen", "asked", "given"), [("gloo", None, "gloo"), ("mpi", "gloo", "gloo")])
def test_backend_of_a_bare_init_comes_from_the_launcher(
    chosen: str, asked: str | None, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_BACKEND", chosen)
    lockstep.install()
    dist.init_process_group(asked, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_backend() == given
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nccl needs a GPU")
def test_nccl_from_the_launcher_still_serves_tensors_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BACKEND", "nccl")
    lockstep.install()
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        for device in ("cpu", "cuda"):
            tensor = torch.ones(2, device=device)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_torchs_own_default_backend_is_kept_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_BACKEND", raising=False)
    configs = []
    for change in (lockstep.uninstall, lockstep.install):
        change()
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        configs.append(dist.get_backend_config())
        dist.destroy_process_group()
    assert configs[0] == configs[1]


def test_a_class_taken_from_torch_wraps_and_trains_with_lockstep(tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "train.py",
        """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        import lockstep

        lockstep.install()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = DDP(torch.nn.Linear(2, 1))
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        model(torch.ones(1, 2)).sum().backward()
        print(type(model).__module__, model.module.weight.grad.tolist())
        dist.destroy_process_group()
        """,
    )
    done = run_command([sys.executable, script])
    assert done.exit_code == 0, done
    assert done.lines == ["lockstep.ddp [[1.0, 1.0]]"]
