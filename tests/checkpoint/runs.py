"""A small training run in one process, with everything that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lockstep


class Run:
    """A model with dropout, an optimizer with momentum, a scheduler, and data in a random order."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])
        self.samples = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        self.sampler = lockstep.data.ResumableSampler(self.samples)
        self.loader = torch.utils.data.DataLoader(self.samples, batch_size=8, sampler=self.sampler)
        self.num_steps = 0
        self.losses: list[float] = []
        self._batches: Iterator[Any] = iter(())

    @property
    def objects(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.sampler}

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            try:
                batch = next(self._batches)
            except StopIteration:
                if self.sampler.position >= self.sampler.num_samples:
                    self.sampler.set_epoch(self.sampler.epoch + 1)
                self._batches = self.sampler.batches(self.loader)
                batch = next(self._batches)
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.num_steps += 1
            self.losses.append(loss.item())

    def save(self, folder: Path, **options: Any) -> Any:
        options = {"asynchronous": False, **options}
        return lockstep.checkpoint.save(
            folder, self.model, self.optimizer, step=self.num_steps, **self.objects, **options
        )

    def load(self, folder: Path, **options: Any) -> Any:
        loaded = lockstep.checkpoint.load(folder, self.model, self.optimizer, **self.objects, **options)
        assert loaded is not None
        self.num_steps = loaded.step
        self._batches = iter(())
        return loaded

    def bits(self) -> dict[str, Any]:
        """Everything that must be equal, bit by bit."""
        state = {f"model.{key}": value.clone() for key, value in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{key}": value.clone() for key, value in values.items()}
        state["rng"] = torch.get_rng_state()
        return {
            **{key: value.view(-1).view(torch.uint8).tolist() for key, value in state.items()},
            "scheduler": self.scheduler.state_dict(),
            "data": self.sampler.state_dict(),
        }


def names_in(folder: Path) -> set[str]:
    """Everything in a folder; what is neither a checkpoint nor `latest` is litter."""
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()
