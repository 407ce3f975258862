"""A CrypTen program between real processes over mutual TLS: a logistic regression on two parties' data, three parties."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from secureinfer.transport.tls import make_certificates

ROOT = Path(__file__).parents[2]
NAMES = ("p0", "p1", "p2", "dealer")

PROGRAM = """
import json, sys, torch
from pathlib import Path
from secureinfer.transport.limits import Limits
from secureinfer.transport.mesh import Member, mesh
from secureinfer.transport.tls import Identity, load_credentials

name, folder, ports = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
role = lambda n: "dealer" if n == "dealer" else "data_owner"
# the dealer listens for all, so it comes first
members = [Member(Identity(role(n), n), "127.0.0.1", ports[n]) for n in ("dealer", "p0", "p1", "p2")]
me = Identity(role(name), name)
credentials = load_credentials(me, folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}.key")
tokens = {n: n.encode().ljust(32, b"!") for n in ports}
parties = ["p0", "p1", "p2"]
limits = Limits(60.0, 20.0, 1 << 28)
with mesh(name, members, credentials, session_id=b"s" * 16, tokens=tokens, limits=limits, timeout=60) as links:
    from secureinfer.backends.mpc.live import crypten_party, serve
    if name == "dealer":
        print(json.dumps({"dealt": serve(parties, links, session_id=b"s" * 16)}))
    else:
        from secureinfer.backends.mpc.runtime import crypten
        rank = parties.index(name)
        with crypten_party(rank, parties, links, dealer="dealer", session_id=b"s" * 16):
            # private data: this process has its own file and no other's
            own = torch.tensor(json.loads((folder / f"{name}.json").read_text())) if rank < 2 else None
            shape = (40, 4)
            blocks = [crypten.cryptensor(own if rank == i else torch.zeros(shape), src=i) for i in range(2)]
            data = crypten.cat(blocks)
            x, y = data[:, :3], data[:, 3:]
            w = crypten.cryptensor(torch.zeros(3, 1), src=0)
            for _ in range(8):
                w = w - x.t().matmul(x.matmul(w).sigmoid() - y) * (3.0 / 80)
            opened = w.get_plain_text()
        sent = {peer: link.total().bytes_sent for peer, link in links.items()}
        print(json.dumps({"w": opened.flatten().tolist(), "sent": sent}))
"""


@pytest.mark.slow
def test_a_logistic_regression_is_trained_over_mutual_tls(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    truth = torch.tensor([[2.0], [-3.0], [1.0]])
    data = []
    for i in range(2):
        x = torch.randn(40, 3, generator=generator)
        rows = torch.cat([x, (x @ truth > 0).float()], dim=1)
        (tmp_path / f"p{i}.json").write_text(json.dumps(rows.tolist()))
        data.append(rows)
    make_certificates(tmp_path, {"data_owner": ["p0", "p1", "p2"], "dealer": ["dealer"]})
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
        ports = {n: s.getsockname()[1] for n, s in zip(NAMES, held, strict=True)}
    (tmp_path / "program.py").write_text(PROGRAM)
    processes = {
        name: subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), name, str(tmp_path), json.dumps(ports)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for name in NAMES
    }
    try:
        out = {name: p.communicate(timeout=180) for name, p in processes.items()}
    finally:
        for p in processes.values():
            p.kill()
    for name, p in processes.items():
        assert p.returncode == 0, f"{name}: {out[name][1]}"
    results = {name: json.loads(text) for name, (text, _) in out.items()}
    assert results["dealer"]["dealt"] > 100
    weights = [torch.tensor(results[n]["w"]).reshape(3, 1) for n in NAMES[:3]]
    assert all(torch.equal(w, weights[0]) for w in weights)
    rows = torch.cat(data)
    x, y = rows[:, :3], rows[:, 3:]
    plain = torch.zeros(3, 1)
    for _ in range(8):
        plain = plain - x.t() @ (torch.sigmoid(x @ plain) - y) * (3.0 / 80)
    assert float((plain - weights[0]).abs().max()) < 0.05
    assert float(((x @ weights[0] > 0).float() == y).float().mean()) > 0.93
