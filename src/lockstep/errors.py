"""Exception types, and the functions that build their messages.

Every message says what happened, to which parameters (by name), on which rank, the likely cause, and the option
to change.  Where torch's DistributedDataParallel has a sentence that scripts and search engines know, ours
carries it too: those fixed phrases are part of the interface we stand in for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "BadHookResult",
    "CheckpointDamaged",
    "CheckpointFailed",
    "Disagreement",
    "GraphChanged",
    "LateGradient",
    "LockstepError",
    "NoCheckpoint",
    "NonFinite",
    "PeerFailed",
    "PeerLate",
    "PeerLost",
    "StoreSilent",
    "UnfinishedReduction",
    "UnreducedGradients",
]


class LockstepError(RuntimeError):
    """Base of all errors about ranks that are not in step."""


class Disagreement(LockstepError):
    """Ranks differ in something they must agree on.  ``values`` maps rank to what it has."""

    def __init__(self, message: str, values: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.values = dict(values or {})


class PeerLate(LockstepError):
    """Some ranks did not arrive before the deadline.  ``ranks`` says which."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerFailed(LockstepError):
    """Another rank raised; its words are quoted.  ``rank`` says which one, or None when it is not known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(PeerFailed):
    """Another rank is gone: killed, or ended.  ``rank``, ``host`` and ``pid`` say which one, as far as it is known."""

    def __init__(self, message: str, rank: int | None = None, *, host: str = "", pid: int | None = None) -> None:
        super().__init__(message, rank)
        self.host = host
        self.pid = pid


class StoreSilent(PeerLate):
    """The store through which ranks find each other did not answer in time."""


class NonFinite(LockstepError):
    """Gradients were NaN or Inf.  ``ranks`` says where, ``parameters`` in which gradients, as far as it is known."""

    def __init__(self, message: str, ranks: Sequence[int] = (), parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.parameters = tuple(parameters)


class UnfinishedReduction(LockstepError):
    """A backward left parameters without a reduced gradient."""


class LateGradient(LockstepError):
    """A parameter received another gradient after its bucket had left, and it could not be reduced by itself."""


class GraphChanged(LockstepError):
    """static_graph=True was promised, and the graph changed."""


class UnreducedGradients(LockstepError):
    """An optimizer was about to step on gradients that were not reduced."""


class BadHookResult(LockstepError, TypeError):
    """A communication hook returned something that cannot be used."""


class CheckpointFailed(LockstepError):
    """A checkpoint could not be saved; the one before it is whole.  ``rank`` says where it went wrong, if known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class CheckpointDamaged(LockstepError):
    """A checkpoint is not what was saved, and nothing of it was used.

    ``file`` is the damaged file, ``last_complete`` another checkpoint that can be loaded, if there is one.
    """

    def __init__(self, message: str, file: Path | None = None, last_complete: Path | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.last_complete = last_complete


class NoCheckpoint(LockstepError, FileNotFoundError):
    """There is no checkpoint at a path."""


@dataclass(frozen=True)
class ParameterPlace:
    """Where a parameter lives, for messages: its name, the class of the module that owns it, its bucket.

    ``position`` is its place in declaration order; only the sentence torch's users know prints it.
    """

    name: str
    owner: str
    bucket: int
    position: int

    def __str__(self) -> str:
        owner = f" ({self.owner})" if self.owner else ""
        return f"{self.name}{owner}, bucket {self.bucket}"


_MAX_LISTED = 20


def bullet_list(lines: Sequence[object], most: int = _MAX_LISTED) -> str:
    shown = [f"  - {line}" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"  - ... and {len(lines) - most} more")
    return "\n".join(shown)


def rank_table(values: Mapping[int, str]) -> str:
    """Rank and value, equal values folded into one line: ``rank 0, 2-3 | [4, 8] float32``."""
    folded: dict[str, list[int]] = {}
    for rank in sorted(values):
        folded.setdefault(values[rank], []).append(rank)
    heads = {value: "rank " + _ranges(ranks) for value, ranks in folded.items()}
    width = max((len(head) for head in heads.values()), default=0)
    return "\n".join(f"  {heads[value].ljust(width)} | {value}" for value in folded)


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        if number is not None:
            start = previous = number
    return ", ".join(parts)


# ---------------------------------------------------------------- a backward that did not reach every parameter

_UNFINISHED_HEAD = "Expected to have finished reduction in the prior iteration before starting a new one."

_UNFINISHED_CAUSES = """\
Likely causes and fixes:
  - The forward pass did not use them: enable unused parameter detection by passing the keyword argument \
`find_unused_parameters=True` to DistributedDataParallel, or static_graph=True if the set never changes.
  - They were used, but not in the loss: make sure all `forward` function outputs participate in calculating loss.
  - The output is a type in which tensors cannot be found: return a tuple, list, dict or dataclass.
  - The backward raised and was caught: call reset_sync_window() on the wrapper before the next step."""

_UNFINISHED_CAUSES_FINDING = """\
Since `find_unused_parameters=True` is enabled, parameters that the forward did not use are already accounted for; \
so likely causes are:
  - The output is a type in which tensors cannot be found, so the graph could not be searched: return a tuple, \
list, dict or dataclass; make sure all `forward` function outputs participate in calculating loss.
  - The backward raised and was caught: call reset_sync_window() on the wrapper before the next step."""

_UNFINISHED_STATIC = (
    _UNFINISHED_HEAD + " This error indicates that your training graph has changed in this iteration, e.g., one "
    "parameter is used in first iteration, but then got unused in the second iteration. this is not compatible "
    "with static_graph set to True."
)


def hooks_lost(lost: Sequence[ParameterPlace], *, rank: int) -> UnfinishedReduction:
    """Gradients came that nobody was told of."""
    names = ", ".join(f"{place.name} ({place.owner})" for place in lost[:8])
    return UnfinishedReduction(
        f"On rank {rank} the gradients of {len(lost)} parameters were not reduced, because the parameters have lost "
        f"their hooks: {names}{', ...' if len(lost) > 8 else ''}.\nLikely cause: their content was swapped with that "
        "of other tensors (torch.utils.swap_tensors, or set_swap_module_params_on_conversion with .to() or "
        "load_state_dict on the inner module).\nFix: do it on the wrapper, or before wrapping."
    )


def unfinished_reduction(
    missing: Sequence[ParameterPlace],
    *,
    rank: int,
    num_parameters: int,
    finds_unused: bool,
    static_graph: bool,
) -> UnfinishedReduction:
    """A window stayed open: the backward ended (or never ran to the end) before these parameters were ready."""
    if not missing:
        return UnfinishedReduction(
            f"{_UNFINISHED_HEAD} On rank {rank} every parameter had its gradient, but waiting for the reduction was "
            "interrupted (Ctrl-C, or a peer that failed), so the gradients are not all reduced.\n"
            "Fix: call reset_sync_window() on the wrapper, on all ranks, and repeat the step."
        )
    known = (
        f"Parameter indices which did not receive grad for rank {rank}: "
        + " ".join(str(place.position) for place in missing)
        + f"\nParameters which did not receive grad for rank {rank}: "
        + ", ".join(place.name for place in missing)
        + "\nThere is no need to set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL: "
        "the names are above."
    )
    if static_graph:
        fix = "Fix: build the wrapper with find_unused_parameters=True instead of static_graph=True."
        return UnfinishedReduction(f"{_UNFINISHED_STATIC}\n{known}\n{fix}\n{bullet_list(missing)}")
    causes = _UNFINISHED_CAUSES_FINDING if finds_unused else _UNFINISHED_CAUSES
    return UnfinishedReduction(
        f"{_UNFINISHED_HEAD}\n"
        f"On rank {rank}, the last backward left {len(missing)} of {num_parameters} parameters without a reduced "
        f"gradient:\n{bullet_list(missing)}\n{causes}\n{known}"
    )


def optimizer_before_reduction(
    missing: Sequence[ParameterPlace], *, rank: int, num_parameters: int
) -> UnreducedGradients:
    if not missing:
        return UnreducedGradients(
            f"Rank {rank}: the optimizer was about to step after a reduction that was interrupted. The step was "
            "stopped before any weight changed.\n"
            "Fix: call reset_sync_window() on the wrapper, on all ranks, and repeat the step."
        )
    return UnreducedGradients(
        f"Rank {rank}: the optimizer was about to step while the gradients of this window are not reduced: "
        f"{len(missing)} of {num_parameters} parameters received no gradient in the last backward, so their buckets, "
        f"and the buckets behind them, never left. The step was stopped before any weight changed.\n"
        f"{bullet_list(missing)}\n{_UNFINISHED_CAUSES}"
    )


def stepping_on_local_gradients(names: Sequence[str], *, rank: int) -> str:
    return (
        f"Rank {rank}: the optimizer steps on gradients that were accumulated without synchronisation (no_sync() or "
        f"require_backward_grad_sync=False) and never reduced, so ranks may drift apart: {', '.join(names[:5])}"
        f"{', ...' if len(names) > 5 else ''} ({len(names)} parameters). If this is meant (local SGD), filter this "
        "warning; otherwise run the last backward before the step outside no_sync()."
    )


# ---------------------------------------------------------------- a graph that is not what was promised


def graph_changed(place: ParameterPlace, *, rank: int, expected: int) -> GraphChanged:
    seen = "was not used in the first iteration" if expected == 0 else f"fired {expected} times in the first iteration"
    return GraphChanged(
        f"Your training graph has changed in this iteration, which static_graph=True promised it would not. On rank "
        f"{rank} the parameter {place} {seen} and received another gradient now.\n"
        "Fix: build the wrapper with find_unused_parameters=True instead of static_graph=True."
    )


def bad_hook_result(hook_name: str, got: str) -> BadHookResult:
    return BadHookResult(
        f"The communication hook {hook_name} cannot be used: callback must return a torch.futures.Future object, but "
        f"got {got}. The future holds the reduced buffer; a hook that communicates nothing returns a future whose "
        "set_result(bucket.buffer()) was called."
    )


def model_changed(name: str, what: str, *, rank: int) -> LockstepError:
    return LockstepError(
        f"Rank {rank}: the wrapped module was changed after it was wrapped: parameter {name} {what}. Its gradient "
        "would not be reduced.\nFix: change the module first and wrap it afterwards; or wrap it again."
    )


def late_gradient(names: Sequence[str], *, rank: int, hook: str) -> LateGradient:
    """Parameters got another gradient after their bucket had left, where that cannot be reduced by itself."""
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    why = (
        f"the communication hook {hook} may make something else of it than of the rest"
        if hook
        else "ranks of this process group have no way to tell each other"
    )
    return LateGradient(
        f"Parameters received a gradient from outside of the compiled graph, or in a second backward, after their "
        f"bucket had left, on rank {rank} or one of its peers; and "
        f"{why}. The gradients of this step are not valid.\nThe buckets hold {shown}.\n"
        "Likely cause: a parameter is used outside of the compiled graph as well (a penalty in the loss), in two "
        "reentrant checkpoints, or in a second backward.\n"
        "Fix: add the losses up and call backward once; or wrap the model with overlap='none'; or use no communication "
        "hook. To go on from here, call reset_sync_window() and zero_grad() on all ranks and repeat the step."
    )


COMPILED_AUTOGRAD = (
    "Compiled autograd does not go with native mixed precision or sparse gradients here: their results are of another "
    "kind than the gradients that it has traced. Turn it off in dynamo's config; compiled backwards reduce without it."
)
