"""Do votes that are given while a model trains make it better? A simulated voter votes through the real page's server.

    python benchmarks/proof_votes.py --folder /tmp/votes --json benchmarks/results/proof_votes.json --seeds 0 1 2

Each seed is one ``mmrl label shapes-full --train``. The voter asks the server what to vote on, as the page does, looks
at the picture that it serves, and says what the verifier says, wrongly in ``--errors`` of all votes. It gives
``--first`` votes before the first step, and ``--wait`` before each later one. After ``--votes`` it says that these are
enough. The verifier trains nothing. Held-out success by it is measured before and after on
the same prompts and noise. The figure to beat is 0.528, what 200 labels without errors reach with pairs for DPO after
they were spread (proof_labels.py). Trains with DGPO.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from PIL import Image
from proof_labels import interval

RECIPE, FIGURE, BEFORE = "shapes-full", "reward/shapes/success", 0.528
DGPO = [
    *("algorithm={type: dgpo, noise_levels: 2, kl_coef: 0.05}", "sampling.window=null"),
    *("sampling.same_initial_noise=false", "optim.lr=1e-4", "optim.schedule=constant", "optim.ema_decay=0.9"),
]
"""It learns from finished pictures, and more from few steps than Flow-GRPO does: a learned reward is known best near
what was voted on. Without a pull to the reference it leaves the model behind."""
SHOWN = 5
"""Each so many steps the agreement is measured."""


class Voter:
    """Asks the server at ``url`` and votes by ``judge`` (prompt and pictures to the value of the vote)."""

    def __init__(
        self, url: str, judge: Callable[[str, Sequence[Image.Image]], float], errors: float, seed: int
    ) -> None:
        split = urlsplit(url)
        self.host, self.token = split.netloc, parse_qs(split.query)["token"][0]
        self.judge, self.errors, self.chance = judge, errors, random.Random(seed)
        self.given = 0

    def asked(self, method: str, path: str, said: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        body = None if said is None else json.dumps(said)
        connection.request(method, path, body, {"X-Token": self.token, "Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read()

    def state(self) -> dict[str, Any]:
        return json.loads(self.asked("GET", f"/state?voter={quote('simulated')}")[1])

    def vote(self, state: dict[str, Any]) -> None:
        """Answer what ``state`` asks."""
        names = state["ask"]["samples"]
        shown = [Image.open(io.BytesIO(self.asked("GET", f"/file/{name}")[1])) for name in names]
        value = self.judge(state["ask"]["prompt"], shown)
        value = 1 - value if self.chance.random() < self.errors else value
        self.tell(state, kind="vote", samples=names, value=value)
        self.given += 1

    def tell(self, state: dict[str, Any], **said: object) -> None:
        status, reply = self.asked("POST", "/vote", {"run": state["run"], "voter": "simulated", **said})
        if status != 200:
            raise RuntimeError(f"the server refused {said}: {reply!r}")

    def until(self, votes: int, first: int, wait: int, over: Callable[[], bool]) -> None:
        """Give ``first`` votes before the first step and ``wait`` before each later one, until there are ``votes``;
        then say so. ``over``: whether the run has ended."""
        while not over():
            state = self.state()
            if self.given >= votes:
                return self.tell(state, kind="enough", value=True)
            if state["ask"] is None or self.given >= first + wait * state["step"]:
                time.sleep(0.1)
            else:
                self.vote(state)
        return None


def verifier() -> Callable[[str, Sequence[Image.Image]], float]:
    """Judges the pictures of a training prompt by the verifier of the recipe: one by its success, two by which is
    better (one half where they are equal)."""
    import mmrl
    from mmrl.config.loader import load_recipe
    from mmrl.core.trajectory import Sample, SampleId
    from mmrl.data.loading import load_prompts

    prompts = {one.text: one for one in load_prompts(load_recipe([RECIPE], []).recipe, "train")}
    score = mmrl.load("rewards", "shapes").score

    def judge(prompt: str, pictures: Sequence[Image.Image]) -> float:
        samples = [
            Sample(prompts[prompt], SampleId(0, 0, 0, n), image=one.convert("RGB")) for n, one in enumerate(pictures)
        ]
        found = [float(value) for value in score(samples)["success"]]
        return found[0] if len(found) == 1 else (1 + found[0] - found[1]) / 2

    return judge


def trained(
    given: argparse.Namespace, seed: int, judge: Callable[[str, Sequence[Image.Image]], float]
) -> dict[str, Any]:
    """One run: held-out success before and after, and the CPU-seconds of the whole process."""
    out = given.folder / f"seed-{seed}{'-pairs' * given.pairs}"
    options = f"{{model: {RECIPE}, first: {given.first}, wait: {given.wait}, by: {given.by}, patience: 600"
    options += f", noises: {given.noises}"
    options += ", votes: pairs}" if given.pairs else "}"
    changes = [f"rewards=[{{name: votes, on_failure: drop, options: {options}}}, {{name: shapes, weight: 0}}]"]
    changes += [f"seed={seed}", "model.dtype=float32", "threads=1", f"train.steps={given.steps}"]
    changes += [f"train.max_cpu_seconds={given.limit}", f"eval.every={given.steps}", f"eval.samples={given.heldout}"]
    command = [sys.executable, "-m", "mmrl", "label", RECIPE, *changes, *DGPO, *given.set, "--train", "--out", str(out)]
    before = os.times().children_user
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        url = next((line.strip() for line in run.stdout if line.startswith("http://")), "")
        voter = Voter(url, judge, given.errors, seed)
        try:
            voter.until(given.votes, given.first, given.wait, lambda: run.poll() is not None)
        except (OSError, RuntimeError):
            if run.wait() != 0:
                raise
    if run.returncode:
        raise SystemExit(run.returncode)
    rows = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    spent = os.times().children_user - before
    found = {"before": rows[0][FIGURE], "after": rows[-1][FIGURE], "steps": rows[-1]["step"], "votes": voter.given}
    found["heldout"] = {row["step"]: row[FIGURE] for row in rows}
    said = {} if given.pairs else {"agreement": agreement(out, given.by, given.noises, judge)}
    return {**found, **said, "cpu_seconds": spent}


def agreement(
    out: Path, by: str, noises: int, judge: Callable[[str, Sequence[Image.Image]], float]
) -> dict[str, tuple[float, float, float]]:
    """How the reward of some steps agrees with ``judge`` on the samples of that step, which it scored: the area under
    the ROC curve, the share of pairs of a right and a wrong sample of a prompt that it orders so, and the votes that it
    had. The fits are made again of the log. A step without such a pair has none."""
    from mmrl.config.loader import load_recipe
    from mmrl.rewards.judging.statistics import auc
    from mmrl.rewards.learned.labels.embeddings import Encoders, model_of
    from mmrl.rewards.learned.labels.items import Item
    from mmrl.rewards.learned.labels.live import Pool, fitted
    from mmrl.rewards.learned.labels.spreading import AUTO, GRAPH, HEAD
    from mmrl.rewards.learned.labels.votes import FOLDER, VoteLog, place_of

    pool, log, found = Pool(out / FOLDER, out / FOLDER), VoteLog(out), dict[str, tuple[float, float, float]]()
    methods, model = {"auto": AUTO, "graph": GRAPH, "head": HEAD}, model_of(load_recipe([RECIPE], []).recipe)
    encoders = Encoders.for_items([Item("", "image", prompt) for prompt in ("a", "b")], None, model, noises)
    for step, used in sorted(log.read().used.items())[::SHOWN]:
        at, size = used.fit
        tally = log.read(size)
        voted = {name for samples in tally.means for name in samples}
        with TemporaryDirectory() as kept:
            known = fitted(pool.before(at, used.batches, voted, 2000), tally, encoders, methods[by], Path(kept) / "fit")
        batches = [batch for (own, _), batch in pool.batches.items() if own == step]
        scores = [score for batch in batches for score in known.scores(batch.parts).tolist()]
        shown = [sample for batch in batches for sample in batch.samples]
        files = [place_of(pool.into, one.name).with_name(one.name.partition("/")[2] + ".png") for one in shown]
        right = [judge(one.prompt, [Image.open(file)]) >= 0.5 for one, file in zip(shown, files, strict=True)]
        rows = list(zip(scores, right, [one.prompt for one in shown], strict=True))
        pairs = [(a, b) for a, good, p in rows if good for b, bad, q in rows if p == q and not bad]
        if pairs:
            ordered = mean((a > b) + (a == b) / 2 for a, b in pairs)
            found[str(step)] = auc(scores, right), ordered, float(len(tally.means))
    return found


def line(seed: int, run: dict[str, Any], samples: int) -> str:
    low, high = interval(run["before"], run["after"], samples)
    beyond = interval(BEFORE, run["after"], samples)
    cells = [str(seed), str(run["votes"]), str(run["steps"]), f"{run['before']:.3f}", f"{run['after']:.3f}"]
    cells.append(f"{run['after'] - run['before']:+.3f} ({low:+.3f} to {high:+.3f})")
    cells.append(f"{run['after'] - BEFORE:+.3f} ({beyond[0]:+.3f} to {beyond[1]:+.3f})")
    return f"| {' | '.join([*cells, format(run['cpu_seconds'], '.0f')])} |"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are made")
    parser.add_argument("--json", type=Path, help="where results are kept; what stands there is not done again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--votes", type=int, default=200)
    parser.add_argument("--errors", type=float, default=0.1, help="share of votes that are wrong")
    parser.add_argument("--first", type=int, default=60, help="votes before the first step")
    parser.add_argument("--wait", type=int, default=7, help="new votes that each later step waits for")
    parser.add_argument("--noises", type=int, default=4, help="under how many a picture is read")
    parser.add_argument("--by", default="head", choices=["auto", "graph", "head"])
    parser.add_argument("--pairs", action="store_true", help="vote on two pictures of a prompt")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--limit", type=float, default=700, help="CPU-seconds of training")
    parser.add_argument("--heldout", type=int, default=512)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of the recipe")
    given = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    judge, kept = verifier(), json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    print("| seed | votes | steps | before | after | difference (95 %) | beyond 0.528 (95 %) | CPU-seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    runs = {}
    for seed in given.seeds:
        key = f"seed {seed}, {given.votes} votes, errors {given.errors:g}, first {given.first}, wait {given.wait}, "
        key += f"dgpo, {given.by}, {given.noises} noises{', pairs' * given.pairs}, {given.steps} steps "
        key = f"{key}{' '.join(given.set)}".strip()
        runs[seed] = kept[key] = kept.get(key) or trained(given, seed, judge)
        if given.json:
            given.json.write_text(json.dumps(kept, indent=1) + "\n")
        print(line(seed, runs[seed], given.heldout), flush=True)
    after = mean(run["after"] for run in runs.values())
    low, high = interval(BEFORE, after, given.heldout * len(runs))
    print(f"mean after: {after:.3f}, beyond {BEFORE}: {after - BEFORE:+.3f} ({low:+.3f} to {high:+.3f})")
    return runs


if __name__ == "__main__":
    main()
