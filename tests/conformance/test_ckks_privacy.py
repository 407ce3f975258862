"""circuit_privacy=40: what a data owner decrypts is the answer, planned noise, and nothing else of the weights.

Without the option everything here shows, which is why the option exists: the tests without it are the twins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import secureinfer as si
from secureinfer.backends.ckks.noise import PRIVACY, PRIVACY_MARGIN
from secureinfer.backends.ckks.params import from_options

from .ckks_pair import MODEL, OWNER, Frame, Pair

pytestmark = pytest.mark.needs("he")

X = torch.rand(1, 6, generator=torch.Generator().manual_seed(4))
RUNS = 8
OUTPUTS = 12
Slots = npt.NDArray[np.complex128]


class Squares(nn.Module):
    def __init__(self, seed: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h * h)


def compiled(**options: Any) -> si.Program:
    calibration = [(torch.rand(1, 6),) for _ in range(8)]
    return si.compile(Squares().eval(), (X,), backend="ckks", calibration=calibration, **options)


@pytest.fixture(scope="module")
def private() -> si.Program:
    return compiled(circuit_privacy=40)


@pytest.fixture(scope="module")
def bare() -> si.Program:
    return compiled()


class Decrypted:
    """What the data owner sees: real and imaginary parts of all slots, run by run. [runs, slots]"""

    def __init__(self, program: si.Program, *, runs: int, hidden: bool = True, same: bool = False) -> None:
        """hidden: False leaves the option's own step out. same: one ciphertext is sent over and over."""
        from secureinfer.backends.ckks.client import Client
        from secureinfer.backends.ckks.sealed import load
        from secureinfer.backends.ckks.server import Privacy

        self.slots: list[Slots] = []
        self.second: list[npt.NDArray[np.uint64]] = []
        seen, kept = self, dict[str, bytes]()

        def decrypt(client: Any, data: Any, peer: str) -> Any:
            context = client.context
            x, plain = load(context.new(), context.context, data, "a result", peer), context.api.Plaintext()
            count = context.parameters.degree * context.parameters.primes_at(0)
            seen.second.append(np.array([x[count + i] for i in range(count)], dtype=np.uint64))
            client._decryptor.decrypt(x, plain)
            seen.slots.append(np.array(context.encoder.decode_complex(plain)))
            return seen.slots[-1].real

        def again(frame: Frame) -> bytes:
            if frame.sender == OWNER and frame.address.phase == "online":
                first = kept.setdefault("input", frame.payload)
                return frame.payload[:44] + first[44:]
            return frame.payload

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Client, "decrypt", decrypt)
            if not hidden:
                patch.setattr(Privacy, "hide", lambda *_: None)
            with Pair(program, tamper=again if same else None, deadline=60) as pair:
                self.answers = np.stack([pair.infer(X)[0].double().numpy()[0] for _ in range(runs)])
                packing = pair.engines[MODEL]._common.packing
                context = pair.engines[MODEL]._common.context
                chain = context.context.first_context_data().parms().coeff_modulus()
                self.primes = [m.value() for m in chain[: context.parameters.primes_at(0)]]
        self.read = packing.outputs.places()
        everything = np.stack(self.slots)
        self.values = everything[:, self.read]
        unread = np.ones(everything.shape[1], dtype=bool)
        unread[self.read] = False
        self.others = everything[:, unread]


@pytest.fixture(scope="module")
def hidden(private: si.Program) -> Decrypted:
    return Decrypted(private, runs=RUNS)


@pytest.fixture(scope="module")
def shown(private: si.Program) -> Decrypted:
    """The twin: the private program, whose model owner leaves the hiding out."""
    return Decrypted(private, runs=3, hidden=False)


def planned_noise(program: si.Program) -> float:
    return float(program.options["noise"]) * 2.0 ** (PRIVACY + PRIVACY_MARGIN)


def planned_mask(program: si.Program) -> float:
    p = from_options(program.options)
    return 2.0 ** (p.first_bits - p.scale_bits - 3)


def exact() -> npt.NDArray[np.float64]:
    with torch.no_grad():
        return Squares().double().eval()(X.double()).numpy()[0]


def is_uniform(values: npt.NDArray[np.float64], most: float) -> bool:
    """Kolmogorov and Smirnov's test of values that are to be uniform in -most..most, at a level of about 1e-5."""
    ordered = np.sort(values.reshape(-1)) / (2 * most) + 0.5
    steps = np.arange(1, len(ordered) + 1) / len(ordered)
    return bool(np.abs(ordered - steps).max() < 2.5 / np.sqrt(len(ordered)))


def test_the_answers_are_within_the_error_that_was_planned(private: si.Program, hidden: Decrypted) -> None:
    assert np.abs(hidden.answers - exact()).max() < 1e-3
    assert planned_noise(private) < 1e-3


def test_the_noise_of_the_answers_is_as_wide_as_planned(private: si.Program, hidden: Decrypted) -> None:
    noise = planned_noise(private)
    assert is_uniform((hidden.values.real - exact()), noise * 1.001)


def test_without_it_the_noise_is_a_million_times_smaller(private: si.Program, shown: Decrypted) -> None:
    assert np.abs(shown.values.real - exact()).max() < planned_noise(private) * 2.0**-20


def test_the_noise_hides_what_is_left_of_the_weights_by_forty_bits(
    private: si.Program, shown: Decrypted
) -> None:
    """What the hiding covers: the deviation of all values, and what stands in all other places."""
    rest = max(np.abs(shown.others).max(), np.abs(shown.values.imag).max())
    assert rest < planned_mask(private) * 2.0**-40
    assert (
        np.std(shown.values.real, axis=0).max() < planned_noise(private) * 2.0**-30
    )  # float64 shows no more


def test_slots_and_imaginary_parts_that_are_not_read_are_uniform(
    private: si.Program, hidden: Decrypted
) -> None:
    most = planned_mask(private)
    for values in (hidden.others.real, hidden.others.imag, hidden.values.imag):
        assert is_uniform(values, most)
    means = hidden.others.real.mean(0)  # of a slot, over the runs
    assert is_uniform(hidden.others.real[0], most) and np.abs(means).max() < 6 * most / np.sqrt(3 * RUNS)


def test_without_it_sums_of_products_with_weights_stand_in_other_slots(bare: si.Program) -> None:
    """The twin, in the program that is compiled without the option: they are the same in every run, and far from zero."""
    seen = Decrypted(bare, runs=2)
    sums = seen.others.real
    assert np.abs(sums).max() > 1e-2
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-4)
    assert not is_uniform(sums, np.abs(sums).max())


def test_a_fold_under_the_mask_would_show_in_the_mean_over_many_answers() -> None:
    """What was found once: the mask is no wider than the modulus allows, so that sums below it show after 1/error^2 runs.
    The layout of a private program has none."""
    from secureinfer.backends.ckks.reading import Packing

    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(20, 16), Square(), nn.Linear(16, 3)).eval()
        program = si.compile(model, (torch.rand(1, 20),), backend="ckks", circuit_privacy=40)
        packing = Packing(program.graph, program.constants, program.options, from_options(program.options))
        for node in program.graph.nodes:
            if node.op == "linear" and node.attrs["stage"] == "outputs":
                plan = packing.plans[node.name]
                assert plan.blocks == 1 or plan.blocks * plan.stride == plan.source.slots


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


@pytest.mark.parametrize("planted", [False, True])
def test_no_copy_of_a_value_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """The mean of sixteen copies would have a quarter of the noise. planted: they are kept, as they once were."""
    from secureinfer.backends.ckks import model_owner

    if planted:
        monkeypatch.setattr(
            model_owner, "_read", lambda packing, group: [w >= 0 for w in packing.outputs.where]
        )
    model = nn.Linear(6, OUTPUTS).eval()  # a matrix whose blocks go round all slots
    program = si.compile(model, (X,), backend="ckks", circuit_privacy=40)
    seen = Decrypted(program, runs=1)
    where = program.constants["outputs.layout"].numpy()[0]
    with torch.no_grad():
        values = np.append(model(X)[0].numpy(), 0.0)[where]
    copies = where >= 0
    copies[seen.read] = False
    assert copies.sum() > OUTPUTS
    assert is_uniform((seen.slots[0].real - values)[copies], planned_mask(program)) is not planted


def test_one_ciphertext_gives_two_results_whose_second_components_have_nothing_in_common(
    private: si.Program,
) -> None:
    """The second component is what reveals weights to a data owner that knows the randomness of its own input."""
    seen = Decrypted(private, runs=2, same=True)
    first, second = (s.reshape(len(seen.primes), -1) for s in seen.second)
    for a, b, prime in zip(first, second, seen.primes, strict=True):
        difference = (a.astype(object) - b.astype(object)) % prime
        assert is_uniform(2.0 * difference.astype(np.float64) / prime - 1, 1.0)


def test_without_it_the_second_component_is_a_function_of_the_input_and_the_weights(
    bare: si.Program,
) -> None:
    seen = Decrypted(bare, runs=2, same=True)
    assert np.array_equal(*seen.second)


def test_a_batch_is_hidden_too_and_so_are_the_slots_of_samples_that_are_not_there() -> None:
    torch.manual_seed(5)
    model, x = nn.Linear(3, 2).eval(), torch.rand(300, 3)
    program = si.compile(model, (x,), backend="ckks", circuit_privacy=40, ckks={"layout": "batch"})
    slots: list[Slots] = []
    from secureinfer.backends.ckks.client import Client

    inner = Client.decrypt

    def decrypt(client: Any, data: Any, peer: str) -> Any:
        found = inner(client, data, peer)
        slots.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "decrypt", decrypt)
        with Pair(program, deadline=60) as pair, torch.no_grad():
            answer = pair.infer(x)[0]
            assert torch.allclose(answer, model(x), atol=1e-3)
            assert is_uniform((answer - model(x)).double().numpy(), planned_noise(program))
    assert len(slots) == 2
    for values, answer_of_zero in zip(slots, model.bias.tolist(), strict=True):
        assert is_uniform(values[300:] - answer_of_zero, planned_mask(program))
