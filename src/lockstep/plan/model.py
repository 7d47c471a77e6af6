"""The plan: ordered buckets of named parameters, with a digest that ranks can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from lockstep.plan.caps import BucketCaps
from lockstep.plan.link import LinkModel

PLAN_FORMAT = 1


@dataclass(frozen=True)
class ParameterSpec:
    """Everything about a parameter that decides where its gradient travels.

    ``device`` is the kind and the ordinal within the module ("cuda:0" is the first GPU *this module* uses), so that
    ranks on different GPUs agree.  ``stride`` belongs here because gradients are packed in memory order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str = "cpu:0"
    stride: tuple[int, ...] | None = None
    sparse: bool = False

    @cached_property
    def num_elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel as one flat buffer, in packing order."""

    index: int
    parameters: tuple[ParameterSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @property
    def dtype(self) -> str:
        return self.parameters[0].dtype

    @property
    def device(self) -> str:
        return self.parameters[0].device

    @property
    def sparse(self) -> bool:
        return self.parameters[0].sparse

    @cached_property
    def num_elements(self) -> int:
        return sum(p.num_elements for p in self.parameters)

    @cached_property
    def num_bytes(self) -> int:
        return sum(p.num_bytes for p in self.parameters)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter in the flat buffer."""
        offsets, position = [], 0
        for parameter in self.parameters:
            offsets.append(position)
            position += parameter.num_elements
        return tuple(offsets)


@dataclass(frozen=True)
class Prediction:
    """What was expected of a plan when it was chosen for a measured link."""

    backward_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Plan:
    """Buckets in launch order.  Fixed before the first backward; saved with a checkpoint."""

    buckets: tuple[Bucket, ...]
    caps: BucketCaps = field(default_factory=BucketCaps)
    # "reversed": the reverse of declaration order; "observed": the order rank 0 saw gradients become ready in, or
    # read off its graph; "graph": the parts a compiled graph was cut into.
    order: str = "reversed"
    # Why these caps, where they were chosen by measurement. They are no part of the layout, hence not of the digest.
    link: LinkModel | None = None
    prediction: Prediction | None = None

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    @property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        return tuple(p for bucket in self.buckets for p in bucket.parameters)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def bucket_of(self, name: str) -> Bucket:
        """The bucket a parameter travels in."""
        for bucket in self.buckets:
            if name in bucket.names:
                return bucket
        raise KeyError(f"No bucket holds a parameter named {name!r}.")

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly when their gradients have the same layout and order."""
        layout = [[asdict(p) for p in bucket.parameters] for bucket in self.buckets]
        text = json.dumps([PLAN_FORMAT, layout], separators=(",", ":"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        data: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "order": self.order,
            "caps": asdict(self.caps),
            "buckets": [[asdict(p) for p in bucket.parameters] for bucket in self.buckets],
            "digest": self.digest,
        }
        if self.link is not None:
            data["link"] = self.link.as_dict()
        if self.prediction is not None:
            data["prediction"] = asdict(self.prediction)
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data = json.loads(text)
        if data.get("format") != PLAN_FORMAT:
            raise ValueError(
                f"This plan has format {data.get('format')!r}; this version reads {PLAN_FORMAT}. "
                "Build the plan anew, or load it with the version that wrote it."
            )
        caps, link, prediction = data["caps"], data.get("link"), data.get("prediction")
        plan = cls(
            buckets=tuple(
                Bucket(index, tuple(_spec_from_json(p) for p in parameters))
                for index, parameters in enumerate(data["buckets"])
            ),
            caps=BucketCaps(caps["cap_bytes"], caps["first_cap_bytes"], tuple(caps["per_bucket_bytes"])),
            order=data["order"],
            link=None if link is None else LinkModel.from_dict(link),
            prediction=None if prediction is None else Prediction(**prediction),
        )
        if plan.digest != data["digest"]:
            raise ValueError("This plan was changed after it was written: its digest does not match its buckets.")
        return plan

    def __str__(self) -> str:
        from lockstep.plan.table import plan_table

        return plan_table(self)


def _spec_from_json(data: dict[str, Any]) -> ParameterSpec:
    stride = data["stride"]
    return ParameterSpec(**{**data, "shape": tuple(data["shape"]), "stride": None if stride is None else tuple(stride)})
