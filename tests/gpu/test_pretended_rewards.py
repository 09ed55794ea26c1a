"""Rewards on a CUDA device that is pretended: those with a model compute on a stream of their own, behind what they
read, and the thread that samples does not wait for them."""

import pytest

pytestmark = pytest.mark.pretend_cuda

REWARDS = """
import mmrl, torch

def looked():
    torch.cuda.begin.wait()
    torch.cuda.seen.append(torch.cuda.current_stream())

@mmrl.reward(inputs=("tensor",), device=True)
class Model:
    def __init__(self, fails=0):
        self.fails = fails

    def score(self, samples, *, context):
        looked()
        self.fails -= 1
        if self.fails >= 0:
            raise ValueError("not now")
        return torch.stack([s.tensor for s in samples]).mean((1, 2, 3)) + torch.ones(1).to(context.device)

@mmrl.reward(inputs=("tensor",), device=True)
async def later(samples, *, context):
    looked()
    return [1.0] * len(samples)

@mmrl.reward(inputs=("tensor",))
def plain(samples, *, context):
    looked()
    return [1.0] * len(samples)
"""


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Call a reward of the file on two pictures: the last answer, the streams of its calls, and the waits of the thread
    that asks, until the reward begins."""
    import threading

    import torch

    from mmrl.core.reward_contract import Context
    from mmrl.core.trajectory import Prompt, Sample, SampleId
    from mmrl.rewards.calling import Caller
    from mmrl.rewards.loading import build, find
    from tests.support import pretend

    (tmp_path / "rewards.py").write_text(REWARDS)
    callers = []

    def call(name, options=None, retries=0, device="cuda", times=1):
        monkeypatch.setattr(torch.cuda, "begin", threading.Event(), raising=False)
        monkeypatch.setattr(torch.cuda, "seen", [], raising=False)
        callers.append(Caller(build(find(f"{tmp_path / 'rewards.py'}:{name}"), options or {}), 60, retries))
        pictures = torch.stack([torch.full((3, 4, 4), 0.25 * n) for n in range(2)]).to(device)
        samples = [Sample(Prompt("0", "x"), SampleId(0, 0, 0, n), tensor=pictures[n]) for n in range(2)]
        with pretend.waits() as waits:
            futures = [callers[-1].submit(samples, Context(device=device)) for _ in range(times)]
        torch.cuda.begin.set()
        answers = [one.result() for one in futures]
        return answers[-1], torch.cuda.seen, waits

    yield call
    for one in callers:
        one.close()


def test_a_model_computes_on_its_own_stream_behind_the_samples(called):
    import torch

    answer, streams, waits = called("Model", times=3)
    assert answer.total == [1.0, 1.25]
    assert not waits
    assert len(set(map(id, streams))) == 1
    assert streams[0] is not torch.cuda.default_stream()
    assert streams[0].behind == [torch.cuda.default_stream()] * 3
    assert len(streams[0].reads) == 2  # two pictures of one tensor
    other = called("Model")[1][0]
    assert other is not streams[0]
    assert torch.cuda.current_stream() is torch.cuda.default_stream()  # of this thread


def test_it_may_fail_and_be_asked_again(called):
    import torch

    answer, streams, _ = called("Model", {"fails": 1}, retries=1)
    assert answer.total == [1.0, 1.25]
    assert len(streams) == 2
    assert streams[0] is streams[1] is not torch.cuda.default_stream()
    answer, _, _ = called("Model", {"fails": 1})
    assert "not now" in answer.reasons[0]


@pytest.mark.parametrize(("name", "device"), [("plain", "cuda"), ("later", "cuda"), ("Model", "cpu")])
def test_the_others_compute_where_they_did(called, name, device):
    import torch

    _, streams, _ = called(name, device=device)
    assert streams == [torch.cuda.default_stream()]
