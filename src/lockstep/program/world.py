"""What a loss function and a model can see of Python: found once, looked at before every step.

A program was made for the world as it was then: numbers in a closure, a configuration, a buffer or a module that was
replaced, hooks.  Another world means another program.  Containers are found by walking from the model and the loss
function, the nearest first; what they hold is compared by value where it is a plain number or word, and by identity
where it is not.  Of libraries only the functions are compared that the model and the loss name.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

from lockstep.program.code import modules_of, reads_of
from lockstep.program.held import attributes_of, memory
from lockstep.program.libraries import NOT_LOOKED_INTO, depth_left, is_library, root_of
from lockstep.program.look import PLAIN, Look
from lockstep.program.moving import place_look
from lockstep.shard import ShardedModule

_MOST_DEPTH = 8
_MOST_LOOKS = 20_000  # besides the model's own modules; what lies further away than so many containers is data
_MOST_WALKED = 256  # entries of a container; of a longer tuple or dict they are compared, and not walked into
_MOST_ENTRIES = 4096  # a still longer one, and any longer list (a history of losses), is data: compared by identity
_MOST_COMPARED = 50_000  # entries of all containers, besides what the model's own modules hold
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STRUCTURE = ("_parameters", "_buffers", "_modules", *_HOOKS)
# What every module has; the rest of its attributes are the program's, also those with a name like _this.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_MOST_BYTES = 4096  # of an array: a larger one is data
_OF_THE_COMPILER = ("__dynamo", "_torchdynamo")  # attributes that it gives to functions when they are first called
_LONG = (dict, tuple, types.MappingProxyType)
_Read = Callable[[], list[Any]]


class World:
    """All that is seen from a model and a loss function."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._roots = (model, loss)
        self._find()

    def _find(self) -> None:
        self._seen: set[int] = set()
        self._looks: list[Look] = []
        self._labels: list[str] = []
        self._tensors: list[tuple[weakref.ref[Tensor], str]] = []  # held by the program alone, and freed with it
        self._modules: dict[int, tuple[types.ModuleType, set[str]]] = {}  # and what is named of each
        self._num_compared = 0  # entries of containers
        self._names: set[str] = set()  # of methods of tensors that the program may call
        self._waiting: deque[tuple[Any, int, str]] = deque()
        for root in self._roots:
            for module in root.modules() if isinstance(root, nn.Module) else ():  # of these there may be any number
                self._walk(module, 0, "")
        most = len(self._looks) + _MOST_LOOKS
        self._waiting.extendleft([(root, 0, "") for root in reversed(self._roots)])
        while self._waiting and len(self._looks) < most:
            self._walk(*self._waiting.popleft())
        self._waiting.clear()
        for holder, names in self._modules.values():
            is_installed = is_library(holder.__name__)
            known = [name for name in sorted(names) if name in vars(holder) or not is_installed]
            self._looks.append(Look(partial(_of_library if is_installed else _of_module, holder, tuple(known))))
            self._labels.append(holder.__name__)
        self._looks.append(Look(partial(_of_library, Tensor, tuple(sorted(self._names)))))
        self._labels.append("torch.Tensor")
        self._now = self._read()

    def values(self) -> Hashable:
        """The world as it is now; what is new in it is looked at from now on."""
        if self._read() != self._now:
            self._find()
        return self._now

    def changed(self, before: Hashable) -> str:
        """Say where anything is not what it was, among what was looked at then; empty if nothing is."""
        assert isinstance(before, tuple)
        now = self._read()
        pairs = zip(self._labels, before, now, strict=False)
        return next((label for label, old, new in pairs if old != new), "") if now != before else ""

    def versions(self) -> dict[int, tuple[int, str]]:
        """How often each tensor that is neither a parameter nor a buffer was written to, and who holds it."""
        model = self._roots[0]
        known = {memory(t) for t in (*model.parameters(), *model.buffers())}  # a part of one counts with it
        alive = [(t, label) for reference, label in self._tensors if (t := reference()) is not None]
        return {id(t): (t._version, label) for t, label in alive if not t.is_inference() and memory(t) not in known}

    def objects(self) -> list[Any]:
        """What is compared by identity: whoever keeps ``values`` keeps these, or another object may get the number."""
        return [value for look in self._looks for value in look.objects() if type(value) not in PLAIN]

    def _read(self) -> tuple[Hashable, ...]:
        return tuple([look.value() for look in self._looks])

    # ---------------------------------------------------------------- what there is to look at

    def _walk(self, value: Any, depth: int, around: str) -> None:
        if isinstance(value, Tensor) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._tensors.append((weakref.ref(value), around))
            marks = partial(_of_tensor, weakref.ref(value))
            self._looks.append(Look(marks))
            self._labels.append(f"{around}: an attribute of a tensor" if around else "an attribute of a tensor")
            self._waiting.extend([(entry, depth + 1, around) for entry in marks()])
        if type(value) in PLAIN or isinstance(value, (Tensor, types.ModuleType)) or depth > _MOST_DEPTH:
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if not isinstance(value, nn.Module):
            depth = _MOST_DEPTH - depth_left(value, _MOST_DEPTH - depth)
            if depth > _MOST_DEPTH:
                return
        label = (
            type(value).__name__ if isinstance(value, nn.Module) or not around else f"{around}: {type(value).__name__}"
        )
        for read, inner in _containers(value):
            if read is not list:  # what is only passed through cannot change
                is_module = isinstance(value, nn.Module)
                self._num_compared += 0 if is_module else len(read())
                if self._num_compared > _MOST_COMPARED and not is_module:
                    continue  # data: known by identity to whoever holds it
                self._looks.append(Look(read, _quick(read)))
                self._labels.append(label)
            further = depth if isinstance(value, (nn.Module, type)) else depth + 1
            self._waiting.extend([(entry, further, label) for entry in inner])
        if isinstance(value, types.FunctionType):
            names = reads_of(value.__code__).names
            self._names.update([name for name in names if hasattr(Tensor, name)])
            for module in modules_of(value):
                self._name(module, names, depth + 1, label)
        elif isinstance(value, type) and issubclass(value, nn.Module) and is_library(value.__module__):
            self._name_of_library(value)

    def _name(self, module: types.ModuleType, names: Iterable[str], depth: int, label: str) -> None:
        """Note what the program reads of a module, and of modules in it."""
        _, known = self._modules.setdefault(id(module), (module, set()))
        new = [name for name in names if name not in known]
        known.update(new)
        for name in new:
            value = vars(module).get(name)
            if isinstance(value, types.ModuleType):
                self._name(value, names, depth, label)
            elif not is_library(module.__name__):
                self._waiting.append((value, depth, label))

    def _name_of_library(self, kind: type) -> None:
        """Note the functions that the methods of a library's module call, of that library."""
        for function in _functions_of(kind):
            reads = reads_of(function.__code__)
            own = sys.modules.get(function.__module__)
            if own is not None:
                self._name(own, reads.globals, 0, "")
            for module in modules_of(function):
                self._name(module, reads.names, 0, "")


def _quick(read: _Read) -> Callable[[], Iterable[Any]] | None:
    """A faster way to all that is read there, and more."""
    if not isinstance(read, partial) or read.func not in _QUICK:
        return None
    return partial(_QUICK[read.func], *read.args)


def _containers(value: Any) -> Iterator[tuple[_Read, list[Any]]]:
    """Ways to look into ``value``, each with what is in there now."""
    if isinstance(value, type):
        if root_of(value.__module__) not in NOT_LOOKED_INTO:
            look = partial(_of_class, value)
            yield look, look()
        if issubclass(value, nn.Module) and is_library(value.__module__):
            yield partial(_functions_of, value), []
        yield list, [type(value)]
    elif isinstance(value, nn.Module):
        hooks = [hook for name in _HOOKS for hook in vars(value)[name].values()]
        marks = [mark for p in value._parameters.values() if p is not None for mark in attributes_of(p).values()]
        yield partial(_structure_of, value), [*value._modules.values(), *value._buffers.values(), *hooks, *marks]
        is_ours = type(value).__module__.startswith("lockstep") and not isinstance(value, ShardedModule)
        if not (is_ours or "_orig_mod" in value._modules):
            look = partial(_of_the_program, value)
            yield look, look()
            yield list, list(type(value).__mro__)
    elif isinstance(value, types.FunctionType):
        look = partial(_seen_by, value, reads_of(value.__code__).globals, value.__closure__ or ())
        yield look, look()
    elif isinstance(value, types.MethodType):
        yield list, [value.__self__, value.__func__]
    elif isinstance(value, types.BuiltinMethodType) or type(value).__name__ == "cython_function_or_method":
        yield list, [getattr(value, "__self__", None)]
    elif isinstance(value, (staticmethod, classmethod)):
        yield list, [value.__func__]
    elif isinstance(value, property):
        yield list, [value.fget]
    elif isinstance(value, partial):
        yield list, [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, ContextVar):
        look = partial(_of_variable, value)
        yield look, look()
    elif isinstance(value, (dict, list, tuple, set, deque, types.MappingProxyType)):
        if len(value) <= (_MOST_ENTRIES if isinstance(value, _LONG) else _MOST_WALKED):
            look = partial(_items, value)
            yield look, look() if len(value) <= _MOST_WALKED else []
    elif (place := place_look(value)) is not None:
        yield place, []
    elif callable(getattr(type(value), "__array__", None)):  # of its class: a __getattr__ may answer with any error
        if getattr(value, "nbytes", _MOST_BYTES) < _MOST_BYTES and hasattr(type(value), "tobytes"):
            yield partial(_bytes_of, value), []
    else:
        slots = _slots_of(type(value))
        # Asked of its classes, as a __getattr__ of its own may answer with any error.
        has_entries = any("__dict__" in vars(kind) for kind in type(value).__mro__)
        if has_entries:
            look = partial(_of_object, value)
            yield look, look()
        if slots:
            look = partial(_of_slots, value, slots)
            yield look, look()
        if slots or has_entries:
            yield list, list(type(value).__mro__)


def _of_class(kind: type) -> list[Any]:
    """What a class holds; of one that is installed only its values, since its functions are many."""
    is_installed = is_library(kind.__module__)
    return [
        value
        for name, value in vars(kind).items()
        if (not name.startswith("__") or _is_operator(name, value))
        and not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))
        and not (is_installed and (callable(value) or hasattr(value, "__get__")))
    ]


def _is_operator(name: str, value: Any) -> bool:
    """Whether it is a function that Python calls for a program, ``__getitem__`` say; none that makes objects."""
    return isinstance(value, types.FunctionType) and name not in ("__init__", "__new__", "__post_init__", "__repr__")


# What every module is called by; its other methods are no part of a step.
_CALLED = ("__call__", "_call_impl", "_wrapped_call_impl")


def _functions_of(kind: type) -> list[types.FunctionType]:
    """The functions that a library's class of modules has now."""
    found = [vars(kind).get(name) for name in _CALLED] if kind is nn.Module else list(vars(kind).values())
    return [value for value in found if isinstance(value, types.FunctionType) and value.__name__ != "__init__"]


def _of_module(module: types.ModuleType, names: tuple[str, ...]) -> list[Any]:
    return [vars(module).get(name) for name in names]


def _of_library(holder: types.ModuleType | type, names: tuple[str, ...]) -> list[Any]:
    """Its functions and classes alone: what else a library holds is its own."""
    found = map(vars(holder).get, names)
    return [value if callable(value) else None for value in found]


def _of_variable(variable: ContextVar[Any]) -> list[Any]:
    return [variable.get(None)]


def _bytes_of(array: Any) -> list[Any]:
    return [array.tobytes()]


def _slots_of(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        if root_of(base.__module__) not in NOT_LOOKED_INTO:
            found += [slots] if isinstance(slots, str) else list(slots)
    return tuple(found)


def _of_slots(value: Any, slots: tuple[str, ...]) -> list[Any]:
    return [getattr(value, name, None) for name in slots]


def _structure_of(module: nn.Module, marks_of: Callable[[Tensor], dict[str, Any]] = attributes_of) -> list[Any]:
    entries = vars(module)
    found: list[Any] = [type(module)]
    for name in _STRUCTURE:
        if held := entries[name]:
            found += (name, *held.values())
    for parameter in entries["_parameters"].values():
        if parameter is not None and vars(parameter):
            found += _flat(marks_of(parameter))
    return found


def _all_of_structure(module: nn.Module) -> list[Any]:
    return _structure_of(module, vars)


def _of_the_program(module: nn.Module) -> list[Any]:
    own = vars(module).items()
    return [v for name, v in own if name not in _OF_EVERY_MODULE and not name.startswith("_lockstep")]


def _all_of_module(module: nn.Module) -> Iterable[Any]:
    return vars(module).values()


def _of_tensor(reference: weakref.ref[Tensor]) -> list[Any]:
    """What Python knows of a tensor: whether it has a gradient, and its attributes."""
    tensor = reference()
    return [] if tensor is None else [tensor.requires_grad, *_flat(attributes_of(tensor))]


def _of_object(value: Any) -> list[Any]:
    """What an object holds now, in the dict that it has now, and of which class it is now."""
    return [type(value), *_items(vars(value))]


def _flat(entries: Mapping[str, Any]) -> list[Any]:
    return [*entries.keys(), *entries.values()]


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, (dict, types.MappingProxyType)) else list(value)


def _seen_by(function: types.FunctionType, names: tuple[str, ...], cells: Any) -> list[Any]:
    known = function.__globals__
    found = [known.get(name) for name in names]
    for cell in cells:
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)  # not filled yet
    found += function.__defaults__ or ()
    if function.__kwdefaults__:
        found += function.__kwdefaults__.values()
    if function.__dict__:  # it may come to have attributes later
        own = {name: v for name, v in function.__dict__.items() if not name.startswith(_OF_THE_COMPILER)}
        found += _items(own) if own else ()
    found.append(function.__code__)
    return found


# Where most looks go: by the way to what counts, the way to all that is there.
_QUICK: dict[Callable[..., Any], Callable[..., Iterable[Any]]] = {
    _structure_of: _all_of_structure,
    _of_the_program: _all_of_module,
}
