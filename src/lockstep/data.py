"""The position in the data: which samples a run has seen, so that a resumed one goes on with the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

__all__ = ["ResumableSampler"]


class ResumableSampler(Sampler[int]):
    """Hands each rank its share of every epoch, and knows how far the run is.

        sampler = ResumableSampler(dataset, seed=0)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
        for epoch in range(sampler.epoch, num_epochs):
            sampler.set_epoch(epoch)
            for batch in sampler.batches(loader):
                ...

    A loader with workers draws indices ahead of what the loop has seen, so it is ``batches`` that counts, as it hands
    batches out.  The position is the number of samples that all ranks have seen together, so it means the same for any
    number of ranks: the rest of an epoch is dealt out anew, each sample once.

    Args:
        source: the dataset, or its length.
        shuffle: another order in each epoch, by ``seed`` and the epoch; the same on all ranks.
        drop_last: leave out what cannot be dealt out evenly; otherwise samples from the start of the epoch fill it up.
        rank: this rank, and ``world`` their number; those of the default process group if not given.
    """

    def __init__(
        self,
        source: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if in_group else 0
        self.world = world if world is not None else dist.get_world_size() if in_group else 1
        self.num_samples = int(source) if isinstance(source, Integral) else len(source)  # type: ignore[arg-type]
        if self.num_samples < 1:
            raise ValueError(f"there are {self.num_samples} samples; at least 1 is needed")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank} in a world of {self.world}")
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.position = 0  # samples of this epoch that all ranks together have seen
        self._num_drawn = 0
        self._is_counted = False
        self._has_ended = False  # this epoch, in this process

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one that is under way goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self.position, self._num_drawn, self._has_ended = epoch, 0, 0, False

    # ---------------------------------------------------------------- what is left of the epoch

    def __len__(self) -> int:
        """Count the samples that this rank still gets in this epoch."""
        left = max(0, self.num_samples - self.position)
        return left // self.world if self.drop_last else -(-left // self.world)

    def __iter__(self) -> Iterator[int]:
        begin, num_left = self.position, len(self)
        order = self._order()
        for number in range(num_left):
            self._num_drawn += 1
            yield int(order[(begin + number * self.world + self.rank) % self.num_samples])

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % (1 << 63))
        return torch.randperm(self.num_samples, generator=generator)

    def batches(self, loader: Iterable[Any], batch_size: int | None = None) -> Iterator[Any]:
        """Iterate a loader over this sampler, counting what is handed out; ``batch_size`` if the loader has none."""
        sampler = getattr(loader, "batch_sampler", None)
        size = batch_size or getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError("the loader does not say how large its batches are; pass batch_size=")
        if getattr(loader, "in_order", True) is False and getattr(loader, "num_workers", 0) > 1:
            raise ValueError(
                "the loader hands batches out in whichever order its workers have them (in_order=False), so that no "
                "position says which samples were seen; leave in_order=True"
            )
        if self._has_ended:
            raise RuntimeError(
                f"Epoch {self.epoch} has been handed out to its end. Begin the next one with "
                f"sampler.set_epoch({self.epoch + 1}), on all ranks."
            )
        end = self.position + len(self) * self.world
        self._has_ended = self.position == end
        if self._has_ended:
            return
        self._is_counted = True
        has_begun = False
        try:
            for batch in self._iterate(loader):
                if not has_begun and not self._num_drawn:
                    raise RuntimeError(
                        "The loader has not drawn from this sampler, so there is nothing to count. Give the sampler to "
                        "the loader: DataLoader(dataset, batch_size=..., sampler=sampler)."
                    )
                has_begun = True
                self.position = min(end, self.position + size * self.world)
                self._has_ended = self.position == end
                yield batch
            self._has_ended = True  # also where the loader leaves out a last batch that is not full
        finally:
            self._is_counted, self._num_drawn = False, 0

    def _iterate(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begin an epoch, or go on with one: a loader draws a random number when it begins, which a run that was not
        interrupted did long ago.
        """
        if self.position == 0:
            return iter(loader)
        with torch.random.fork_rng(devices=[]):
            return iter(loader)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on all ranks."""
        if self._num_drawn and not self._is_counted:
            raise RuntimeError(
                "The position in the data is not known: indices were drawn, but a loader draws ahead of the loop. "
                "Iterate with `for batch in sampler.batches(loader)`."
            )
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; with another dataset, seed or order it would mean something else, and is refused."""
        mine = {"num_samples": self.num_samples, "seed": self.seed, "shuffle": self.shuffle}
        missing = [key for key in ("epoch", "position", *mine) if key not in state]
        if missing:
            raise ValueError(f"This is not the state of a ResumableSampler: it has no {', '.join(missing)}.")
        differing = [
            f"{key} is {value!r}, and was {state[key]!r}" for key, value in mine.items() if state[key] != value
        ]
        if differing:
            raise ValueError(f"This is not the data of the saved run: {'; '.join(differing)}.")
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or position < 0:
            raise ValueError(f"This is no position in the data: epoch {epoch}, {position} samples seen.")
        self.epoch, self.position = epoch, position
        self._num_drawn, self._has_ended = 0, False
