r"""Measure the accuracy of the verifiers of final answers on hand-labelled cases. No model, no accelerator.

    python benchmarks/answers.py                      # answer:math only where math-verify is installed
    python benchmarks/answers.py --wrong              # the cases that each gets wrong, one a line
    python benchmarks/answers.py --json answers.json
    python benchmarks/answers.py --tests Math-Verify/tests   # pairs of a checkout of Math-Verify, by its own labels

A case is a reference, a response and whether it is right, whatever the question was. The labels' rules: an answer is
exact, so 0.333 is not 1/3; a percentage is a hundredth; a unit counts where both have one; two answers where one is
asked for are wrong; the entries of a set or of a list have no order, those of a tuple have; the last box counts. A
verifier that says that it cannot judge (``answer:number`` without a number in the reference) is counted apart: it pays
nothing and refuses nothing. Exits with 1 where a wrong answer is paid.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mmrl
from mmrl.core.installing import install
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId

TABLE = Path(__file__).with_name("data") / "answers.jsonl"
NAMES = ("number", "boxed", "math")
VERDICTS = ("right", "falsely paid", "falsely refused", "not judged")


def cases() -> list[dict[str, Any]]:
    """The table: ``kind``, ``truth``, ``response`` and ``right`` of each case."""
    return [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]


def pairs_of(folder: Path) -> list[dict[str, Any]]:
    """The pairs in the tests of a checkout of Math-Verify (github.com/huggingface/Math-Verify, Apache-2.0), as cases.

    They are read as text; nothing in them is run. Pairs that code computes are left out.
    """
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("test_*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.parametrize"):
                continue
            names = ast.literal_eval(call.args[0])
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            label = next((name for name in ("expected", "result") if name in names), None)
            if label is None or not {"gold", "pred"} <= set(names) or not isinstance(call.args[1], ast.List):
                continue
            for written in call.args[1].elts:
                try:
                    row = dict(zip(names, ast.literal_eval(written), strict=True))
                except ValueError:
                    continue
                found.append({"kind": path.stem, "truth": row["gold"], "response": row["pred"], "right": row[label]})
    return found


def verdicts(name: str, table: list[dict[str, Any]]) -> list[str]:
    """Of each case, what ``answer:<name>`` made of it: one of ``VERDICTS``."""
    reward = getattr(mmrl.load("rewards", "answer"), name)()
    samples = [
        Sample(Prompt(f"case/{i}", "?", {"answer": case["truth"]}), SampleId(0, 0, 0, i), text=case["response"])
        for i, case in enumerate(table)
    ]
    try:
        said = reward.score(samples, context=Context())["correct"]
    finally:
        if hasattr(reward, "close"):
            reward.close()
    return [_verdict(value, case["right"]) for value, case in zip(said, table, strict=True)]


def _verdict(value: object, right: bool) -> str:
    if not isinstance(value, float):
        return "not judged"
    if (value == 1.0) == bool(right):
        return "right"
    return "falsely refused" if right else "falsely paid"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrong", action="store_true", help="print the cases that are judged wrongly")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--tests", type=Path, help="judge the pairs in these tests of Math-Verify instead")
    asked = parser.parse_args(arguments)
    table = cases() if asked.tests is None else pairs_of(asked.tests)
    names = [n for n in NAMES if n != "math" or importlib.util.find_spec("math_verify") is not None]
    found = {name: verdicts(name, table) for name in names}
    counts = {name: Counter(of) for name, of in found.items()}
    kinds, right = len({case["kind"] for case in table}), sum(case["right"] for case in table)
    print(f"{len(table)} cases of {kinds} kinds, {right} of them right answers")
    for name in names:
        shares = "   ".join(f"{v} {counts[name][v]:3d} ({counts[name][v] / len(table):5.1%})" for v in VERDICTS)
        print(f"answer:{name:<7}{shares}")
    if "math" not in names:
        print(f"answer:math is left out: {install('math')}")
    if asked.wrong:
        for name in names:
            for case, verdict in zip(table, found[name], strict=True):
                if verdict.startswith("falsely"):
                    print(f"{name}: {verdict}: {case['kind']}: {case['response']!r} for {case['truth']!r}")
    if asked.json:
        rows = {name: {v: counts[name][v] for v in VERDICTS} for name in names}
        asked.json.write_text(json.dumps({"cases": len(table), "answers": rows}, indent=1) + "\n")
    return 1 if any(of["falsely paid"] for of in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
