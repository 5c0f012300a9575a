"""Layers without memory: what is computed later is what the constructor would have computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from trainkit.engine.deferred.record import Record
from trainkit.engine.deferred.values import Deferred
from trainkit.errors import TaskError


class Many(nn.Module):
    """Layers of many kinds, initialised in many ways."""

    def make(self) -> None:
        """Make them."""
        torch.manual_seed(3)
        self.table = nn.Embedding(10, 6, padding_idx=2)
        self.line = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        self.turned, self.cut = nn.Linear(6, 6), nn.Linear(6, 7)
        nn.init.orthogonal_(self.turned.weight)
        nn.init.trunc_normal_(self.cut.weight, std=0.02)
        nn.init.eye_(self.line[2].weight)
        self.place = nn.Parameter(torch.randn(1, 6) * 0.02)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
        )
        self.recurrent, self.half = nn.LSTM(4, 4), nn.Linear(3, 3).to(torch.bfloat16)
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.register_buffer("drawn", torch.rand(3))
        self.rates = 1 / 10 ** torch.linspace(0, 1, 4)
        self.table.weight.is_table = True  # type: ignore[attr-defined]
        self.apply(self.draw)
        with torch.no_grad():
            self.line[0].weight[2] = 0.5
            self.line[0].bias.copy_(torch.arange(6))

    def draw(self, module: nn.Module) -> None:
        """Initialise again, as transformers do."""
        if isinstance(module, nn.Linear) and len(module.weight) == 6:
            nn.init.normal_(module.weight, std=0.02)


def deferred(make: Callable[[], object], model: nn.Module) -> Deferred:
    """Make a model's layers without memory."""
    record = Record()
    with record.recording():
        make()
    return Deferred(model, record)


def test_values_are_the_same_bits() -> None:
    """Of parameters, buffers and other tensors;
    the random state afterwards, types, strides and shared weights too.
    """
    plain, late = Many(), Many()
    torch.manual_seed(1)
    plain.make()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    delayed = deferred(late.make, late)
    parameters = dict(late.named_parameters())
    assert all(parameter.is_meta for parameter in parameters.values())
    assert late.head.weight is late.table.weight and late.table.weight.is_table  # type: ignore[attr-defined]
    values = dict(delayed.values())
    assert torch.equal(torch.get_rng_state(), after)
    expected = dict(plain.named_parameters())
    assert values.keys() == expected.keys() == parameters.keys()
    for name, parameter in expected.items():
        assert torch.equal(values[name], parameter), name
        assert (values[name].dtype, values[name].stride()) == (
            parameter.dtype,
            parameter.stride(),
        ), name
        assert parameters[name].stride() == parameter.stride(), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(late.get_buffer(name), buffer), name
    assert torch.equal(late.rates, plain.rates)


def test_tensors_that_were_there_keep_their_values() -> None:
    """A weight that is copied from a file's tensor has its values;
    a buffer of __init__ is written when values are computed.
    """
    read, model = torch.arange(6.0).reshape(2, 3), nn.Module()
    model.register_buffer("own", torch.zeros(2))

    def make() -> None:
        model.line = nn.Linear(3, 2)
        model.line.load_state_dict({"weight": read, "bias": torch.ones(2)})
        model.own.normal_()

    torch.manual_seed(5)
    values = dict(deferred(make, model).values())
    assert torch.equal(values["line.weight"], read) and torch.equal(
        values["line.bias"], torch.ones(2)
    )
    torch.manual_seed(5)
    nn.Linear(3, 2)
    assert torch.equal(model.own, torch.zeros(2).normal_())


@pytest.mark.parametrize(
    "question", [Tensor.item, Tensor.tolist, lambda weight: bool((weight > 0).any()), Tensor.numpy]
)
def test_a_value_that_is_asked_for_is_refused(question: Callable[[Tensor], object]) -> None:
    """With what to do; afterwards torch is as it was."""
    before = (torch.manual_seed, nn.init.trunc_normal_)
    with pytest.raises(
        TaskError,
        match=r"needs the value of a tensor .* Python or numpy, or make these layers in __init__",
    ):
        deferred(lambda: question(nn.Linear(2, 2).weight.detach()), nn.Module())
    assert (torch.manual_seed, nn.init.trunc_normal_) == before


def test_other_errors_come_out() -> None:
    """An error of the user's own is raised as it is."""
    with pytest.raises(RuntimeError, match="reduction dim"):
        deferred(lambda: print(torch.randn(2, 3) @ torch.randn(2, 3)), nn.Module())


class Drawn(nn.Module):
    """Weights and a buffer from generators of its own, and from torch's."""

    def __init__(self, seeded: torch.Generator) -> None:
        super().__init__()
        self.seeded = seeded

    def make(self) -> None:
        """Make them."""
        own = torch.Generator().manual_seed(0)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(3, 3) for _ in range(5))
        nn.init.normal_(self.a.weight, generator=own)
        nn.init.trunc_normal_(self.b.weight, generator=own)
        nn.init.uniform_(self.b.bias, generator=self.seeded)
        self.register_buffer("drawn", torch.rand(3, generator=own))
        own.manual_seed(0)
        nn.init.normal_(self.c.weight, generator=own)
        self.seeded.manual_seed(7)
        nn.init.kaiming_uniform_(self.d.weight, generator=self.seeded)
        nn.init.uniform_(self.d.bias, generator=torch.manual_seed(5))
        self.e.weight.data.uniform_(generator=torch.default_generator)
        self.order = torch.randperm(4, generator=self.seeded)
        self.f = nn.Parameter(torch.randn(2, 2, generator=own))


def test_generators_of_ones_own_draw_the_same_numbers() -> None:
    """As often as values are computed: one that is seeded between draws, with the same seed too, and
    one that has drawn before; afterwards each has drawn what the constructor draws.
    """
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    plain, late = (Drawn(generator) for generator in generators)
    for generator in generators:
        torch.rand(2, generator=generator)
    torch.manual_seed(1)
    plain.make()
    torch.manual_seed(1)
    delayed = deferred(late.make, late)
    for _ in range(2):
        assert torch.equal(generators[0].get_state(), generators[1].get_state())
        values = dict(delayed.values())
        for name, parameter in plain.named_parameters():
            assert torch.equal(values[name], parameter), name
    assert torch.equal(late.drawn, plain.drawn) and torch.equal(late.order, plain.order)
    assert torch.equal(values["a.weight"], values["c.weight"])


def test_a_generators_state_after_a_draw_is_refused() -> None:
    """There was no draw yet that could have led to it."""

    def make() -> None:
        own = torch.Generator()
        weights = torch.empty(2).uniform_(generator=own)
        state = own.get_state()
        weights.uniform_(generator=own)
        own.set_state(state)
        weights.uniform_(generator=own)

    with pytest.raises(
        TaskError,
        match=r"sets the state of a torch\.Generator that was drawn from.* Use manual_seed",
    ):
        deferred(make, nn.Module())
