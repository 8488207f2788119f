"""Shares of a machine's energy add up to the whole, whenever each is read."""

import os
import subprocess
import sys
import time

import pytest

from carbonopt.energy import share
from carbonopt.energy.share import CoreShare


def test_shares_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read at the same moments, to the last bit: here of 4 cores of which the first is busy."""
    clock, busy = iter(range(100)), {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0}
    monkeypatch.setattr(share, "_busy_s", lambda: dict(busy))
    monkeypatch.setattr(share.time, "monotonic", lambda: float(next(clock) // 3))  # as many calls as shares
    parts = [CoreShare(cores, range(4)) for cores in ((0,), (1,), (2, 3))]
    busy[0] = 1.0
    for part in parts:
        part.add(15.0, 4.0)
    assert [part.cpu_kwh for part in parts] == pytest.approx([15 * 1.1 / 1.4, 15 * 0.1 / 1.4, 15 * 0.2 / 1.4])
    assert [part.ram_kwh for part in parts] == [1.0, 1.0, 2.0]
    busy[3] = 0.5
    for part in parts:
        part.add(15.0, 4.0)
        assert part.ram_kwh in (1.0, 2.0), "the same reading once more"
        part.add(24.0, 8.0)
    assert sum(part.cpu_kwh for part in parts) == pytest.approx(24.0, rel=1e-12)
    assert sum(part.ram_kwh for part in parts) == pytest.approx(8.0, rel=1e-12)


def test_where_the_kernel_tells_nothing_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "_busy_s", dict)
    part = CoreShare((0,), range(4))
    time.sleep(0.01)
    part.add(8.0, 4.0)
    assert (part.cpu_kwh, part.ram_kwh) == (2.0, 1.0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_busy_core_has_more() -> None:
    """As this kernel tells, where it does."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    shares = CoreShare((first,), (first, second)), CoreShare((second,), (first, second))
    spin = f"import os, time; os.sched_setaffinity(0, [{first}]); end = time.time() + 2\nwhile time.time() < end: pass"
    began = share._busy_s()
    subprocess.run([sys.executable, "-c", spin], check=True)
    if share._busy_s() == began:
        pytest.skip("this kernel doesn't count what cores do")
    for part in shares:
        part.add(1.0, 1.0)
    assert shares[0].cpu_kwh + shares[1].cpu_kwh == pytest.approx(1.0, rel=0.02)
    assert share._busy_s()[first] - began[first] > 1.5
