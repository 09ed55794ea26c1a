"""The sweep of ``mmrl eval --lora-strength`` in a report: a curve per reward, and the grid of its pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.report.charts import Series, line_chart
from mmrl.stored import read_object


def read_sweep(run: Path, labels: Sequence[str], trained: Collection[str]) -> dict[str, Any] | None:
    """What the run directory ``run`` has of it; None where there was none. ``labels``: the rewards, and which of them
    are ``trained`` on. Raises ``UserError`` for a file that cannot be read."""
    file = run / "strength" / "sweep.json"
    try:
        found = read_object(file)
        rows = [{str(k): float(v) for k, v in row.items()} for row in found["rows"]]
        texts = [(str(one["strength"]), str(one["prompt"]), str(one["text"])) for one in found["texts"]]
        step = int(found["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}); remove it, or run mmrl eval --lora-strength again"
        ) from error
    names = {f"reward/{x}": f"{x}{'' if x in trained else ' (not trained on)'}" for x in labels}
    names |= {f"guard/{x}": x for x in ("diversity", "distance")}
    charts = [_curve(name, [(row["strength"], row.get(key)) for row in rows]) for key, name in names.items()]
    picture = file.with_name("grid.png")
    source = f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}" if picture.is_file() else None
    return {"step": step, "charts": [chart for chart in charts if chart is not None], "grid": source, "texts": texts}


def _curve(name: str, points: list[tuple[float, float | None]]) -> Any:
    return line_chart(name, [Series("held-out", points, "dots")], note="by strength")
