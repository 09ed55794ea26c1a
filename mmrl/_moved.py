"""Names that modules had before every folder was one layer, so that plug-ins that import them still load.

``MODULES`` has them; they are gone in 0.2. What ``mmrl`` itself has (``mmrl.Sample``, ``mmrl.reward``) did not move.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = """
_checkout core.checkout
_load core.plugins.loading
_torchvision core.torchvision_on_cpu
finite core.nan_check
frozen_modules core.offload
local_rows core.sharded_loading
stopping core.signals
checkpoint.manifest core.checkpoint_manifest
checkpoint.reader core.checkpoint_reader
engines.rollout core.rollout_engine
episodes.contract core.episode
rewards.contract core.reward_contract
algorithms.settings config.algorithm_settings
engines.context models.context_parallel
placement.hindsight placement.what_if
rollout.mismatched rollout.kto_baseline
planner.shortage planner.oom_message
planner.first_data planner.new_recipe.data
planner.first_model planner.new_recipe.model
planner.first_recipe planner.new_recipe.recipe
planner.first_reward planner.new_recipe.reward
report.varying_values report.nondeterministic_metrics
run app.build
session app.trainer
strength app.lora_scale
media core.media
packages core.packages
engines.megatron models.megatron
engines models
text models.text
judge rewards.judging
readers rewards.encoders
simulator planner.simulator
contracts app.conformance
verify app.verify
distill.formulas rewards.learned.formulas
distill rewards.learned.distilled comparing encoders read_students sides students folder
knowledge rewards.learned.knowledge embeddings formulas graph folder
labels rewards.learned.labels agreement baselines embeddings graph items model pixels readers folder
distill studies.distill
labels studies.labels
knowledge studies.knowledge
soup studies.soup
sweep studies.sweep
. core.plugins user_code python_objects
. core errors files garbage http_server hub_files installing json_types library_loading lines media_limits \
  out_of_memory quiet reply_bytes samples script_process secrets stored tensor_files torch_state trajectory \
  transfer untrusted whole_weights
controller core randomness
report core clock durations notices sizes
config step objectives
report logging card environment grids metrics pictures progress rundir texts trackers expected profile
engines models fixed_cache row_tables
engines inference engine_weights lazy_engine own_class process_guard sampling_options server_devices \
  server_process sglang sleep_mode slots this_machine under_way vllm vllm_api vllm_server weight_files \
  weight_groups
pipelines models description lora protocol
text families.text assembly engine_sampling export meta_model pipeline scoring
training step batch micro_batches step_context step_metrics update
controller rollout workload
. training callbacks
. planner doctor
checkpoint app resume continuing
. app export hub_upload sample
training app divergence
datasets data buckets build checks columnar convert fields index limits loading mixture preferences record_media \
  records sampler sources split_lines store tables tar text_rows
"""
"""A line is an old name and a new one, without ``mmrl.``, for the module and all in it. Where further words follow, the
first two are packages (a dot is ``mmrl``) and the words are their modules."""


def table() -> dict[str, str]:
    """Old names and the new ones, with ``mmrl.``; a package stands for all in it."""
    found = {}
    for line in MODULES.strip().splitlines():
        old, new, *names = line.split()
        for name in names:
            found[f"mmrl.{name}" if old == "." else f"mmrl.{old}.{name}"] = f"mmrl.{new}.{name}"
        if not names:
            found[f"mmrl.{old}"] = f"mmrl.{new}"
    return found


def new_name(old: str) -> str | None:
    """Today's name of the module ``old``; None where it did not move."""
    moved, package, rest = table(), old, ""
    while package:
        if package in moved:
            return moved[package] + rest
        package, _, name = package.rpartition(".")
        rest = f".{name}{rest}"
    return None


class Moved(MetaPathFinder, Loader):
    """Imports a module by its old name: the module that is there now, with a warning that says its name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("mmrl.") or (new := new_name(fullname)) is None:
            return None
        return ModuleSpec(fullname, self, origin=new)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = spec.origin or ""
        try:
            importlib.import_module(new)
        except ModuleNotFoundError as error:
            if error.name is None or not new.startswith(error.name):
                raise
            raise ModuleNotFoundError(f"there is no module {spec.name}, nor {new}", name=spec.name) from None
        warnings.warn(
            f"{spec.name} is {new} now; write the new name (docs/reference/moved.md)", FutureWarning, stacklevel=2
        )
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Gives ``module`` what the new one has. A package has no path, so that what is below it comes here, too."""
        new = sys.modules[module.__spec__.origin or ""] if module.__spec__ else module
        if hasattr(new, "__path__"):
            module.__path__ = []
        sys.modules[module.__name__] = module
        module.__getattr__ = lambda name: getattr(new, name)
