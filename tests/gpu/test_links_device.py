"""The children of ``doctor --links`` on two or more real GPUs: NCCL, peer copies, and faults that must be found.

Needs torch, numpy and pytest only; with the toolkit's own dependencies beside them its side runs too. ``-s`` shows the
times.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sm120_cells.links.pattern import device_bytes, host_bytes

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA GPUs; torch sees {COUNT}"),
]

ROOT = Path(__file__).parents[2]
FAULTY = ROOT / "tests" / "integration" / "cells" / "plugins" / "links_faulty.py"
KIB, MIB = 1 << 10, 1 << 20
COPIES = {
    "task": "peer",
    "ranks": 1,
    "sizes": [[1, 2], [4, 2], [257, 2], [8 * KIB, 2], [64 * KIB + 3, 2], [4 * MIB, 2], [64 * MIB, 1]],
    "timed": 64 * MIB,
}
SUMS = {
    "task": "reduce",
    "sizes": [
        *([size, dtype, 3] for size in (8 * KIB, 64 * KIB) for dtype in ("bfloat16", "float32")),
        [64 * KIB + 2, "bfloat16", 2],
        [4 * MIB + 4, "float32", 2],
        [64 * MIB, "float32", 2],
    ],
    "timed": [[8 * KIB, 100], [64 * KIB, 100], [MIB, 30], [16 * MIB, 10], [256 * MIB, 4]],
    "blocks": 3,
}
SHORT = {**SUMS, "ranks": 2, "sizes": [[8 * KIB, "bfloat16", 2], [64 * KIB, "float32", 2]], "timed": [[8 * KIB, 10]]}
DEFAULT: Mapping[str, str] = {}
THROUGH_HOST = {"NCCL_P2P_DISABLE": "1"}
FAR = {"NCCL_P2P_LEVEL": "SYS"}
THROUGH_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def uuids() -> list[str]:
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(COUNT)]


def child(
    folder: Path, gpus: Sequence[str], request: Mapping[str, Any], variables: Mapping[str, str], fault: str = ""
) -> tuple[list[dict[str, Any]], int, str]:
    """Messages, exit code and everything printed."""
    path = folder / "request.json"
    (folder / "store").unlink(missing_ok=True)
    limits = {"device": "cuda", "start": 180, "quiet": 60, "seed": 0, "parent": os.getpid()}
    path.write_text(json.dumps({**limits, "store": str(folder / "store"), **request}), encoding="utf-8")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "SM120_"))},
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "PYTHONPATH": str(ROOT / "src"),
        **variables,
        **({"SM120_LINKS": str(FAULTY), "LINKS_FAULT": fault} if fault else {}),
    }
    words = [sys.executable, "-m", "sm120_cells.links", str(path)]
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"links": 1,')]
    return messages, done.returncode, done.stdout


def show(*words: object) -> None:
    sys.stdout.write("\n" + " ".join(map(str, words)))


def of(messages: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["event"] == event]


def right(messages: list[dict[str, Any]], code: int, text: str, ranks: int) -> None:
    assert code == 0, text[-3000:]
    assert of(messages, "wrong") == []
    assert sorted(m["rank"] for m in of(messages, "done")) == list(range(ranks))
    assert all(m["checks"] > 0 and m["wrong"] == 0 for m in of(messages, "done"))


@pytest.mark.parametrize("size", [1, 5, 4096, 3 * MIB + 1])
def test_the_device_computes_the_pattern_of_the_host(size: int) -> None:
    for seed in (0, 1, 12345, 2**40):
        assert np.array_equal(device_bytes(size, seed, torch.device("cuda", 1)).cpu().numpy(), host_bytes(size, seed))


def test_a_child_sees_the_gpus_it_is_given_in_that_order(tmp_path: Path) -> None:
    order = uuids()[1::-1]
    messages, code, text = child(tmp_path, order, {"task": "look", "ranks": 1}, {})
    assert code == 0, text
    (machine,) = of(messages, "machine")
    assert [gpu["uuid"] for gpu in machine["gpus"]] == order
    assert machine["cuda"]
    assert machine["nccl"]


@pytest.mark.parametrize("pair", list(combinations(range(COUNT), 2)), ids=str)
def test_copies_are_right_between_every_pair(tmp_path: Path, pair: tuple[int, int]) -> None:
    messages, code, text = child(tmp_path, [uuids()[index] for index in pair], COPIES, {})
    right(messages, code, text, 1)
    direct = torch.cuda.can_device_access_peer(*pair)
    assert of(messages, "pair")[0]["direct"] == direct
    assert any("kernel copy" in m["step"] for m in of(messages, "at")) == direct
    show(pair, {name: f"{value / 1e9:.1f} GB/s" for name, value in of(messages, "bandwidth")[0]["by"].items()})


@pytest.mark.parametrize("ranks", sorted({2, COUNT}))
@pytest.mark.parametrize("variables", [DEFAULT, FAR, THROUGH_HOST, THROUGH_SOCKETS], ids=str)
def test_sums_are_right_with_every_setting(tmp_path: Path, variables: Mapping[str, str], ranks: int) -> None:
    messages, code, text = child(tmp_path, uuids()[:ranks], {**SUMS, "ranks": ranks}, variables)
    right(messages, code, text, ranks)
    timings = of(messages, "timing")
    assert len(timings) == 5 * ranks
    assert all(0 < m["median"] <= m["p99"] for m in timings)
    for m in [m for m in timings if m["rank"] == 0]:
        times = f"{m['median'] * 1e6:.1f} µs, 99 % within {m['p99'] * 1e6:.1f} µs"
        show(dict(variables), f"{ranks} ranks", f"{m['bytes']} bytes", times)


def test_a_copy_of_zeros_is_found(tmp_path: Path) -> None:
    messages, code, _ = child(tmp_path, uuids()[:2], {**COPIES, "sizes": [[8 * KIB, 1]]}, {}, "zeros")
    assert code == 0
    found = [m["where"] for m in of(messages, "wrong")]
    assert {where["kind"] for where in found} == {"zeros"}
    assert all(where["source_sound"] for where in found)


def test_a_sum_that_is_off_by_one_is_found(tmp_path: Path) -> None:
    messages, _, _ = child(tmp_path, uuids()[:2], SHORT, {}, "off-by-one")
    (wrong,) = of(messages, "wrong")
    assert (wrong["rank"], wrong["where"]["first"], wrong["where"]["count"]) == (1, 7, 1)


def test_a_kernel_that_spins_for_a_rank_that_never_comes_is_killed(tmp_path: Path) -> None:
    messages, code, text = child(tmp_path, uuids()[:2], {**SHORT, "quiet": 15}, {}, "one-hangs")
    assert code == 1
    (hung,) = of(messages, "hung")
    assert hung["ranks"][0][1].startswith("all-reduce of 8192 bytes"), text[-3000:]
    assert of(messages, "stuck") == []
    messages, code, text = child(tmp_path, uuids()[:2], SHORT, {})  # and the GPUs are as good as before
    right(messages, code, text, 2)


def test_a_rank_that_dies_is_told_at_once(tmp_path: Path) -> None:
    messages, code, _ = child(tmp_path, uuids()[:2], {**SHORT, "quiet": 600}, {}, "dies")
    assert code == 1
    assert (1, -11) in [(m["rank"], m["code"]) for m in of(messages, "lost")]


def test_the_toolkit_chooses_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psutil", "packaging", "rich"):
        pytest.importorskip(name)

    def part(name: str) -> Any:
        """A module of the toolkit, whose types are checked under another Python."""
        return importlib.import_module(f"sm120.{name}")

    config, links, examine = part("config"), part("host.links"), part("host.links.examine")
    monkeypatch.setattr(config, "_current", config.resolve({}, {"SM120_HOME": str(tmp_path)}))
    monkeypatch.setattr(part("console").Console, "_current", None)
    run = part("runs").Run.start(part("state").State.resolve(), "doctor", ["doctor", "--links"])
    bench = part("host.links.bench").Bench(python=Path(sys.executable), run=run, device="cuda", variables={})
    gpu = part("host.facts").Gpu
    cards = [gpu(index=index, uuid=uuid, name="card", bus_id="") for index, uuid in enumerate(uuids())]
    machine = examine.Machine.of(examine.look(bench, "here"), cards, (), "driver")
    console = part("console").Console.create()
    report = examine.measure(bench, machine, "here", console)
    console.table("copies", links.PAIR_COLUMNS, report.pair_rows())
    console.table("settings", links.COLUMNS, report.rows())
    assert report.chosen is not None, report.as_json()
    assert report.peer_memory_trusted
    assert [finding.id for finding in report.findings()][-1] == "links-setting"
