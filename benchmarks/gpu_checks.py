"""Correctness on a GPU, gradient by gradient: each case under a wrapper, against a plain single process.

Every rank builds the reference itself, without any communication: it knows the seeds of all ranks' batches.
The loss is never the judge; it goes on falling with wrong gradients too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forcing import force_collective
from models import GPT, SmallCNN
from subjects import Subject, lockstep_hooks

Grads = dict[str, Tensor]
# The cases can also be tried on a machine without a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32_TOLERANCE = 2e-4
BF16_TOLERANCE = 4e-2


def small_gpt(**options: Any) -> GPT:
    return GPT(num_symbols=256, context=64, width=128, num_layers=3, num_heads=4, **options)


def token_batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(256, (4, 65), generator=generator).to(DEVICE)


def image_batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)


def vector_batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)


class SmallMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).float().square().mean()


class UnusedBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.used(x).relu()).square().mean()


class Case:
    """One model, one way to train it. Subclass-free: the few cases that differ pass their own ``train``."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        batch: Callable[..., Tensor],
        options: dict[str, Any] | None = None,
        autocast: torch.dtype | None = None,
        tolerance: float = FP32_TOLERANCE,
        reference: str = "concatenated",
        num_micro_batches: int = 1,
        prepare: Callable[[nn.Module], nn.Module] | None = None,
        register: Callable[[Any], None] | None = None,
        num_warm_steps: int = 0,
        scaler: bool = False,
        scale: str = "parameter",
        sync_before_reading: bool = False,
    ) -> None:
        self.build, self.batch, self.options, self.autocast = build, batch, options or {}, autocast
        self.tolerance, self.reference, self.num_micro_batches = tolerance, reference, num_micro_batches
        self.prepare, self.register, self.num_warm_steps = prepare, register, num_warm_steps
        self.scaler, self.scale = scaler, scale
        self.sync_before_reading = sync_before_reading and DEVICE == "cuda"

    def _cast(self) -> Any:
        return torch.autocast(DEVICE, self.autocast) if self.autocast else nullcontext()

    def _module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(DEVICE)

    def reference_grads(self, num_ranks: int) -> Grads:
        """What one process gets that sees all ranks' batches."""
        module = self._module()
        for micro in range(self.num_micro_batches):
            batches = [self.batch(rank, micro) for rank in range(num_ranks)]
            if self.reference == "concatenated":
                batches = [torch.cat(batches)]
            for batch in batches:
                with self._cast():
                    loss = module(batch) / len(batches)
                loss.backward()
        return grads_of(module)

    def wrapped_grads(self, wrapper: str, rank: int, forced: bool = False) -> Grads:
        module = self._module()
        if self.prepare:
            module = self.prepare(module)
        model = Subject(wrapper, wrapper, self.options).wrap(module)
        if forced:
            force_collective(model)
        if self.register:
            self.register(model)
        scaler = torch.amp.GradScaler(DEVICE, enabled=self.scaler, init_scale=2.0**10)
        for _ in range(self.num_warm_steps):
            self._backward(model, rank, scaler)
            model.zero_grad()
        self._backward(model, rank, scaler)
        if self.scaler:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            scaler.unscale_(optimizer)
        if self.sync_before_reading:
            torch.cuda.synchronize()
        return grads_of(module)

    def _backward(self, model: Any, rank: int, scaler: Any) -> None:
        for micro in range(self.num_micro_batches):
            last = micro == self.num_micro_batches - 1
            with nullcontext() if last else model.no_sync():
                with self._cast():
                    loss = model(self.batch(rank, micro))
                scaler.scale(loss).backward()


def grads_of(module: nn.Module) -> Grads:
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def relative_error(got: Grads, expected: Grads, scale: str = "parameter") -> tuple[float, str]:
    """The largest error, relative to the largest gradient of that parameter (or model), and whose it is."""
    missing = set(expected) ^ {name for name, grad in got.items() if name in expected or grad.abs().max() > 0}
    if missing:
        return float("inf"), f"gradients only on one side: {sorted(missing)}"
    largest = {name: float(truth.abs().max()) for name, truth in expected.items()}
    worst, whose = 0.0, ""
    for name, truth in expected.items():
        size = max(largest[name] if scale == "parameter" else max(largest.values()), 1e-8)
        error = float((got[name].float() - truth.float()).abs().max()) / size
        if not error <= worst:  # also true for NaN
            worst, whose = error, name
    return worst, whose


def all_ranks_equal(grads: Grads) -> bool:
    digest = hashlib.sha256()
    for name in sorted(grads):
        digest.update(grads[name].detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1


def _torch_hook(name: str) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if name == "powerSGD":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, name))

    return register


def _our_hook(name: str, **options: Any) -> Callable[[Any], None]:
    def register(model: Any) -> None:
        hooks = lockstep_hooks()
        state = {"bf16": hooks.Bf16State, "int8": hooks.Int8State, "topk": hooks.TopKState}[name](**options)
        model.register_comm_hook(state, getattr(hooks, f"{name}_hook"))

    return register


def _native_mixed_precision() -> Any:
    from torch.nn.parallel import distributed

    # Underscored in torch, yet the only way to give DDP its mixed_precision argument.
    policy = getattr(distributed, "_MixedPrecision")  # noqa: B009
    return policy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


VIEW, COPY = {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False}
BF16 = {"autocast": torch.bfloat16, "tolerance": BF16_TOLERANCE}


def _channels_last() -> nn.Module:
    return SmallCNN(num_layers=6).to(memory_format=torch.channels_last)


def _last(rank: int, step: int = 0) -> Tensor:
    return image_batch(rank, step).to(memory_format=torch.channels_last)


def cases() -> dict[str, Case]:
    def small_cnn() -> nn.Module:
        return SmallCNN(num_layers=6)

    unused = {"find_unused_parameters": True}
    lossy = {"tolerance": 2e-2, "num_warm_steps": 2}
    # A small gradient in a chunk with a large one is coarse; the residual makes up for it over steps.
    quantised = {"tolerance": 2e-2, "num_warm_steps": 2, "scale": "model"}
    found = {
        "mlp": Case(SmallMLP, vector_batch, VIEW),
        "mlp copy": Case(SmallMLP, vector_batch, COPY),
        "mlp small buckets": Case(SmallMLP, vector_batch, {"bucket_cap_mb": 0.1}),
        "mlp bf16 autocast": Case(SmallMLP, vector_batch, VIEW, **BF16),
        "cnn batch norm": Case(small_cnn, image_batch, VIEW, reference="mean"),
        "cnn batch norm copy": Case(small_cnn, image_batch, COPY, reference="mean"),
        "cnn channels last": Case(_channels_last, _last, VIEW, reference="mean"),
        "cnn bf16 autocast": Case(small_cnn, image_batch, VIEW, reference="mean", **BF16),
        "gpt tied": Case(small_gpt, token_batch, VIEW),
        "gpt tied copy": Case(small_gpt, token_batch, COPY),
        "gpt tied bf16 autocast": Case(small_gpt, token_batch, VIEW, **BF16),
        "gpt no_sync, 3 micro-batches": Case(small_gpt, token_batch, VIEW, num_micro_batches=3),
        "gpt no_sync copy": Case(small_gpt, token_batch, COPY, num_micro_batches=3),
        "unused branch": Case(UnusedBranch, vector_batch, {**VIEW, **unused}),
        "unused branch copy": Case(UnusedBranch, vector_batch, {**COPY, **unused}),
        "gpt static_graph, reentrant checkpoint": Case(
            lambda: small_gpt(reentrant=True), token_batch, {**VIEW, "static_graph": True}, num_warm_steps=2
        ),
        "gpt non-reentrant checkpoint": Case(lambda: small_gpt(reentrant=False), token_batch, VIEW),
        "sync batch norm": Case(
            small_cnn,
            image_batch,
            VIEW,
            prepare=lambda module: nn.SyncBatchNorm.convert_sync_batchnorm(module),
            tolerance=2e-3,
        ),
        "fp16 autocast, GradScaler": Case(
            small_gpt, token_batch, VIEW, autocast=torch.float16, tolerance=1e-2, scaler=True
        ),
        "hook torch allreduce": Case(small_gpt, token_batch, VIEW, register=_torch_hook("allreduce_hook")),
        "hook torch fp16": Case(small_gpt, token_batch, VIEW, register=_torch_hook("fp16_compress_hook"), **lossy),
        "hook torch bf16": Case(small_gpt, token_batch, VIEW, register=_torch_hook("bf16_compress_hook"), **lossy),
        # Rank 2 of large matrices is far from the gradient: only torch's own error says what to expect.
        "hook torch PowerSGD, one bucket": Case(
            small_gpt,
            token_batch,
            {**VIEW, "bucket_cap_mb": 100},
            register=_torch_hook("powerSGD"),
            tolerance=3.0,
            num_warm_steps=3,
        ),
        # The hook starts collectives from callbacks, in an order of their own on each gloo rank.
        "hook torch PowerSGD, several buckets": Case(
            small_gpt, token_batch, VIEW, register=_torch_hook("powerSGD"), tolerance=3.0, num_warm_steps=3
        ),
        "hook lockstep bf16": Case(small_gpt, token_batch, VIEW, register=_our_hook("bf16"), **lossy),
        "hook lockstep int8": Case(small_gpt, token_batch, VIEW, register=_our_hook("int8"), **quantised),
        "hook lockstep int8, all_gather": Case(
            small_gpt, token_batch, VIEW, register=_our_hook("int8", scheme="all_gather"), **quantised
        ),
        "hook lockstep top-k of all": Case(
            small_gpt, token_batch, VIEW, register=_our_hook("topk", ratio=1.0), num_warm_steps=2
        ),
    }
    try:
        policy = {"mixed_precision": _native_mixed_precision()}
        bf16 = {"tolerance": BF16_TOLERANCE}
        found["mixed_precision argument"] = Case(SmallMLP, vector_batch, {**VIEW, **policy}, **bf16)
        found["mixed_precision argument copy"] = Case(SmallMLP, vector_batch, {**COPY, **policy}, **bf16)
        # Tells a wrong gradient from one that is read before its stream has written it.
        found["mixed_precision argument, device sync"] = Case(
            SmallMLP, vector_batch, {**VIEW, **policy}, sync_before_reading=True, **bf16
        )
    except AttributeError:
        pass
    return found


def optimizer_in_backward(wrapper: str, rank: int, num_ranks: int, forced: bool = False) -> tuple[Grads, Grads]:
    """Weights after three steps with the optimizer run inside backward, and those of a single process."""
    # Underscored in torch; people reach it through DDP's documented overlap recipe.
    from torch.distributed import optim

    apply = getattr(optim, "_apply_optimizer_in_backward")  # noqa: B009
    torch.manual_seed(0)
    module = SmallMLP().to(DEVICE)
    plain = copy.deepcopy(module)
    apply(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    model = Subject(wrapper, wrapper, VIEW).wrap(module)
    if forced:
        force_collective(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        model(vector_batch(rank, step)).backward()
        optimizer.zero_grad()
        plain(torch.cat([vector_batch(r, step) for r in range(num_ranks)])).backward()
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return weights, {name: p.detach().clone() for name, p in plain.named_parameters()}


OPTIMIZER_IN_BACKWARD = "optimizer in backward"


def case_names() -> list[str]:
    return [*cases(), OPTIMIZER_IN_BACKWARD]


def check(names: list[str], wrapper: str, progress: str, forced: bool = False) -> None:
    """Runs the cases one by one; each result is on disk before the next begins, should that never return."""
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    all_cases = cases()
    for name in names:
        try:
            if name == OPTIMIZER_IN_BACKWARD:
                got, expected = optimizer_in_backward(wrapper, rank, num_ranks, forced)
                tolerance, scale = FP32_TOLERANCE, "parameter"
            else:
                case = all_cases[name]
                expected, got = case.reference_grads(num_ranks), case.wrapped_grads(wrapper, rank, forced)
                tolerance, scale = case.tolerance, case.scale
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            error, whose = relative_error(got, expected, scale)
            equal = all_ranks_equal(got)
            result: dict[str, Any] = {
                "ok": bool(error <= tolerance and equal),
                "error": error,
                "parameter": whose,
                "tolerance": tolerance,
                "ranks_equal": equal,
            }
        except Exception as error:
            result = {
                "ok": False,
                "raised": f"{type(error).__name__}: {error}"[:500],
                "traceback": traceback.format_exc()[-1500:],
            }
        with Path(progress, f"rank{rank}").open("a") as file:
            file.write(json.dumps({"case": name, **result}) + "\n")
