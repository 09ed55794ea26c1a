"""The faults still fit the code. Whether tests notice them is what ``python -m tests.faults`` says."""

import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch

from tests.faults.faults import FAULTS
from tests.faults.machinery import ROOT, GoneError, Result, file_of, mutated, put_in


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_applies(fault):
    file, _ = mutated(fault)
    assert file.is_relative_to(ROOT)
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_there_are_twenty_of_other_names():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 20


@pytest.mark.parametrize(
    "change",
    [{"at": "mmrl.nothing:main"}, {"at": "mmrl.app.build:nothing"}, {"old": "nothing()"}, {"old": "1", "new": "1"}],
    ids=str,
)
def test_what_no_longer_fits_is_an_error(change):
    with pytest.raises(GoneError):
        mutated(replace(FAULTS[0], **change))


def test_an_import_gives_the_module_with_the_fault(monkeypatch):
    monkeypatch.setattr(SourceFileLoader, "get_code", SourceFileLoader.get_code)  # put back at the end
    fault = next(fault for fault in FAULTS if fault.at.startswith("mmrl.algorithms.policy_gradient:"))
    weights, mask = torch.ones(1), torch.tensor([[1.0, 0.0]])

    def outside():
        spec = spec_from_file_location("with_a_fault", file_of("mmrl.algorithms.policy_gradient"))
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module.Aggregation("token_mean").loss_weights(weights, mask)[0, 1].item()

    assert outside() == 0.0
    result = Result()
    put_in(fault, result)
    assert not result.loaded
    assert outside() == 1.0
    assert result.loaded
