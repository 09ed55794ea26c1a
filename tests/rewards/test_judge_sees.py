"""Judges that see: pictures in process, through the model's own processor. Needs torchvision."""

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from tests.support import tiny

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return str(tiny.vision_model(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl"))


def judge(model, **options):
    """A random model begins with either word now and then."""
    return mmrl.load("rewards", "judge:score")(model=model, answer={"type": "yes_no", "floor": 0}, **options)


def pictures(*colours, size=(40, 30)):
    return [Image.new("RGB", size, colour) for colour in colours]


def shown(image, k=0, prompt="a red circle"):
    return Sample(Prompt("p", prompt), SampleId(1, 0, 0, k), image)


def own_answer(folder, image, question):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    with torch.no_grad():
        log_probs = torch.log_softmax(model(**inputs).logits[0, -1].double(), -1).exp()
    at = processor.tokenizer.convert_tokens_to_ids(["y", "Y", "n", "N"])
    y, big_y, n, big_n = log_probs[at].tolist()
    return (y + big_y) / (y + big_y + n + big_n)


def test_a_picture_is_judged_by_the_models_own_log_probs(seeing):
    images = [*pictures("red", "blue"), *pictures("green", size=(64, 28))]
    one = judge(seeing, rubric="{{ image }}Does it show {{ prompt }}?")
    assert one.__mmrl_reward__.inputs == ("image",)
    scores = one.score([shown(image, k) for k, image in enumerate(images)], context=Context())["score"]
    expected = [own_answer(seeing, image, "Does it show a red circle?") for image in images]
    assert scores == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 1e-2  # the control: the picture matters


def test_questions_with_and_without_pictures_stand_in_one_batch(seeing):
    import io

    from mmrl.core.media import Media

    buffer = io.BytesIO()
    Image.new("RGB", (30, 30), "red").save(buffer, "PNG")
    media = (Media("image", data=buffer.getvalue()),)
    with_, two, without = (
        Sample(Prompt("p", "What colour?", media=m), SampleId(1, 0, 0, k), text="red")
        for k, m in enumerate([media, media * 2, ()])
    )
    one = judge(seeing, rubric="{{ prompt }} {{ response }}")
    together = one.score([with_, two, without], context=Context())["score"]
    alone = [
        judge(seeing, rubric="{{ prompt }} {{ response }}").score([s], context=Context())["score"][0]
        for s in (with_, two, without)
    ]
    assert together == pytest.approx(alone, abs=1e-4)
    assert len({round(v, 3) for v in together}) == 3


def test_a_picture_the_processor_refuses_costs_its_neighbours_nothing(seeing):
    made = [shown(Image.new("RGB", (2000, 2)), 0), shown(pictures("red")[0], 1)]
    first, second = judge(seeing, rubric="{{ image }}{{ prompt }}?").score(made, context=Context())["score"]
    assert isinstance(first, Failed)
    assert "aspect ratio" in first.reason
    assert second == pytest.approx(own_answer(seeing, made[1].image, "a red circle?"), abs=1e-4)


def test_a_clip_that_a_pipeline_made_is_judged_by_its_frames(seeing):
    """The small Wan's own clips, through the rewards of a run; and the model sees which frames."""
    from mmrl.app.build import build
    from mmrl.config.loader import load_recipe
    from mmrl.core.trajectory import SampleId, Slot

    options = f'{{model: "{seeing}", rubric: "{{{{ clip }}}}Does it show {{{{ prompt }}}}?", frames: 2, '
    options += "answer: {floor: 0, type: yes_no}}"
    loaded = load_recipe(
        ["moving-shapes"],
        [f"rewards=[{{name: judge, options: {options}}}]", "sampling.steps=2", "sampling.window=null"],
    )
    run = build(loaded.recipe)
    ids = [SampleId(0, 0, 0, k) for k in range(2)]
    slots = [Slot(0, 0, 0, run.prompts[0])] * 2
    run.pipeline.encode(slots)
    made = run.pipeline.samples(run.pipeline.sample(slots, ids, [], seed=0), run.rewards.inputs)
    assert [(s.image, len(s.video)) for s in made] == [(None, 5)] * 2
    answer = run.rewards.answer("judge", made, 0)
    assert all(0 < v < 1 for v in answer.total)
    turned = [Sample(s.prompt, s.id, video=s.video[::-1]) for s in made]
    inner = [Sample(s.prompt, s.id, video=(s.video[0], *s.video[:3], s.video[-1])) for s in made]
    assert run.rewards.answer("judge", inner, 0).total == pytest.approx(answer.total, abs=1e-5)
    assert abs(run.rewards.answer("judge", turned, 0).total[0] - answer.total[0]) > 1e-5, "the order of frames counts"


def test_candidates_are_compared_by_their_pictures(seeing):
    made = [shown(image, k) for k, image in enumerate(pictures("red", "blue", "green"))]
    rubric = "{{ a.image }}{{ b.image }}Which is more {{ prompt }}?"
    scores = judge(seeing, rubric=rubric, mode="pairwise").score(made, context=Context())["score"]
    assert sum(scores) == pytest.approx(1.5)
    assert len({round(s, 4) for s in scores}) == 3
