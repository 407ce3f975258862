"""Nothing that is written holds a CKKS key, an input or what was decrypted, and the key reaches no disk.

As test_nothing_written.py: real parties with every logger at DEBUG answer, refuse inputs and end with a model owner that
dies; then all that any process wrote is searched. While the engines work, each process also notes what it has open for
writing. A second session plants a key in the log, in a file that is gone again and in one that stays, and an error with
decrypted values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from .test_nothing_written import World, watched

pytestmark = [
    pytest.mark.needs("he"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

COLUMNS = 12

CALLER = r"""
import base64, os, pathlib, sys, traceback
import numpy as np, torch
import secureinfer as si
from secureinfer.session.client import Session
from secureinfer.session.local import LocalParties

columns = int(sys.argv[1])
fault = pathlib.Path(os.environ["RECORDING_FAULT"])

def given():
    return torch.from_numpy(np.frombuffer(sys.stdin.buffer.read(4 * columns), np.float32).reshape(1, columns).copy())

def told(call):
    try:
        call()
        print("no error")
    except Exception as error:
        print(repr(error), str(error), error.args, vars(error), flush=True)
        traceback.print_exc(file=sys.stdout)

class Squares(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(columns, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        h = self.first(x)
        return self.second(h * h)

def opened():
    return Session(parties.program, parties.settings, engine="recording_ckks:make")

x, beyond = given(), given()
model = Squares().eval()
program = si.compile(model, torch.ones(1, columns), backend="ckks", calibration=[(torch.rand(1, columns) * 2 - 1,)])
parties = LocalParties(program, engine="recording_ckks:make", threads=1)
with opened() as session:
    answer = session.infer(x)
    torch.testing.assert_close(answer, model(x), rtol=1e-2, atol=1e-2)
    with (pathlib.Path(os.environ["RECORDS"]) / "caller").open("w") as file:
        file.write(f"output {answer.detach().numpy().tobytes().hex()}\n")
    report = session.report()
    print(report.to_dict(), report, repr(report), session, vars(session), program, program.plan)
    told(lambda: session.infer(beyond))
    told(lambda: session.infer(x / 0 * 0))
    fault.write_text("model_owner:die")
    told(lambda: session.infer(x))
    told(lambda: session.infer(x))
print("clean", flush=True)
sys.stdin.buffer.read(1)
with opened() as session:
    fault.write_text("data_owner:plant")
    told(lambda: session.infer(x))
parties.close()
print("planted", flush=True)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    rng = np.random.default_rng()
    given = [rng.uniform(low, high, COLUMNS).astype(np.float32) for low, high in ((0.1, 1), (1e5, 1e6))]
    with watched(tmp_path_factory, CALLER, [COLUMNS], given) as made:
        yield made


def opened(world: World) -> set[str]:
    """Files on a disk that a process had open for writing while its engine worked: without those that the search looks at
    anyway, and those that are memory alone.
    """
    lines = {line for file in world.records.parent.glob("*.open") for line in file.read_text().splitlines()}
    expected = (
        str(world.records),
        str(world.folder / "processes"),
        str(world.folder / "stderr"),
        "/dev/",
        "/memfd:seal",
    )
    return {line for line in lines if not line.startswith(expected)}


def test_nothing_that_is_written_holds_a_key_or_a_value_and_what_is_planted_is_found(world: World) -> None:
    notes = list(world.records.parent.glob("*.open"))
    assert len(notes) == 2 and any("/memfd:seal" in file.read_text() for file in notes)  # it was looked at
    assert opened(world) == set()
    world.gather()
    kinds = {*world.secrets.chunks.values()}
    assert kinds == {"input", "output", "decrypted", "secret key", "private key", "token"}
    assert world.search() == {}

    out = (world.folder / "stdout").read_text()
    for said in ("RangeError", "InputError", "PeerError", "the session has ended", "'online'"):
        assert said in out, said
    assert "no error" not in out
    names = [file.name for file in world.folder.rglob("*") if file.is_file()]
    assert (
        len([name for name in names if name.endswith(".log")]) >= 1 + 1 + 2
    )  # the caller, a daemon, two workers

    found = world.planted()  # the twin
    assert found.keys() == {"secret key"}, found
    assert found["secret key"] > {"forgotten.bin", "stderr"}
    assert any(Path(name).parent == world.folder / "tmp" for name in opened(world))
    assert "unexpected ValueError" in (world.folder / "stdout").read_text()
