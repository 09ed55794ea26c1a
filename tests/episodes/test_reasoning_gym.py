"""Questions of reasoning-gym: its tasks as they are, and what is refused of them."""

import pytest

import mmrl
from mmrl.config.environment import Environment as Section
from mmrl.core.episode import Action
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.episodes.loading import opened

gym = pytest.importorskip("reasoning_gym")

EASY = {"min_terms": 2, "max_terms": 2}


@pytest.fixture(scope="module")
def prompts():
    return mmrl.load("datasets", "reasoning_gym").prompts


def world(prompt, **options):
    made = opened(Section(name="reasoning_gym", options=options)).make()
    made.reset(prompt, 0)
    return made


def test_questions_are_those_of_reasoning_gym_and_none_is_held_out_and_trained_on(prompts):
    train = prompts("train", task="chain_sum", size=50, seed=3, options=EASY, instruction="Compute.")
    theirs = gym.create_dataset("chain_sum", seed=3, size=50, **EASY)
    assert [p.text for p in train] == [f"Compute.\n\n{theirs[i]['question']}" for i in range(50)]
    assert [p.meta["answer"] for p in train] == [theirs[i]["answer"] for i in range(50)]
    held = prompts("heldout", task="chain_sum", size=50, seed=3, options={"min_terms": 6, "max_terms": 6})
    assert not {p.id for p in train} & {p.id for p in held}
    of_other_seed = prompts("train", task="chain_sum", size=50, seed=4, options={"min_terms": 6, "max_terms": 6})
    assert not {p.text for p in of_other_seed} & {p.text for p in held}


def test_a_wrong_answer_is_asked_again_until_the_tries_are_over(prompts):
    prompt = prompts("train", task="chain_sum", options=EASY)[7]
    right = prompt.meta["answer"]
    made = world(prompt)
    first = made.step(Action(f"<think>{right}</think> 10000"))
    assert (first.content, first.reward, first.done) == ("That is wrong. Try again.", 0.0, False)
    last = made.step(Action(f"<think>so</think> It is <answer>1</answer>, no, <answer> {right} </answer>"))
    assert (last.reward, last.done) == (1.0, True)
    assert world(prompt, after="answer:").step(Action(f"1+1=2\n\nanswer: {right}")).done
    made = world(prompt, tries=2)
    told = [made.step(Action("10000")) for _ in range(2)]
    assert [(one.reward, one.done) for one in told] == [(0.0, False), (0.0, True)]


def test_a_part_of_the_score_is_paid_only_where_that_is_asked_for(prompts):
    prompt = prompts("train", task="chain_sum", options=EASY)[0]
    answer = f"{prompt.meta['answer']} or so"
    item = gym.create_dataset("chain_sum", seed=0, size=1000, **EASY)
    partly = item.score_answer(answer, item[0])
    assert 0 < partly < 1
    assert world(prompt, tries=1).step(Action(answer)).reward == 0.0
    assert world(prompt, tries=1, partial=True).step(Action(answer)).reward == partly


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("graph_color", "its scorer gives its own answer 0"),
        ("prime_factorization", "it raises ValueError"),
        ("game_of_life_halting", "gives 1 to the answer 'zzz'"),
        ("list_functions", "other questions of an equal seed"),
    ],
)
def test_tasks_whose_scorers_reward_nothing_are_refused(prompts, task, why):
    with pytest.raises(UserError, match=f"{why}.*take another task"):
        prompts("train", task=task, size=20)


def test_wrong_names_and_options_are_named(prompts):
    with pytest.raises(UserError, match=r"no task 'chain_sums'.*did you mean 'chain_sum'"):
        prompts("train", task="chain_sums")
    with pytest.raises(UserError, match=r"cannot be made: TypeError.*correct options"):
        prompts("train", task="chain_sum", options={"terms": 2})
    with pytest.raises(UserError, match=r"take it as data\.name"):
        world(Prompt("p", "1+1?")).step(Action("2"))
    with pytest.raises(UserError, match="tries is 0"):
        world(Prompt("p", "1+1?"), tries=0)
