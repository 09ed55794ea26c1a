"""The proof of a model that draws: how often the picture of a brief is right as the brief is given, and as a language
model writes it before and after RL, several seeds.

    python benchmarks/proof_draw.py --seeds 0 1 2

Each seed trains ``draw-shapes`` with its warm start, which teaches how a prompt looks and not what the words of a brief
mean: that is ``before``. ``given``: the frozen model draws the brief itself; ``caption``: it draws the caption that the
brief stands for, which is the best that a writer can do. All four draw the same held-out briefs, whose compositions
training never drew, from the same noise; success is that of the verifier ``shapes``. The interval is of the paired
differences of ``after`` and ``given``. Every run is resumable.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from proof_shapes import of_seeds, train


def drawn(run: Path) -> dict[str, list[float]]:
    """For each held-out brief, as it is given and as its caption, 1 where the picture is right; kept in
    ``drawn.json``."""
    kept = run / "drawn.json"
    if not kept.exists():
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, __file__, "--measure", str(run)], check=True, env=environment)
    return json.loads(kept.read_text())


def draw_here(run: Path) -> None:
    """The work of ``drawn``, in this process."""
    from concurrent.futures import ThreadPoolExecutor

    import mmrl
    from mmrl.config.loader import load_recipe
    from mmrl.core.episode import Action
    from mmrl.core.media import open_image
    from mmrl.core.trajectory import Prompt, SampleId
    from mmrl.data.loading import load_prompts
    from mmrl.episodes.environment import observations
    from mmrl.episodes.play import reset_seed

    recipe = load_recipe([run / "resolved.json"]).recipe
    assert recipe.environment is not None
    kind, judge = mmrl.load("environments", "draw"), mmrl.load("rewards", "shapes:judge")
    options, prompts = recipe.environment.options, load_prompts(recipe, "heldout")[: recipe.eval.samples]
    worlds = kind.Environment(**options)  # has the model until all is drawn

    def right(n: int, prompt: Prompt, text: str) -> float:
        world = kind.Environment(**options)
        world.reset(prompt, reset_seed(recipe.seed, SampleId(-1, n, 0, 0)))
        (told,) = observations(world.step(Action(text)))
        return judge(open_image(told.pictures[0]), prompt.meta)["success"]

    with ThreadPoolExecutor(worlds.drawer.batch) as pool:
        of = {
            "given": [pool.submit(right, n, prompt, prompt.text) for n, prompt in enumerate(prompts)],
            "caption": [pool.submit(right, n, prompt, str(prompt.meta["caption"])) for n, prompt in enumerate(prompts)],
        }
        found = {name: [one.result() for one in those] for name, those in of.items()}
    (run / "drawn.json").write_text(json.dumps({**found, "prompts": [prompt.id for prompt in prompts]}))


def figures(run: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in (run / "heldout_samples.jsonl").read_text().splitlines()]
    made = drawn(run)
    assert rows[0]["prompts"] == rows[-1]["prompts"] == made["prompts"]
    before, after = (row["values"]["reward/shapes/success"] for row in (rows[0], rows[-1]))
    rises = [a - b for a, b in zip(after, made["given"], strict=True)]
    half = 1.96 * stdev(rises) / len(rises) ** 0.5
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "cpu_seconds": steps[-1]["perf/cpu_seconds"],
        "steps": len(steps),
        "given": mean(made["given"]),
        "before": mean(before),
        "after": mean(after),
        "caption": mean(made["caption"]),
        "rise": mean(rises),
        "rise from": mean(rises) - half,
        "rise to": mean(rises) + half,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/draw"))
    parser.add_argument("--measure", type=Path, help="only draw the briefs of this run (used by the command itself)")
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    given = parser.parse_args()
    if given.measure:
        draw_here(given.measure)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    results = dict[str, dict[str, float]]()
    for seed in given.seeds:
        run = given.out / f"draw-shapes-{seed}"
        train("draw-shapes", seed, run, given.overrides)
        results[str(seed)] = figures(run)
        print(f"seed {seed}: {results[str(seed)]}", flush=True)
    print("\n".join(of_seeds(results, list(next(iter(results.values()))))))


if __name__ == "__main__":
    main()
