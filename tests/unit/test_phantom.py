"""A Phantom has shape, dtype and device and no data, and is never silently wrong."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_parallel.pipeline.phantoms.errors import PhantomError
from lightning_parallel.pipeline.phantoms.foreign import ForeignParameter
from lightning_parallel.pipeline.phantoms.outside import shapes_only
from lightning_parallel.pipeline.phantoms.phantom import Phantom, bound
from lightning_parallel.pipeline.transport.tensor_meta import TensorMeta, describe, realize, summon

CPU = torch.device("cpu")


def phantom(*shape: int, dtype: torch.dtype = torch.float32) -> Phantom:
    return Phantom(torch.empty(shape, dtype=dtype, device="meta"), CPU, "the output of `fc1` (stage 0)")


@pytest.fixture
def foreign() -> ForeignParameter:
    return ForeignParameter(torch.nn.Parameter(torch.ones(3, 2)), CPU, "fc1.weight", (0,))


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (lambda h: h + 1, (2, 3, 4), torch.float32),
        (lambda h: torch.ones(4) * h, (2, 3, 4), torch.float32),
        (lambda h: h.transpose(0, 1).reshape(3, 8), (3, 8), torch.float32),
        (lambda h: h[:, ::2, None], (2, 2, 1, 4), torch.float32),
        (lambda h: h @ torch.ones(4, 5), (2, 3, 5), torch.float32),
        (lambda h: torch.cat([h, torch.ones(2, 1, 4)], 1), (2, 4, 4), torch.float32),
        (lambda h: torch.stack([h, h]).mean(0), (2, 3, 4), torch.float32),
        (lambda h: h > 0, (2, 3, 4), torch.bool),
        (lambda h: h.argmax(-1), (2, 3), torch.int64),
        (lambda h: h.to(torch.bfloat16), (2, 3, 4), torch.bfloat16),
        (lambda h: torch.zeros_like(h, dtype=torch.float64), (2, 3, 4), torch.float64),
        (lambda h: h.new_ones(5), (5,), torch.float32),
        (lambda h: torch.where(torch.ones(2, 3, 1, dtype=torch.bool), h, 0.0), (2, 3, 4), torch.float32),
        (lambda h: torch.nn.functional.layer_norm(h, (4,)), (2, 3, 4), torch.float32),
        (lambda h: h.chunk(2, -1)[1], (2, 3, 2), torch.float32),
        (lambda h: h.add_(1).mul_(2), (2, 3, 4), torch.float32),
        (lambda h: torch.einsum("btc,btc->bt", h, h), (2, 3), torch.float32),
    ],
)
def test_arithmetic_is_arithmetic_on_shapes(function, shape, dtype):
    result = function(phantom(2, 3, 4))
    assert isinstance(result, Phantom)
    assert (tuple(result.shape), result.dtype, result.device) == (shape, dtype, CPU)
    assert result.origin == "the output of `fc1` (stage 0)"


def test_what_does_not_depend_on_data_is_real():
    h = phantom(2, 3, 4)
    positions = torch.arange(h.shape[1], device=h.device).expand(h.size(0), -1)
    assert not isinstance(positions, Phantom)
    assert positions.tolist() == [[0, 1, 2]] * 2
    assert (h.dim(), h.numel(), len(h), h.is_floating_point(), h.stride()) == (3, 24, 2, True, (12, 4, 1))


def test_strides_are_kept():
    assert phantom(2, 3).t().stride() == (1, 3)
    assert not phantom(2, 3).t().is_contiguous()


@pytest.mark.parametrize(
    ("write", "operation"),
    [
        (lambda real, h: real.copy_(h), "copy_"),
        (lambda real, h: real.add_(h), "add_"),
        (lambda real, h: real.__setitem__((slice(None), 0), h[:, 0]), "copy_"),
        (lambda real, h: real.__setitem__(torch.tensor([0, 1]), h), "index_put_"),
        (lambda real, h: torch.add(h, 1, out=real), "add.out"),
        (lambda real, h: real.masked_fill_(h > 0, 0.0), "masked_fill_"),
        (lambda real, h: torch._foreach_add_([real], [h]), "_foreach_add_"),
    ],
)
def test_a_phantom_is_not_written_into_a_real_tensor(write, operation):
    real = torch.ones(2, 3)
    message = (
        rf"The step reads the output of `fc1` \(stage 0\), whose data this stage does not hold: `.*{operation}.*` "
    )
    with pytest.raises(PhantomError, match=message):
        write(real, phantom(2, 3))
    assert torch.equal(real, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda h: h.sum().item(), "item"),
        (lambda h: bool(h.sum() > 0), "bool"),
        (lambda h: float(h.sum()), "float"),
        (lambda h: int(h.sum()), "int"),
        (lambda h: h.tolist(), "tolist"),
        (lambda h: h.numpy(), "numpy"),
        (lambda h: [0, 1][h.sum().long()], "index"),
    ],
)
def test_a_phantoms_data_is_not_read(read, name):
    with pytest.raises(
        PhantomError, match=rf"whose data this stage does not hold: `{name}` reads its data\. Pass the value"
    ):
        read(phantom(2, 3))


@pytest.mark.parametrize("change", ["unsqueeze_", "t_", "squeeze_"])
def test_a_shape_is_not_changed_in_place(change):
    h = phantom(2, 1)
    with pytest.raises(
        PhantomError, match=rf"in place with `{change}`.* Use `{change[:-1]}`, which returns the result"
    ):
        getattr(h, change)(*([0] if change == "unsqueeze_" else []))


def test_a_shape_that_depends_on_data_is_refused():
    with pytest.raises(PhantomError, match=r"`aten\.nonzero\.default` has no answer from shapes alone"):
        phantom(2, 3).nonzero()


def test_a_bound_phantom_is_its_value_gradients_included():
    h = phantom(2, 3)
    h.value = torch.ones(2, 3, requires_grad=True)
    assert bound(h) is h.value
    assert h.sum().item() == 6.0
    real = torch.zeros(2, 3)
    real.copy_(h)
    assert torch.equal(real, torch.ones(2, 3))
    (h * 3).sum().backward()
    assert torch.equal(h.value.grad, torch.full((2, 3), 3.0))


def test_what_was_computed_before_binding_stays_unknown():
    h = phantom(2, 3)
    before = h + 1
    h.value = torch.ones(2, 3)
    with pytest.raises(PhantomError, match="`item` reads its data"):
        before.sum().item()


def test_an_unbound_phantom_beside_a_bound_one_stays_a_phantom():
    h, other = phantom(2, 3), phantom(2, 3)
    h.value = torch.ones(2, 3)
    assert isinstance(h + other, Phantom)
    assert bound(h + other) is not None and isinstance(h + other, Phantom)


@pytest.mark.parametrize(
    "use",
    [lambda p: p.pow(2).sum(), lambda p: p.norm(), lambda p: p * 2, lambda p: torch.ones(2) @ p.t(), lambda p: p.sum()],
)
def test_a_foreign_parameter_is_not_computed_with(use, foreign):
    message = r"uses parameter `fc1.weight` of stage 0, which this stage does not hold: .* uses it outside its module"
    with pytest.raises(PhantomError, match=message):
        use(foreign)


def test_a_foreign_parameter_can_be_grouped_and_asked(foreign):
    assert isinstance(foreign, torch.nn.Parameter) and isinstance(foreign, Tensor)
    assert (foreign.shape, foreign.ndim, foreign.numel(), foreign.dtype) == ((3, 2), 2, 6, torch.float32)
    assert foreign.requires_grad and foreign.grad is None and foreign.is_leaf
    optimizer = torch.optim.AdamW(
        [{"params": [foreign], "weight_decay": 0.1}, {"params": [torch.nn.Parameter(torch.ones(1))]}]
    )
    optimizer.zero_grad()
    foreign.requires_grad_(False)
    assert not foreign.requires_grad
    assert {foreign: 1}[foreign] == 1
    assert "parameter `fc1.weight` of stage 0" in repr(foreign)


def test_a_foreign_parameter_is_written_by_the_stage_that_holds_it(foreign):
    """What loads or averages weights does it on every rank; a stand-in takes part and holds nothing."""
    layer = torch.nn.Linear(2, 3)
    layer.weight = foreign
    layer.load_state_dict({"weight": torch.zeros(3, 2), "bias": torch.ones(3)})
    foreign.data.copy_(foreign.detach().lerp_(foreign.data.clone(), 0.5))
    assert layer.weight is foreign and torch.equal(layer.bias, torch.ones(3))
    with pytest.raises(PhantomError, match=r"uses parameter `fc1.weight` of stage 0, .* `aten.copy_.default` writes"):
        torch.ones(3, 2).copy_(foreign)


def test_a_module_with_a_foreign_parameter_can_be_moved_and_converted(foreign):
    layer = torch.nn.Linear(2, 3)
    layer.weight, foreign.has_gradient = foreign, True
    for convert in (torch.nn.Module.double, lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu")):
        convert(layer)
        assert layer.weight is foreign and foreign.dtype == foreign.meta.dtype == layer.bias.dtype
    assert foreign.requires_grad and foreign.dtype == torch.bfloat16


def test_a_foreign_parameter_equals_itself_alone(foreign):
    other = ForeignParameter(torch.ones(3, 2), CPU, "fc2.weight", (0,))
    assert torch.equal(foreign, foreign)
    assert not torch.equal(foreign, other) and not torch.equal(torch.ones(3, 2), foreign)


def test_lists_of_real_tensors_and_phantoms_are_taken_apart(foreign):
    """`torch._foreach_*`, as averages of weights use it: real ones are computed, stand-ins meet stand-ins."""
    real = torch.zeros(3, 2)
    torch._foreach_lerp_([foreign.detach(), real], [foreign.detach(), torch.ones(3, 2)], 0.25)
    assert torch.equal(real, torch.full((3, 2), 0.25))
    with pytest.raises(PhantomError, match=r"`aten\._foreach_add_\.List` writes it into a real tensor"):
        torch._foreach_add_([real, real], [torch.ones(3, 2), foreign.detach()])
    norms = torch._foreach_norm([real, foreign.detach()])
    assert norms[0] == real.norm() and isinstance(norms[1], Phantom)
    with pytest.raises(PhantomError, match=r"uses parameter `fc1.weight` of stage 0, .* `float` reads its data"):
        float(torch.stack(norms).norm())


def test_shapes_alone_may_be_asked_for(foreign):
    layer = torch.nn.Linear(2, 3)
    layer.weight = foreign
    with shapes_only():
        out = layer(torch.ones(5, 2))
    assert isinstance(out, Phantom) and out.shape == (5, 3)
    with pytest.raises(PhantomError, match="`linear` uses it outside its module"):
        layer(torch.ones(5, 2))


def test_a_phantom_is_not_copied():
    h = phantom(2, 3)
    assert copy.deepcopy({"h": h})["h"] is h
    assert repr(h) == "Phantom(shape=(2, 3), dtype=torch.float32, stands for the output of `fc1` (stage 0))"


def test_a_description_becomes_phantoms_of_the_same_structure():
    tree = {"h": torch.ones(2, 3).t(), "ids": (torch.zeros(2, dtype=torch.int64), None), "flag": True, "name": "x"}
    told = describe(tree)
    assert told["h"] == TensorMeta((3, 2), (1, 3), torch.float32)
    summoned = summon(told, CPU, "elsewhere")
    assert summoned["h"].stride() == (1, 3) and isinstance(summoned["h"], Phantom)
    assert summoned["ids"][0].dtype == torch.int64
    assert (summoned["ids"][1], summoned["flag"], summoned["name"]) == (None, True, "x")
    assert summon(told["h"], CPU, "elsewhere") is not summon(told["h"], CPU, "elsewhere")


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: torch.nn.functional.dropout(h, 0.5),
        lambda h: torch.rand_like(h),
        lambda h: h.bernoulli(0.5),
        lambda h: torch.normal(h, 1.0),
        lambda h: torch.randn_like(h.t()),
        lambda h: torch.randint_like(h, 7),
        lambda h: h.new_empty(5).uniform_(),
    ],
)
def test_a_draw_moves_the_generator_as_one_with_data_does(draw):
    torch.manual_seed(0)
    assert not isinstance(draw(torch.ones(4, 8)), Phantom)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert isinstance(draw(phantom(4, 8)), Phantom)
    assert torch.equal(torch.rand(3), expected)


# -- made real after all -----------------------------------------------------------------------------------------------


def of_a_unit(values: Tensor) -> tuple[Phantom, Callable]:
    """A Phantom of what a unit returned, and what fetches its value."""
    phantom = summon(describe(values), CPU, "the output of `unit` (stage 0)", "unit")
    return phantom, {("unit", 0): values}.get


def test_what_was_computed_is_computed_again_with_gradients():
    values = torch.tensor([[1.0, -2.0], [3.0, 4.0]], requires_grad=True)
    phantom, fetch = of_a_unit(values)
    low, high = torch.sigmoid(phantom * 2.0).chunk(2, dim=1)
    real = realize(torch.cat([high, low.detach()], dim=1), fetch)
    expected = torch.sigmoid(values * 2.0)
    torch.testing.assert_close(real, expected.flip(1))
    real.sum().backward()
    slope = (2.0 * expected * (1.0 - expected)).detach()
    torch.testing.assert_close(values.grad, slope * torch.tensor([0.0, 1.0]))


def test_a_list_that_grows_later_is_remembered_as_it_was():
    values = torch.ones(2)
    phantom, fetch = of_a_unit(values)
    features = [phantom, phantom * 2.0]
    stacked = torch.stack(features)
    features.append(phantom)
    assert torch.equal(realize(stacked, fetch), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))


def test_what_no_longer_holds_is_not_computed():
    values, mask = torch.ones(2), torch.ones(2)
    phantom, fetch = of_a_unit(values)
    masked, drawn, doubled = phantom * mask, torch.dropout(phantom, 0.5, True), phantom * 2.0
    mask.zero_()
    assert realize(masked, fetch) is None  # another mask
    assert realize(drawn, fetch) is None  # other random numbers
    assert torch.equal(realize(doubled, fetch), torch.full((2,), 2.0))
    later = phantom_of_bound(values)
    values.add_(1.0)
    assert realize(later, fetch) is None  # a block has written into what the Phantom stands for


def phantom_of_bound(values: Tensor) -> Phantom:
    """Something computed from a Phantom that got its value afterwards."""
    phantom, _ = of_a_unit(values)
    computed = phantom + 1.0
    phantom.bind(values)
    return computed


def test_values_of_inference_mode_can_be_bound():
    with torch.inference_mode():
        phantom, fetch = of_a_unit(torch.ones(2))
        assert torch.equal(realize(phantom * 3.0, fetch), torch.full((2,), 3.0))
