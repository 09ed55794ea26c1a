"""``score serve``: try a reward alone, and serve it over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mmrl.commands.arguments import JsonOption, OptionsOption, console, json_alone, refuse_unknown, reward_options
from mmrl.core.errors import UserError

RewardArgument = Annotated[
    str, typer.Argument(metavar="FILE.py:NAME", help="A reward in a file, or one of ours (mmrl ls rewards).")
]
DeviceOption = Annotated[str, typer.Option(metavar="DEVICE", help="Where its models compute: cpu, cuda, cuda:1, mps.")]


def score(
    reward: RewardArgument,
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of pictures or clips.")] = None,
    responses: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Records with prompt and response, JSONL or a table.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="What each picture should show.")] = None,
    device: DeviceOption = "cpu",
    options: OptionsOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Try a reward alone, on pictures or responses: a row for each, latency and memory.

    Exit code 1 where one got no score.
    """
    if (images is None) == (responses is None):
        raise UserError("give --images a folder of pictures, or --responses a file of prompts and responses")
    if responses is not None and prompts is not None:
        raise UserError("--prompts is of pictures, and the records of --responses have prompts; remove --prompts")
    arguments = reward_options(options)
    refuse_unknown("rewards", reward)
    _check_device(device)
    from mmrl.rewards import bench

    items = bench.pictures(images, prompts) if images is not None else bench.responses(responses or Path())
    of = "picture" if images is not None else "response"
    if as_json:
        with json_alone() as write:
            measured = bench.measure(reward, items, arguments, device=device, of=of)
            write(measured.as_json())
        unscored = measured.unscored
    else:
        shown = console()
        unscored = bench.show(bench.measure(reward, items, arguments, device=device, bar=shown, of=of), shown)
    raise typer.Exit(1 if unscored else 0)


def serve(
    reward: RewardArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    token: Annotated[
        str | None,
        typer.Option(envvar="MMRL_TOKEN", show_envvar=True, help="What clients must send as a bearer token."),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Run the reward with another environment's Python.")
    ] = None,
    requirements: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Make an environment with these packages and run it there.")
    ] = None,
    device: DeviceOption = "cpu",
    options: OptionsOption = None,
) -> None:
    """Put a reward behind HTTP, if need be in its own environment."""
    arguments = reward_options(options)
    if python and requirements:
        raise UserError("--python names an environment and --requirements makes one; give one of them")
    refuse_unknown("rewards", reward)
    _check_device(device)
    if python or requirements:
        from mmrl.rewards.subprocess_server import serve_elsewhere

        serve_elsewhere(reward, host, port, token, arguments, python, requirements, device=device)
        return
    from mmrl.rewards.serve import serve as run

    run(reward, host, port, token, arguments, device=device)


def _check_device(device: str) -> None:
    """Refuse an unknown device without importing torch, which a reward's environment may lack."""
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise UserError(f"--device {device!r} is no device; write cpu, cuda, cuda:1 or mps")
