"""Parameters as views of one joined tensor: what stays as it was, and what is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from huggingface_hub import save_torch_model
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from speccompile.utils.joined_weights import JoinedWeights
from speccompile.utils.torch_private import StorageReference

PATHS = ["q.weight", "k.weight"]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"q": nn.Linear(4, 6), "k": nn.Linear(4, 2)})


def values(model: nn.Module, paths: list[str]) -> list[torch.Tensor]:
    return [model.get_parameter(path).detach() for path in paths]


def join(model: nn.Module, paths: list[str] = PATHS, *, in_use: Any = ()) -> torch.Tensor:
    joined = JoinedWeights(model, in_use)
    assert joined.refusal(paths, values(model, paths)) is None
    return joined.join(paths, [])


def test_parameters_keep_identity_name_and_values() -> None:
    model = module()
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    joined = join(model)
    assert joined.shape == (8, 4) and torch.equal(joined, torch.cat([before[path][1] for path in PATHS]))
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and parameter.requires_grad
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("saver", ["accelerate", "hub", "safetensors"])
def test_all_weights_of_a_joined_model_are_saved(saver: str, tmp_path: Path) -> None:
    """These take weights of one storage for tied ones, and leave out all but one of them."""
    model = module()
    joined = join(model)
    if saver == "accelerate":
        Accelerator(cpu=True).save_model(model, tmp_path)
    elif saver == "hub":
        save_torch_model(model, tmp_path)
    else:
        save_model(model, str(tmp_path / "model.safetensors"))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert torch.equal(torch.cat([saved[path] for path in PATHS]), joined)
    torch.save(model["k"].state_dict(), tmp_path / "part.pt")
    assert (tmp_path / "part.pt").stat().st_size < 4000


def test_a_joined_tensor_is_found_again_and_ends_with_its_parts() -> None:
    model = module()
    address = join(model).data_ptr()
    again = JoinedWeights(model)
    assert again.join(PATHS, []).data_ptr() == address == model["q"].weight.data_ptr()
    reference = StorageReference(again.join(PATHS, []).untyped_storage())
    del again
    gc.collect()
    assert reference.storage() is not None
    model["q"].weight.data = model["q"].weight.data.clone()
    assert reference.storage() is not None
    model["k"].weight.data = model["k"].weight.data.clone()
    assert reference.storage() is None


def test_there_is_one_copy_and_changes_in_place_are_followed() -> None:
    model = module()
    alias = model["k"].weight.detach()
    joined = JoinedWeights(model).join(PATHS, [alias])
    with torch.no_grad():
        model["q"].weight.fill_(1.0)
        model["k"].weight.data.fill_(2.0)
    assert (joined[:6] == 1).all() and (joined[6:] == 2).all() and (alias == 2).all()
    # Its mark of a change is still the parameter's.
    before = alias._version
    model["k"].weight.detach_().add_(1)
    assert alias._version == before + 1


def test_a_joined_model_trains() -> None:
    model, other = module(), module()
    joined = join(model)
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        sum(layer(torch.ones(1, 4)).square().sum() for layer in each.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert torch.equal(joined[:6], model["q"].weight)


def test_a_joined_model_is_saved_copied_and_loaded(tmp_path: Path) -> None:
    model, other = module(), module()
    joined = join(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, twin.parameters(), other.parameters()))
    with torch.no_grad():
        other["q"].weight.zero_()
    model.load_state_dict(other.state_dict())
    assert (joined[:6] == 0).all() and (twin["q"].weight != 0).all()


def test_weights_that_lie_side_by_side_do_not_move() -> None:
    model = module()
    first = join(model)
    again = join(model, in_use={model["q"].weight.data_ptr()})
    assert again.data_ptr() == first.data_ptr() and again.shape == first.shape


def shared_memory(model: nn.Module) -> Any:
    model.register_buffer("other", model["q"].weight.detach()[1:])


def tied(model: nn.Module) -> Any:
    model["k"].weight = model["q"].weight


def transposed(model: nn.Module) -> Any:
    model["q"].weight = nn.Parameter(torch.randn(4, 6).t())


def other_dtype(model: nn.Module) -> Any:
    model["k"].weight = nn.Parameter(torch.randn(2, 4, dtype=torch.float64))


def of_inference(model: nn.Module) -> Any:
    with torch.inference_mode():
        model["k"].weight = nn.Parameter(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shared_memory, "share memory"),
        (tied, "occurs twice"),
        (transposed, "not plain"),
        (other_dtype, "dtypes differ"),
        (of_inference, "not plain"),
    ],
)
def test_weights_that_cannot_move_are_refused(change: Callable[[nn.Module], Any], reason: str) -> None:
    model = module()
    change(model)
    assert reason in str(JoinedWeights(model).refusal(PATHS, values(model, PATHS)))


def test_weights_that_other_executables_read_stay_where_they_are() -> None:
    model = module()
    refusal = JoinedWeights(model, {model["k"].weight.data_ptr()}).refusal(PATHS, values(model, PATHS))
    assert "another speculator" in str(refusal)


def test_a_weight_is_joined_once() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 2) for name in "abc"})
    joined = JoinedWeights(model)
    joined.join(["a.weight", "b.weight"], [])
    others = ["b.weight", "c.weight"]
    assert "joined with others" in str(joined.refusal(others, values(model, others)))


def test_what_steps_read_must_be_the_parameter() -> None:
    """A rank's part, or a copy, is another tensor."""
    model = module()
    copies = [value.clone() for value in values(model, PATHS)]
    assert "model's own" in str(JoinedWeights(model).refusal(PATHS, copies))
    assert "model's own" in str(JoinedWeights().refusal(PATHS, copies))
