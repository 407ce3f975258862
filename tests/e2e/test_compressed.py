"""A quantised model between real parties: the answer of the module, int8 in the model owner's file and nowhere else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import secureinfer as si


class Small(nn.Module):
    """Every kind of layer that has an int8 form."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.line = nn.Conv1d(6, 4, 3, padding=1)
        self.image, self.norm = nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        words = self.line(self.table(ids).mT).relu()
        seen = self.norm(self.image(x + words[..., None])).relu()
        return self.head(seen.mean((-1, -2)))


def test_a_quantised_model_gives_its_answer_between_three_parties(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Small().eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    small, report = si.compress(model, [si.Quantize()])
    assert len(report.transforms[0].changed) == 4
    ids, x = torch.randint(0, 12, (2, 5)), torch.randn(2, 4, 5, 5)
    program = si.compile(small, (ids, x), backend="mpc", protocol="crypten")
    assert sum(e.dtype == "int8" for e in program.graph.edges.values()) == 4
    program.save(tmp_path / "p.si")
    with si.local_session(si.Program.load(tmp_path / "p.si")) as session:
        for seed in (1, 2):
            g = torch.Generator().manual_seed(seed)
            ids, x = torch.randint(0, 12, (2, 5), generator=g), torch.randn(2, 4, 5, 5, generator=g)
            with torch.no_grad():
                expected = small(ids, x)
            # Weights are rounded to 2**-17, over up to 18 terms of a few units in each of four layers.
            assert float((session.infer(ids, x) - expected).abs().max()) < 1e-3
