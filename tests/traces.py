"""What every trace file must be, whatever the transport: parsed, and checked event by event."""

import json
import re


def load(path, ranks, chunks=None):
    """Return the trace after checking its form: metadata, rows, nesting, and the messages of each step."""
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes) == list(range(ranks))
    assert all(name.startswith(f"rank {rank} of {ranks} ") for rank, name in processes.items())
    for rank in range(ranks):
        own = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        rows = {}
        for event in own:
            start = round(event["ts"] * 1000)
            span = (start, start + round(event["dur"] * 1000), event)
            rows.setdefault(names[rank, event["tid"]], []).append(span)
        for spans in rows.values():
            check_nesting(spans)
        check_steps(rows, chunks)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    return trace


def check_nesting(spans):
    """Check that of two events of a row one lies in the other, or behind it."""
    open_until = []
    for start, stop, event in sorted(spans, key=lambda span: (span[0], -span[1])):
        assert stop >= start, event
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or stop <= open_until[-1], event
        open_until.append(stop)


def check_steps(rows, chunks):
    """Check that each step holds its phases in order, and every message lies in one; each chunk travels once in it."""
    steps = [span for span in rows["compute"] if span[2]["name"].startswith("step ")]
    assert steps
    numbers = [int(event["name"].split()[1]) for _, _, event in sorted(steps, key=lambda span: span[0])]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    messages = [
        span for row, spans in rows.items() if row.split(",")[0] in ("bulk", "urgent") for span in spans
    ]
    found = 0
    for start, stop, _ in steps:
        phases = sorted((a, b, event["name"]) for a, b, event in rows["compute"] if start <= a and b <= stop)
        inner = [name for _, _, name in phases if not name.startswith("step ")]
        assert inner[-2:] == ["backward", "optimizer"]
        assert set(inner[:-2]) <= {"forward", "loss", "backward"}
        inside = [span for span in messages if start <= span[0] and span[1] <= stop]
        found += len(inside)
        travelled = [
            (int(event["name"].split()[1]), event["args"]["bytes"])
            for _, _, event in sorted(inside, key=lambda span: span[1])  # in the order in which they arrive
            if re.fullmatch(r"chunk \d+", event["name"])
        ]
        backward = phases[[name for _, _, name in phases].index("optimizer") - 1]
        assert all(backward[0] <= a and b <= backward[1] for a, b, _ in inside)
        if chunks is None:
            assert [i for i, _ in travelled] == list(range(len(travelled)))
        else:
            assert travelled == list(enumerate(chunks))
    assert found == len(messages)
