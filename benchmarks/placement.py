"""Compare judging during sampling with judging after it, and adaptive splits under changing loads.

    python benchmarks/placement.py --devices 64 512 --json benchmarks/results/placement.json

In simulated time (``mmrl.planner.simulator.simulate``), the same figures on every machine. Controllers have 8 devices,
8 micro-batches of sampling a device and step. Three tables for each number of devices:

- grid        judge cost x tail x dynamic sampling x price of a swap: how much shorter the best ``partial`` split
              makes the generate phase than ``colocate`` (negative: longer), and how far ``adaptive`` is ahead of the
              better one
- points      the judge-heavy point, and how many cells lie within the published 16-24 %
- loads       ``adaptive`` on steady, judge-heavy, drifting, shifting and long-tailed loads: step time ahead of the best
              static placement (one split for the whole run, chosen with hindsight), over the bound, and its split alone

``--regret`` prints another table instead: every policy over the bound, and how much longer ``adaptive`` took than the
best of all static splits, colocate and ``greedy`` in hindsight (its regret), over the loads of ``placement_loads``; and
of three roles against the best of all fixed roles, lent or not (the devices that train are chosen in hindsight for
all).

``--moving`` prints a third: ``adaptive`` with and without prompts that move between controllers (``train.balance:
moving``), all controllers alike and one of them half as fast.

``price`` is a device's move between the roles as a share of the generate phase with all work shared evenly.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import placement_loads
from placement_loads import made

from mmrl.placement.adaptive import splits
from mmrl.planner.simulator.simulate import (
    Cluster,
    Outcome,
    adaptive,
    best_disaggregated,
    best_three_roles,
    bound,
    device_seconds,
    moving,
    static,
)
from mmrl.planner.simulator.trace import LOADS, Load, Trace

DEVICES = 8
"""Of a controller."""
JUDGE = (0.25, 0.5, 1.0, 2.0, 3.0)
PRICE = (0.02, 0.1, 0.2, 0.4)
TAILS: dict[str, dict[str, Any]] = {"light": {"tail": 0.4}, "heavy": {"pareto": 1.5}}
AGAIN = (0.0, 0.3)
LOAD_PRICES = (0.02, 0.1, 0.2, 0.4)
PUBLISHED, GOAL_POINT = (0.16, 0.24), 0.24
GOALS = {"steady": -0.02, "judge-heavy": -0.02, "drifting": 0.10, "shifting": 0.10, "tailed": 0.10}
"""How far ahead of the best static placement the step time should be."""
OVER_BOUND, SETTLED = 0.15, 10
Row = dict[str, Any]


def shorter(a: Sequence[float], b: Sequence[float]) -> float:
    """How much less time ``a`` took than ``b``, as a share of ``b``."""
    return 1 - sum(a) / sum(b)


def compared(trace: Trace, cluster: Cluster) -> Row:
    """Every static placement and ``adaptive`` on one trace."""
    colocate, *partial = [static(trace, cluster, split) for split in splits(cluster.devices)]
    fastest = min(partial, key=lambda outcome: outcome.seconds)
    best = min(colocate, fastest, key=lambda outcome: outcome.seconds)
    moving, alone = adaptive(trace, cluster), adaptive(trace, cluster, moves=False)
    least = sum(bound(trace, cluster))
    return {
        "partial": fastest.name,
        "best": best.name,
        "gain": shorter(fastest.generate, colocate.generate),
        "ahead": shorter(moving.steps, best.steps),
        "ahead_generate": shorter(moving.generate, best.generate),
        "ahead_partial": shorter(moving.steps, fastest.steps),
        "alone": shorter(alone.steps, best.steps),
        "best_over_bound": best.seconds / least - 1,
        "over_bound": moving.seconds / least - 1,
        "alone_over_bound": alone.seconds / least - 1,
        "idle": moving.idle,
        "waiting": moving.apart / moving.seconds / moving.devices,
        "moves": sum(moving.moves) / len(trace.steps) / cluster.total,
        "changes": moving.changes,
        "settled": settled(moving, len(trace.steps) // 2),
        "settled_alone": settled(alone, len(trace.steps) // 2),
        "steps": {outcome.name: outcome.steps for outcome in (colocate, fastest, moving, alone)},
        "judge_devices": {outcome.name: [s.judge for s in outcome.splits] for outcome in (moving, alone)},
    }


def settled(outcome: Outcome, shift: int) -> int:
    """Steps from ``shift``, the first step of another load, to the last change of the split after it; 0 without one."""
    found = outcome.splits
    return max((step - shift for step in range(shift + 1, len(found)) if found[step] != found[step - 1]), default=0)


def grid(cluster: Cluster, steps: int, seed: int) -> Iterator[Row]:
    for judge in JUDGE:
        for tail, spread in TAILS.items():
            for again in AGAIN:
                for price in PRICE:
                    load = Load("", lambda at, judge=judge: judge, again=(again, again), ahead=False, **spread)
                    found = compared(made(load, price, cluster, steps, seed), cluster)
                    yield {"judge": judge, "tail": tail, "again": again, "price": price, **found}


def loads(cluster: Cluster, steps: int, seed: int) -> Iterator[Row]:
    for name in GOALS:
        for price in LOAD_PRICES:
            trace = made(LOADS[name], price, cluster, steps, seed)
            yield {"load": name, "price": price, "goal": GOALS[name], **compared(trace, cluster)}


def regrets(cluster: Cluster, loads: Sequence[str], prices: Sequence[float], steps: int, seed: int) -> Iterator[Row]:
    """Every policy on every load and price."""
    for name in loads:
        for price in prices:
            trace = placement_loads.trace_of(name, price, cluster, steps, seed)
            colocate, *partial = [static(trace, cluster, split) for split in splits(cluster.devices)]
            greedy, *others = [moving(trace, cluster, split) for split in splits(cluster.devices)]
            apart, lent = (
                best_disaggregated(trace, cluster, lend=lend) if cluster.controllers == 1 else None
                for lend in (False, True)
            )
            three = best_three_roles(trace, cluster) if cluster.controllers == 1 else [None, None]
            mine, least = adaptive(trace, cluster), sum(bound(trace, cluster))
            rivals = [colocate, *partial, greedy]
            best = min(rivals, key=lambda outcome: outcome.seconds)
            policies = {
                "colocate": colocate,
                "partial": min(partial, key=lambda outcome: outcome.seconds),
                "disaggregated": apart,
                "disaggregated, lent": lent,
                "three roles, greedy": three[0],
                "three roles, adaptive": three[1],
                "greedy": greedy,
                "static with moves": min(others, key=lambda outcome: outcome.seconds),
                "adaptive": mine,
            }
            yield {
                "load": name,
                "price": price,
                "best": best.name,
                "regret": regret(mine, rivals),
                "three": regret(three[1], [apart, lent]),
                "over bound": {key: one.seconds / least - 1 for key, one in policies.items() if one is not None},
                "names": {key: one.name for key, one in policies.items() if one is not None},
                "waiting": mine.apart / mine.seconds / mine.devices,
                "changes": mine.changes,
                "steps": {"adaptive": mine.steps, best.name: best.steps},
            }


def regret(mine: Outcome | None, rivals: Sequence[Outcome | None]) -> float | None:
    """How much longer ``mine`` took than the fastest rival, as a share of that; None without it."""
    return None if mine is None else mine.seconds / min(one.seconds for one in rivals if one is not None) - 1


POLICIES = (
    "colocate",
    "partial",
    "disaggregated",
    "disaggregated, lent",
    "three roles, greedy",
    "three roles, adaptive",
    "greedy",
    "static with moves",
    "adaptive",
)


def regret_table(rows: Sequence[Row]) -> str:
    head = ["load", "price", *POLICIES, "waiting", "changes", "best rival", "regret"]
    lines = [
        [
            row["load"],
            f"{row['price']:.0%}",
            *(f"{row['over bound'][name]:+.1%}" if name in row["over bound"] else "" for name in POLICIES),
            f"{row['waiting']:.1%}",
            str(row["changes"]),
            row["best"],
            f"{row['regret']:+.1%}",
        ]
        for row in rows
    ]
    found, three = [row["regret"] for row in rows], [row["three"] for row in rows if row["three"] is not None]
    worst = max(rows, key=lambda row: row["regret"])
    return (
        f"{table(head, lines)}\n\nregret of adaptive: median {statistics.median(found):+.1%}, worst {max(found):+.1%} "
        f"({worst['load']} at {worst['price']:.0%}), best {min(found):+.1%}{lending(rows)}"
        + (f"\nregret of three roles, adaptive: {spread(three)}" if three else "")
    )


def spread(found: Sequence[float]) -> str:
    return f"median {statistics.median(found):+.1%}, worst {max(found):+.1%}, best {min(found):+.1%}"


def lending(rows: Sequence[Row]) -> str:
    """A line for each price: what lending makes of disaggregated devices, in the median of the loads."""
    fixed, lent = "disaggregated", "disaggregated, lent"
    said = []
    for price in dict.fromkeys(row["price"] for row in rows if lent in row["over bound"]):
        of = [row["over bound"] for row in rows if row["price"] == price]
        medians = [statistics.median(one[name] for one in of) for name in (fixed, lent)]
        behind = max((1 + one[lent]) / (1 + one[fixed]) - 1 for one in of)
        slower = sum(one[lent] > one[fixed] for one in of)
        said.append(
            f"\ndisaggregated at {price:.0%}: median {medians[0]:+.1%} over the bound, lent {medians[1]:+.1%}; "
            f"{slower} of {len(of)} loads take longer when lent, the worst {behind:+.1%}"
        )
    return "".join(said)


def moved(cluster: Cluster, arguments: argparse.Namespace) -> Iterator[Row]:
    """``adaptive`` on every load and price, with prompts that stay and with prompts that move between controllers."""
    steps, seed, each = arguments.steps, arguments.seed, arguments.micro_batches
    for slow in (1.0, 2.0):
        for name in arguments.loads:
            for price in arguments.prices:
                trace = placement_loads.trace_of(name, price, cluster, steps, seed, each)
                of = replace(cluster, slow=slow)
                stays, moves = (adaptive(trace, of, prompts_move=move) for move in (False, True))
                count = sum(len(rounds[0]) for work in trace.steps for rounds in work.shares)
                yield {
                    "load": name,
                    "price": price,
                    "slow": slow,
                    "waiting": [one.apart / one.seconds / one.devices for one in (stays, moves)],
                    "least": least_waiting(trace, cluster),
                    "moved": sum(moves.moved) / count,
                    "shorter": shorter(moves.steps, stays.steps),
                    "steps": [stays.steps, moves.steps],
                }


def least_waiting(trace: Trace, cluster: Cluster) -> float:
    """The share of time in which devices have no work where every step takes as long as its bound: because one chain of
    micro-batches is longer than an even share of all work."""
    limits = bound(trace, cluster)
    even = [device_seconds(work, cluster) / cluster.total for work in trace.steps]
    return 1 - sum(even) / sum(limits)


def moved_table(rows: Sequence[Row]) -> str:
    head = ["load", "price", "one controller", "waiting", "prompts move", "no work in the bound", "moved", "step time"]
    lines = [
        [
            row["load"],
            f"{row['price']:.0%}",
            "as fast" if row["slow"] == 1 else "half as fast",
            *(f"{share:.1%}" for share in row["waiting"]),
            f"{row['least']:.1%}" if row["slow"] == 1 else "",
            f"{row['moved']:.1%}",
            f"{-row['shorter']:+.1%}",
        ]
        for row in rows
    ]
    return table(head, lines)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grid_table(rows: Sequence[Row]) -> str:
    head = ["judge", "tail", "again", *(f"price {p:.0%}: gain (ahead)" for p in PRICE)]
    lines = []
    for start in range(0, len(rows), len(PRICE)):
        cells = rows[start : start + len(PRICE)]
        first = cells[0]
        found = [f"{row['gain']:+.1%} ({row['ahead']:+.1%})" for row in cells]
        lines.append([f"{first['judge']:g}", first["tail"], f"{first['again']:.0%}", *found])
    return table(head, lines)


def points(rows: Sequence[Row]) -> str:
    """The judge-heavy point, and how many cells of the grid lie where."""
    low, high = PUBLISHED
    heavy = [row for row in rows if row["judge"] == max(JUDGE)]
    best = max(heavy, key=lambda row: row["gain"])
    reached = [row for row in heavy if row["gain"] >= GOAL_POINT]
    within = [row for row in rows if low <= row["gain"] <= high]
    from_price = f", from a price of {min(row['price'] for row in reached):.0%} on" if reached else ""
    lines = [
        f"partial beats colocate in {sum(row['gain'] > 0 for row in rows)} of {len(rows)} cells, loses in the others; "
        f"{len(within)} lie within the published {low:.0%}-{high:.0%}.",
        f"Judge-heavy (judging {max(JUDGE):g} times sampling): {GOAL_POINT:.0%} or more in {len(reached)} of "
        f"{len(heavy)} cells{from_price}; most: {best['gain']:.1%} at price {best['price']:.0%}, {best['tail']} tail, "
        f"{best['again']:.0%} sampled again.",
    ]
    return "\n".join(lines)


def loads_table(rows: Sequence[Row]) -> str:
    head = [
        "load",
        "price",
        "best static",
        "ahead",
        "goal",
        "ahead of partial",
        "split alone",
        "over bound",
        "of it waiting",
        "moves",
        "settled",
    ]
    lines = [
        [
            row["load"],
            f"{row['price']:.0%}",
            f"{row['best']} ({row['best_over_bound']:+.1%})",
            f"{row['ahead']:+.1%}",
            f"{row['goal']:+.0%}" + ("" if row["ahead"] >= row["goal"] else " missed"),
            f"{row['ahead_partial']:+.1%}",
            f"{row['alone']:+.1%}",
            f"{row['over_bound']:+.1%}" + ("" if row["over_bound"] <= OVER_BOUND else " missed"),
            f"{row['waiting']:.1%}",
            f"{row['moves']:.2f}",
            f"{row['settled']}, {row['settled_alone']}" if row["load"] == "shifting" else "",
        ]
        for row in rows
    ]
    return table(head, lines)


def benchmark(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all tables, saying each when it is done; every figure."""
    result: dict[str, Any] = {}
    for devices in arguments.devices:
        cluster = Cluster(devices // DEVICES, DEVICES)
        if arguments.moving:
            rows = list(moved(cluster, arguments))
            say(f"\n## {devices} devices: adaptive, prompts stay and move between controllers\n\n{moved_table(rows)}")
            result[str(devices)] = {"moving": rows}
            continue
        if arguments.regret:
            rows = list(regrets(cluster, arguments.loads, arguments.prices, arguments.steps, arguments.seed))
            say(f"\n## {devices} devices: every policy over the bound, and the regret\n\n{regret_table(rows)}")
            result[str(devices)] = {"regret": rows}
            continue
        cells = list(grid(cluster, arguments.grid_steps, arguments.seed))
        say(f"\n## {devices} devices: partial over colocate (adaptive over the better one)\n\n{grid_table(cells)}")
        say(f"\n{points(cells)}")
        changing = list(loads(cluster, arguments.steps, arguments.seed))
        say(f"\n## {devices} devices: adaptive over the best static placement\n\n{loads_table(changing)}")
        result[str(devices)] = {"grid": cells, "loads": changing}
    return result


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 512], help="of all controllers, 8 each")
    parser.add_argument("--regret", action="store_true", help="print the table of regret instead")
    parser.add_argument("--moving", action="store_true", help="print the table of prompts that move instead")
    names = placement_loads.NAMES
    parser.add_argument(
        "--loads",
        nargs="+",
        default=names,
        choices=names,
        help="of the tables of regret and of prompts that move",
        metavar="LOAD",
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="of this table: a device's in a step, for the same work"
    )
    parser.add_argument(
        "--prices", type=float, nargs="+", default=LOAD_PRICES, help="of the tables of regret and of prompts that move"
    )
    parser.add_argument("--steps", type=int, default=40, help="of the loads")
    parser.add_argument("--grid-steps", type=int, default=20, help="of a cell of the grid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", "--out", dest="json", type=Path, help="write every single figure here")
    arguments = parser.parse_args(given)
    if any(devices % DEVICES or devices < DEVICES for devices in arguments.devices):
        parser.error(f"--devices: multiples of {DEVICES}")
    command = shlex.join(["python", "benchmarks/placement.py", *(sys.argv[1:] if given is None else given)])
    date = datetime.now(UTC).isoformat(timespec="seconds")
    print(f"{date}, `{command}`, simulated", flush=True)
    result = benchmark(arguments, lambda text: print(text, flush=True))
    if arguments.json:
        arguments.json.write_text(json.dumps({"date": date, "command": command, **result}, indent=1))


if __name__ == "__main__":
    main()
