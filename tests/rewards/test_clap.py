"""CLAP: how well a clip's sound fits its prompt; and sound on its way to a reward."""

import base64
import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile
from scipy.signal import resample_poly

import mmrl
from mmrl.app.conformance import rewards as conformance
from mmrl.core.errors import UserError
from mmrl.core.media.sound import BadSoundError, read_wav, wav_bytes
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Audio, Prompt, Sample, SampleId
from mmrl.rewards import wire
from mmrl.rewards.bench import measure, pictures, show
from mmrl.rewards.views import views
from tests.support import asleep, tiny

TEXTS = ["a dog barks", "rain", "a dog barks", "x" * 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    allow_cpu_only()  # before transformers imports torchaudio
    return tiny.clap(tmp_path_factory.mktemp("clap"))


def tone(hertz, rate, seconds=0.5, channels=2):
    time = torch.arange(round(rate * seconds)) / rate
    return Audio(0.5 * torch.sin(2 * torch.pi * hertz * time).expand(channels, -1).clone(), rate)


def heard(rate=24000, **meta):
    sounds = [tone(440 * (n + 1), rate) for n in range(len(TEXTS))]
    prompts = [Prompt(str(n), text, meta=meta) for n, text in enumerate(TEXTS)]
    return [Sample(p, SampleId(0, n, 0, 0), audio=s) for n, (p, s) in enumerate(zip(prompts, sounds, strict=True))]


@pytest.mark.parametrize("rate", [24000, 48000, 44100])
def test_it_is_the_models_own_cosine_of_the_sound_at_its_rate(folder, rate):
    from transformers import ClapModel, ClapProcessor

    samples = heard(rate)
    scores = mmrl.load("rewards", "clap").Clap(str(folder)).score(samples, context=Context(0, "cpu"))
    model = ClapModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor = ClapProcessor.from_pretrained(folder)
    for sample, score in zip(samples, scores, strict=True):
        mono = sample.audio.wave.double().mean(0).numpy()
        common = np.gcd(48000, rate)
        mono = mono if rate == 48000 else resample_poly(mono, 48000 // common, rate // common)
        given = processor(
            text=[sample.prompt.text], audio=[mono], sampling_rate=48000, truncation=True, return_tensors="pt"
        )
        with torch.no_grad():
            made = model(**given)
        expected = (torch.nn.functional.cosine_similarity(made.text_embeds, made.audio_embeds).item() + 1) / 2
        assert abs(score - expected) < 1e-5
    assert len({round(score, 6) for score in scores}) == len(scores), "another sound or text, another score"


def test_of_a_long_sound_the_beginning_is_heard_and_the_same_each_time(folder):
    reward = mmrl.load("rewards", "clap").Clap(str(folder))
    long = [Sample(Prompt("0", "rain"), SampleId(0, 0, 0, 0), audio=tone(300, 24000, seconds=21))]
    first = [Sample(Prompt("0", "rain"), SampleId(0, 0, 0, 0), audio=Audio(long[0].audio.wave[:, : 24000 * 10], 24000))]
    again = [reward.score(long, context=Context(0, "cpu"))[0] for _ in range(2)]
    assert again[0] == again[1]
    assert abs(again[0] - reward.score(first, context=Context(0, "cpu"))[0]) < 1e-4


def test_a_text_of_the_sound_may_stand_in_the_prompts_meta(folder):
    reward = mmrl.load("rewards", "clap").Clap(str(folder), key="heard")
    samples = [*heard(heard="rain")[:1], *heard()[1:2]]
    with_text, without = reward.score(samples, context=Context(0, "cpu"))
    same = [Sample(Prompt("0", "rain"), SampleId(0, 0, 0, 0), audio=samples[0].audio)]
    plain = mmrl.load("rewards", "clap").Clap(str(folder)).score(same, context=Context(0, "cpu"))[0]
    assert abs(with_text - plain) < 1e-6
    assert isinstance(without, Failed)
    assert "no text under 'heard'; correct options.key" in without.reason


def test_every_check_of_a_reward_passes(folder):
    case = conformance.opened("clap:score", {"path": str(folder)})
    checks = (
        conformance.every_sample_is_scored,
        conformance.it_answers_alike,
        conformance.neighbours_do_not_matter,
        conformance.a_strange_sample_costs_only_itself,
    )
    assert all(check(case) for check in checks)


def test_it_sleeps_whole_and_scores_the_same(folder, monkeypatch):
    reward = mmrl.load("rewards", "clap").Clap(str(folder))
    asleep.scores_the_same(reward, lambda: reward.score(heard()[:2], context=Context(0, "cpu")), monkeypatch)


def test_used_wrongly_it_says_the_edit(folder, tmp_path):
    load = mmrl.load("rewards", "clap").Clap
    with pytest.raises(UserError, match=r"cannot load a CLAP model from .*set the reward's options.path"):
        load(str(tiny.clip(tmp_path / "clip")))
    config = json.loads((folder / "config.json").read_text())
    config["audio_config"]["enable_fusion"] = True
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"chooses at random \(enable_fusion\), .*; take one without, such as laion"):
        load(str(tmp_path))


def test_a_sound_crosses_the_wire_whole():
    samples = heard()
    body = wire.encode_request(samples, [], 3)[0]
    made = wire.decode_request(body)
    assert made.errors == [None] * len(samples)
    for before, after in zip(samples, made.samples, strict=True):
        assert torch.equal(before.audio.wave, after.audio.wave)
        assert after.audio.rate == before.audio.rate
    assert wire.picture_bytes(made, tensor=False) == sum(4 * s.audio.wave.numel() for s in samples)
    (copied,) = views(samples[:1])
    copied.audio.wave.zero_()
    assert samples[0].audio.wave.abs().max() > 0.4


def noisy(kind, channels=1, rate=8000):
    import io

    draw = np.random.default_rng(0)
    values = draw.uniform(-0.9, 0.9, (800, channels))
    scaled = {"f": values, "i": values * 2**15, "u": values * 128 + 128}[np.dtype(kind).kind]
    scaled = values * 2**31 if kind == "int32" else scaled
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, scaled.astype(kind))
    return buffer.getvalue(), torch.from_numpy(values.T.copy()).float()


@pytest.mark.parametrize(
    ("kind", "channels"), [("float32", 1), ("float64", 2), ("int16", 2), ("int32", 1), ("uint8", 2)]
)
def test_wav_files_of_any_numbers_are_read_as_they_sound(kind, channels):
    data, expected = noisy(kind, channels)
    wave, rate = read_wav(data)
    assert rate == 8000
    torch.testing.assert_close(wave, expected, atol=0.01 if kind == "uint8" else 1e-4, rtol=0)


def hostile():
    good = wav_bytes(*tone(440, 8000, 0.01))
    yield b""
    yield b"RIFF" + b"\xff" * 60
    yield good[:30]
    yield wav_bytes(torch.full((1, 8), float("nan")), 8000)
    yield wav_bytes(torch.zeros(1, 0), 8000)
    yield wav_bytes(torch.zeros(32, 8), 8000)
    draw = np.random.default_rng(1)
    for _ in range(200):
        bad = bytearray(good)
        for place in draw.integers(0, 60, 3):
            bad[place] = draw.integers(0, 256)
        yield bytes(bad[: draw.integers(20, len(bad))])


def test_a_hostile_wav_is_refused_or_read_never_more():
    refused = 0
    for data in hostile():
        try:
            wave, rate = read_wav(data)
        except BadSoundError:
            refused += 1
        else:
            assert wave.isfinite().all()
            assert 0 < wave.numel() <= 4 * len(data)
            assert rate > 0
    assert refused > 6
    body = json.loads(wire.encode_request(heard()[:2], [], 0)[0])
    body["samples"][0]["audio"] = base64.b64encode(b"RIFF").decode()
    made = wire.decode_request(json.dumps(body).encode())
    assert made.samples[0] is None
    assert made.errors[0].startswith("audio: not a readable WAV file")
    assert made.errors[1] is None


def test_a_folder_of_clips_with_their_sound_is_scored(tmp_path, capsys):
    (tmp_path / "hears.py").write_text(
        "import mmrl\n\n\n@mmrl.reward(inputs=('audio',))\ndef loud(samples, *, context):\n"
        "    return [float(s.audio.wave.abs().max()) for s in samples]\n"
    )
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in ("a", "silent", "broken"):
        Image.new("RGB", (8, 8)).save(clips / f"{name}.webp")
    (clips / "a.wav").write_bytes(wav_bytes(*tone(440, 8000)))
    (clips / "broken.wav").write_bytes(b"RIFF")
    show(measure(str(tmp_path / "hears.py:loud"), pictures(clips)))
    said = capsys.readouterr().out
    assert "a.webp\t0.5" in said
    assert "silent.wav beside it: No such file" in said
    assert "broken.wav beside it: not a readable WAV file" in said
