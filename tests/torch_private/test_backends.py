"""Backends: one test for each private name; when torch moves one, the failing test says which."""

from __future__ import annotations

import pytest
import torch
from tracing import joint_graph

from lockstep import torch_private as private

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_aot_backend() -> None:
    model = torch.nn.Linear(3, 2)
    graph = joint_graph(model, torch.ones(1, 3))
    assert any(node.op == "output" for node in graph.nodes)


test_aot_backend_parts = test_aot_backend


def test_unwrap_backend() -> None:
    plain = torch._dynamo.lookup_backend("aot_eager")
    assert private.unwrap_backend(plain) == (plain, {})
    wrapped = torch._TorchCompileWrapper("aot_eager", None, {"some": 1}, None)
    assert private.unwrap_backend(wrapped) == (plain, {"options": {"some": 1}})


def test_register_backend() -> None:
    def a_backend_for_tests(gm, inputs):
        return gm

    private.register_backend(a_backend_for_tests, "a_backend_for_tests")
    private.register_backend(a_backend_for_tests, "a_backend_for_tests")  # twice is once
    assert torch._dynamo.lookup_backend("a_backend_for_tests") is a_backend_for_tests
