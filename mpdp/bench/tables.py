"""The lines of ``mpdp bench train`` that people read."""

from __future__ import annotations

from typing import Any


def report(result: dict[str, Any]) -> list[str]:
    """Return the lines that people read. **Local.**"""
    eager = ", in eager steps" if result["captures"] else ""
    first = (
        f"{result['workload']} on {result['ranks']} x {result['device']}: {result['step_us']:.0f} us a step, "
        f"{result['items_per_second']:,.0f} {result['unit']}/s "
        f"(blocks {min(result['block_step_us']):.0f} to {max(result['block_step_us']):.0f} us); "
        f"communication {result['communication_us']:.0f} us, "
        f"of which {result['exposed_communication_us']:.0f} us not hidden{eager}"
    )
    lines = [first]
    if result["ranks"] > 1:
        lines.append(
            f"the collectives cost {result['communication_cost_us']:.0f} us: a step without them takes "
            f"{result['silent_step_us']:.0f} us"
        )
    lines.append(
        f"{result['precision']}, {result['batch_per_rank']} samples a rank; {result['flops'] / 1e9:,.2f} GFLOP of "
        f"products a step and rank; large products reach {result['ceiling_flops_per_second'] / 1e12:,.3f} TFLOP/s here"
    )
    unit = f"{result['unit']}/s"
    lines.append(
        f"{'system':<22}{'step us':>12}{'quartiles':>22}{unit:>14}{'ratio':>8}{'of ceiling':>12}{'peak MB':>10}"
        f"{'device MB':>11}"
    )
    for row in result["sides"]:
        low, high = row["quartiles_us"]
        taken = "" if row["device_bytes"] is None else f"{row['device_bytes'] / 1e6:,.0f}"
        lines.append(
            f"{row['name']:<22}{row['step_us']:>12,.1f}{f'{low:,.1f} .. {high:,.1f}':>22}"
            f"{row['items_per_second']:>14,.0f}{row['ratio']:>8.2f}{row['utilisation']:>12.1%}"
            f"{row['peak_bytes'] / 1e6:>10,.0f}{taken:>11}"
        )
    for row in result["sides"]:
        if row["breakdown_us"]:
            parts = ", ".join(f"{kind} {value:,.0f}" for kind, value in row["breakdown_us"].items())
            lines.append(f"{row['name']}, us by kind of work: {parts}")
    return lines


def losses_line(result: dict[str, Any]) -> str:
    """Return the line that people read of a comparison of losses. **Local.**"""
    return (
        f"{result['workload']} on {result['device']}, {result['precision']}: the losses of {result['updates']} updates "
        f"from the same weights differ by {result['largest_relative_difference']:.2e} at most, relative "
        f"(limit {result['limit']:.0e}): {'within' if result['within'] else 'TOO FAR'}"
    )
