"""Seeds and streams: cryptographic, distinct for each party and each value, used once."""

import pytest
import torch

from secureinfer.backends.mpc.dealer import check_distinct
from secureinfer.backends.mpc.randomness import Seed, agree_seed
from secureinfer.errors import CorrelationError

SESSION = bytes(range(16))


def seed(key: bytes = b"k" * 32) -> Seed:
    return Seed(key, SESSION)


def test_two_parties_expand_one_seed_to_the_same_values() -> None:
    a, b = seed().stream(3, 7, 1, "r").tensor((5, 2)), seed().stream(3, 7, 1, "r").tensor((5, 2))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "other", [(4, 7, 1, "r"), (3, 8, 1, "r"), (3, 7, 2, "r"), (3, 7, 1, "s"), (-1, 7, 1, "r")]
)
def test_any_other_place_or_label_is_another_stream(other: tuple[int, int, int, str]) -> None:
    ours = seed().stream(3, 7, 1, "r").tensor((64,))
    assert int((ours == seed().stream(*other).tensor((64,))).sum()) == 0


def test_another_session_is_another_stream() -> None:
    theirs = Seed(b"k" * 32, bytes(16)).stream(3, 7, 1, "r").tensor((64,))
    assert int((seed().stream(3, 7, 1, "r").tensor((64,)) == theirs).sum()) == 0


def test_labels_cannot_be_confused_by_concatenation() -> None:
    assert not torch.equal(
        seed().stream(0, 0, 1, "1r").tensor((4,)), seed().stream(0, 0, 11, "r").tensor((4,))
    )


def test_a_stream_is_given_once() -> None:
    s = seed()
    s.stream(0, 1, 0, "r")
    with pytest.raises(CorrelationError, match="one value"):
        s.stream(0, 1, 0, "r")


def test_an_erased_seed_gives_nothing_and_holds_nothing() -> None:
    s = seed()
    s.erase()
    with pytest.raises(CorrelationError, match="erased"):
        s.stream(0, 0, 0, "r")
    assert bytes(s._key) == b""


def test_seed_hides_its_key() -> None:
    assert "k" * 8 not in repr(seed()) and "6b6b" not in repr(seed())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_values_are_uniform_over_the_whole_range(dtype: torch.dtype) -> None:
    x = seed().stream(0, 0, 0, "u").tensor((200_000,), dtype).double()
    low, high = float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
    counts = torch.histc((x - low) / (high - low), 16, 0, 1)
    expected = x.numel() / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < 60  # chi-square, 15 degrees: P < 1e-6


def test_seed_depends_on_both_nonces_the_session_the_digest_and_the_role() -> None:
    def agree(**change: object) -> Seed:
        given = {
            "first": b"a" * 32,
            "second": b"b" * 32,
            "session": SESSION,
            "manifest_digest": "00",
            "role": "x",
            **change,
        }
        return agree_seed(given.pop("first"), given.pop("second"), **given)  # type: ignore[arg-type]

    seeds = [
        agree(),
        agree(first=b"c" * 32),
        agree(second=b"c" * 32),
        agree(session=bytes(16)),
        agree(manifest_digest="01"),
        agree(role="y"),
    ]
    check_distinct(seeds)  # raises if any two are equal
    assert agree().same_as(agree())


def test_dealer_refuses_two_parties_with_one_seed() -> None:
    """Planted fault: the dealer's seed with one party is known to another."""
    with pytest.raises(CorrelationError, match="one seed"):
        check_distinct([seed(), seed()])
