"""One wrap for all tests of the server: building it is what they cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import LlamaForCausalLM

from speccompile import Speculator
from speccompile.lowering import kernels
from speccompile.lowering.kernels import Kernels
from support import serving
from support.serving import Client


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    return serving.model()


@pytest.fixture(scope="session")
def spec(target: LlamaForCausalLM) -> Iterator[Speculator]:
    with serving.speculator(target) as spec:
        yield spec


@pytest.fixture(scope="session")
def client(spec: Speculator) -> Iterator[Client]:
    client = Client(serving.service(spec))
    yield client
    assert spec.engine.idle and spec.engine.capacity().free_slots == serving.SLOTS
    client.service.close()


@pytest.fixture(scope="session")
def exact_client(target: LlamaForCausalLM) -> Iterator[Client]:
    """Its steps run on the C++ ops, so log-probabilities have the same bits whichever KV a request reuses."""
    assert kernels.load_cpu_ops() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.lowering.backends.Eager.choose_kernels", lambda *_: Kernels(True, "for the tests"))
        spec = serving.speculator(target)
    with spec:
        client = Client(serving.service(spec))
        yield client
        client.service.close()
