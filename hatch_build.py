"""Merge the drop-in folders into the wheel; an editable install reads them in place (``mmrl/core/checkout.py``)."""

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DropIns(BuildHookInterface):
    def initialize(self, version, build_data):
        if version == "standard":
            for folder in ("pipelines", "rewards", "datasets", "environments"):
                build_data["force_include"][folder] = f"mmrl/{folder}"
