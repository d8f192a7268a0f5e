"""Where the time of each rank's steps went, and which ranks the others wait for.

A rank that is slow does not wait: the others wait for it, inside messages. So what counts is what a rank spends outside
of them, on its data and on its own computation. On a GPU the host does not wait for the device, and its times say where
the *host* was; a trace (``mpdp bench train --trace``) shows the device.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..comm.base import Communicator

_SLOWER = 1.2  # times the median of all ranks
_LEAST_SECONDS = 1e-3  # more than the median: what rank 0 writes, and what a system does beside, is less
_NAME_BYTES = 64  # of a host's name


@dataclass
class StepTimes:
    """Seconds of the updates that this rank has done, added up, but for the first, which prepares much.

    Attributes:
        steps: how many; ``-1`` before the first.
        total: from asking for the data to the end of the update.
        data: of these, waiting for data.
        messages: of these, in messages and waiting for other ranks.
    """

    steps: int = -1
    total: float = 0.0
    data: float = 0.0
    messages: float = 0.0

    def add(self, total: float, data: float, messages: float) -> None:
        """Count one update. **Local.**"""
        self.steps += 1
        if self.steps == 0:
            return
        self.total += total
        self.data += data
        self.messages += messages

    def gather(self, comm: Communicator) -> list[dict[str, Any]]:
        """Return a row a rank: ``rank, host``, and in seconds a step ``step, data, compute, messages``.

        **Collective.**
        """
        width = 3 + _NAME_BYTES // 8
        every = np.zeros(comm.size * width, dtype=np.float64)
        mine = every[comm.rank * width : (comm.rank + 1) * width]
        mine[:3] = np.array([self.total, self.data, self.messages]) / max(self.steps, 1)
        name = platform.node().encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        mine[3:] = np.frombuffer(name, dtype=np.float64)
        if comm.size > 1:
            comm.all_gather(every, [rank * width for rank in range(comm.size + 1)], lane="urgent")
        rows = []
        for rank, values in enumerate(every.reshape(comm.size, width)):
            total, data, messages = values[:3].tolist()
            host = values[3:].tobytes().rstrip(b"\0").decode(errors="replace")
            seconds = {"step": total, "data": data, "compute": total - data - messages, "messages": messages}
            rows.append({"rank": rank, "host": host, **{k: round(v, 7) for k, v in seconds.items()}})
        return rows


def stragglers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line about each rank that the others wait for.

    **Local.** Such a rank spends 1.2 times as long outside of messages as the median rank, and 1 ms more.

    Args:
        rows: as :meth:`StepTimes.gather` returns them.

    Example:
        >>> rows = [dict(rank=r, host="a", step=0.02, data=0.0, compute=c, messages=0.02 - c)
        ...         for r, c in enumerate((0.01, 0.019, 0.01))]
        >>> stragglers(rows)
        ['rank 1 (a) is slow: 19.0 ms a step outside of messages, the median rank 10.0 ms; it computes for 9.0 ms more']
    """
    if len(rows) < 2:
        return []
    own = [row["data"] + row["compute"] for row in rows]
    median = statistics.median_low(own)
    found = []
    for row, seconds in zip(rows, own):
        if seconds > _SLOWER * median and seconds - median > _LEAST_SECONDS:
            more = {
                name: row[name] - statistics.median_low([r[name] for r in rows])
                for name in ("data", "compute")
            }
            reason = "waits for its data" if more["data"] > more["compute"] else "computes"
            found.append(
                f"rank {row['rank']} ({row['host']}) is slow: {seconds * 1e3:.1f} ms a step outside of messages, the "
                f"median rank {median * 1e3:.1f} ms; it {reason} for {max(more.values()) * 1e3:.1f} ms more"
            )
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as text, milliseconds a step, stragglers marked. **Local.**"""
    slow = {int(line.split()[1]) for line in stragglers(rows)}
    width = max([4, *(len(row["host"]) for row in rows)])
    lines = [f"rank {'host':<{width}}     step     data  compute messages  (ms a step)"]
    for row in rows:
        numbers = " ".join(f"{row[name] * 1e3:8.2f}" for name in ("step", "data", "compute", "messages"))
        lines.append(
            f"{row['rank']:>4} {row['host']:<{width}} {numbers}{'  slow' if row['rank'] in slow else ''}"
        )
    return "\n".join(lines)
