"""Reward models: a transformer with a scalar head, read at the end of prompt and response.

transformers' class for sequence classification is used where it has one (language models). For other families the same
class is made from transformers' own parts, so that a vision-language model can score too. Directories are in
transformers' format, and the score is what that class computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmrl.config.schema import Recipe
from mmrl.core import sharded_loading
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.hub_files import check_weights, place_of
from mmrl.core.json_types import JsonObject
from mmrl.core.library_loading import check_size, refused
from mmrl.core.reward_contract import Failed
from mmrl.core.stored import read_object
from mmrl.core.trajectory import Prompt
from mmrl.core.whole_weights import whole_weights
from mmrl.families.text.export import plain
from mmrl.logging.card import Usage, What, public
from mmrl.models.text.answered import answer_tokens
from mmrl.models.text.base_model import base_model, peft_model
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.conversation import messages_of
from mmrl.models.text.features import PER_TOKEN, as_weights, joined
from mmrl.models.text.given import stacked
from mmrl.models.text.loading import AutoModel, open_weights, set_exported_config
from mmrl.models.text.row_loading import load_rows

if TYPE_CHECKING:  # slow to import
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

SETTINGS = "mmrl_reward_model.json"
"""A file in an export, with the pipeline that reads it and the variables of the chat template."""
HEAD = "score"


def score_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of a reward model with this ``config``. Raises ``UserError`` for an unknown family."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING, PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return _class(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)])
    if type(config) not in MODEL_MAPPING:
        raise UserError(f"model.path: transformers has no model of type {config.model_type!r}; take another")
    body = _class(MODEL_MAPPING[type(config)])
    family = next(c for c in body.__mro__[1:] if issubclass(c, PreTrainedModel) and c.base_model_prefix == "model")
    name = f"{body.__name__.removesuffix('Model')}ForSequenceClassification"
    return type(name, (GenericForSequenceClassification, family), {"__module__": __name__})


def _class(entry: type[PreTrainedModel] | tuple[type[PreTrainedModel] | None, ...]) -> type[PreTrainedModel]:
    """An entry of transformers' tables, which have several classes for a few families."""
    found = entry[0] if isinstance(entry, tuple) else entry
    assert found is not None
    return found


def load_scorer(
    path: str,
    pad_token: int,
    dtype: torch.dtype,
    seed: int,
    *,
    trained: bool = False,
    policy_of: Recipe | None = None,
) -> PreTrainedModel:
    """Load the model at ``path``: a reward model, or one that writes text, which gets a new head drawn from ``seed``.

    It is frozen and without dropout. ``trained``: it must have a head. ``policy_of``: the recipe that trains it, for a
    model that is about to be sharded: this rank reads only its rows (``mmrl.core.sharded_loading``). Raises
    ``UserError``.
    """
    import transformers
    from transformers import AutoConfig

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    with refused(
        lambda reason: (
            f"path: {place_of(path)} cannot be loaded as a reward model: {reason}\n"
            "  Give a directory with config.json and safetensors as transformers saves it, or a hub name while online."
        )
    ):
        check_weights(path)
        config = AutoConfig.from_pretrained(path)
        kind = score_class(config)
        check_size(kind, path)
        scores = any(str(name).endswith("ForSequenceClassification") for name in config.architectures or ())
        if scores or kind.__module__ != __name__:
            model = _rows(kind.from_pretrained, path, dtype, policy_of, num_labels=1)
            lacking = set[str]()
            if model is None:
                torch.manual_seed(seed)
                with whole_weights(f"path: {path}", unused=(f"{HEAD}.", "lm_head.")):  # the head may be new
                    loaded = kind.from_pretrained(path, num_labels=1, dtype=dtype, output_loading_info=True)
                assert isinstance(loaded, tuple)  # not as it is annotated
                model, found = loaded
                lacking = {*found["missing_keys"]}
        else:
            model, lacking = _with_head(kind, config, path, dtype, policy_of), {f"{HEAD}.weight"}
    lacking -= set() if trained else {f"{HEAD}.weight"}
    if lacking:
        raise UserError(
            f"path: {path} lacks the weights {', '.join(sorted(lacking)[:3])}, so it is no whole "
            f"{'reward model; name what mmrl export of a reward_model run wrote' if trained else 'model; save it anew'}"
        )
    model.config.get_text_config().pad_token_id = pad_token
    set_exported_config(model, None)
    return model.requires_grad_(False).eval()


def _rows(
    read: Callable[..., Any], path: str, dtype: torch.dtype, policy_of: Recipe | None, **more: Any
) -> PreTrainedModel | None:
    """The model with this rank's rows, where it is about to be sharded; None to load it whole."""
    ranks = sharded_loading.group()
    if ranks is None or policy_of is None:
        return None
    with whole_weights(f"path: {path}", unused=(f"{HEAD}.", "lm_head.")):
        return load_rows(read, path, dtype, ranks, [f"{HEAD}.weight"], **more)


def _with_head(
    kind: type[PreTrainedModel], config: PretrainedConfig, path: str, dtype: torch.dtype, policy_of: Recipe | None
) -> PreTrainedModel:
    """A ``kind`` with the transformer of the model at ``path``, which writes text. That model is loaded with its own
    class, because transformers renames the weights of older checkpoints only for this class."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto: type[AutoModel] = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with whole_weights(f"path: {path}", unused=("lm_head.",)):
        writer = _rows(auto.from_pretrained, path, dtype, policy_of) or auto.from_pretrained(path, dtype=dtype)
    writer.config.num_labels = 1
    with torch.device("meta"):
        made = kind(writer.config)
    setattr(made, made.base_model_prefix, writer.base_model)
    text = writer.config.get_text_config()
    head = nn.Linear(text.hidden_size, 1, bias=False, dtype=dtype)
    nn.init.normal_(head.weight, std=getattr(text, "initializer_range", 0.02))
    setattr(made, HEAD, head)
    return made


def open_policy(recipe: Recipe, path: str, pad_token: int, device: torch.device) -> nn.Module:
    """A reward model to train: the weights that the recipe names, and always the new head. Raises ``UserError``."""
    dtype = getattr(torch, recipe.model.dtype) if recipe.model.lora else torch.float32
    scorer = load_scorer(path, pad_token, dtype, recipe.seed, policy_of=recipe)
    return sharded_loading.move(open_scorer(scorer, recipe), device)


def open_scorer(model: PreTrainedModel, recipe: Recipe) -> nn.Module:
    """Unfreeze the weights of a reward model that the recipe names, and its head. Raises ``UserError``."""
    policy = open_weights(model, recipe)
    _float_head(model).requires_grad_(True)
    return policy


def _float_head(model: PreTrainedModel) -> nn.Module:
    """The head of a reward model, from here on in float32 whatever is below it: its numbers are the scores."""
    head = getattr(model, HEAD).float()
    head.forward = MethodType(_in_dtype_of_head, head)
    return head


def _in_dtype_of_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The head is float32; the layers below it may be in half precision."""
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.to(head.weight.dtype), head.weight, head.bias)


class Scorer:
    """Final class. A trained reward model with its chat format; it scores responses to prompts.

    ``context``: the most tokens of prompt and response together.
    """

    def __init__(self, model: PreTrainedModel, conditioner: Conditioner) -> None:
        self.model, self.conditioner = model, conditioner
        if isinstance(getattr(model, HEAD, None), nn.Linear):
            _float_head(model)
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], batch_size: int) -> list[float | Failed]:
        """One score per row, or the reason why it failed; rows of similar length share a forward."""
        prompt_features: dict[int, dict[str, Tensor]] = {}
        rows: list[tuple[dict[str, Tensor], Tensor] | Failed] = []
        for prompt, text in zip(prompts, texts, strict=True):
            try:
                if id(prompt) not in prompt_features:  # the samples of a group share their prompt and its pictures
                    prompt_features[id(prompt)] = self.conditioner.encode(prompt)
                rows.append(self._row(prompt, prompt_features[id(prompt)], text))
            except (BadPromptError, ValueError) as error:
                rows.append(Failed(str(error)))
        out: list[float | Failed] = [row if isinstance(row, Failed) else 0.0 for row in rows]
        good = {n: row for n, row in enumerate(rows) if not isinstance(row, Failed)}
        order = sorted(good, key=lambda n: len(good[n][0]["input_ids"]) + len(good[n][1]))
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            for n, value in zip(places, self._forward([good[n] for n in places]), strict=True):
                out[n] = value
        return out

    def _row(self, prompt: Prompt, features: dict[str, Tensor], text: str) -> tuple[dict[str, Tensor], Tensor]:
        """The features and tokens of a row. Raises ``ValueError`` if the model cannot read the text."""
        answer = {"role": "assistant", "content": text}
        made, cut = answer_tokens(self.conditioner, prompt, answer, ends=False, whole=False)
        features = {name: of[: len(of) - cut] if name in PER_TOKEN else of for name, of in features.items()}
        tokens = torch.tensor(made)
        n = len(features["input_ids"]) + len(tokens)
        if self.context is not None and n > self.context:
            raise ValueError(f"prompt and response have {n} tokens, and the reward model's context {self.context}")
        return features, tokens

    @torch.inference_mode()
    def _forward(self, rows: Sequence[tuple[Mapping[str, Tensor], Tensor]]) -> list[float]:
        device = self.model.device
        features = [as_weights(row, self.model, device) for row, _ in rows]
        pad_token = self.conditioner.pad_token
        texts, mask = stacked([tokens for _, tokens in rows], pad_token, device)
        inputs = joined(features, pad_token, own_positions=self.conditioner.own_positions, responses=texts, mask=mask)
        return self.model(**inputs, use_cache=False).logits[:, 0].float().tolist()


def settings_at(path: str) -> JsonObject:
    """The settings that ``mmrl export`` wrote with a reward model; empty for other models. Raises ``UserError``."""
    file = Path(path) / SETTINGS
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise UserError(f"path: {file} cannot be read ({error}); export the reward model again") from error


def refuse_others(recipe: Recipe, chat: str) -> None:
    """Raise ``UserError`` if the recipe does not train a reward model."""
    if not recipe.algorithm.trains_scores:
        raise UserError(
            f"pipeline: {recipe.pipeline} is a model that scores, and {recipe.algorithm.type} trains one that writes "
            f"text; set pipeline: {chat}, or algorithm.type: reward_model"
        )


def write(policy: nn.Module, conditioner: Conditioner, recipe: Recipe, out: Path, what: What) -> None:
    """Write a reward model, or its adapter and head for peft, with its tokenizer and what ``settings_at`` reads.

    The policy in memory stays as it is.
    """
    if what == "lora":
        from peft import LoraConfig

        adapted = peft_model(policy)
        config = adapted.peft_config["default"]
        assert isinstance(config, LoraConfig)
        kept = config.base_model_name_or_path, config.task_type, config.modules_to_save
        config.base_model_name_or_path, config.task_type = public(recipe.model.path), "SEQ_CLS"
        config.modules_to_save = [HEAD]
        try:
            _save_adapter(adapted, out)
        finally:
            config.base_model_name_or_path, config.task_type, config.modules_to_save = kept
    else:
        plain(policy, getattr(torch, recipe.model.dtype)).save_pretrained(out)
    conditioner.saved.save_pretrained(out)
    noted = {"pipeline": "vlm/score" if hasattr(conditioner.saved, "image_processor") else "llm/score"}
    settings = {**noted, "chat_template": recipe.decoding.chat_template_kwargs}
    (out / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _save_adapter(policy: PeftModel, out: Path) -> None:
    """Write the adapter and the head, under peft's name for a module that is saved whole."""
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(policy, save_embedding_layers=False)
    head = getattr(policy.get_base_model(), HEAD).weight
    tensors |= {f"base_model.model.{HEAD}.weight": head.detach()}
    out.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "adapter_model.safetensors", {"format": "pt"})
    policy.peft_config["default"].save_pretrained(str(out))


def usage(
    policy: nn.Module, conditioner: Conditioner, recipe: Recipe, what: What, folder: str, prompt: Prompt
) -> Usage:
    """Code that computes the ``score`` of a response to ``prompt`` with the model in ``folder``."""
    kind, saved = type(base_model(policy)).__name__, conditioner.saved
    library, tags = ("peft", [kind, "lora"]) if what == "lora" else ("transformers", [kind])
    seeing = _SEEING if what == "merged" else _SEEING_LORA  # transformers has no such class: mmrl makes it
    source = seeing if hasattr(saved, "image_processor") else _READING
    base = public(recipe.model.path)
    code = source.format(
        folder=repr(folder),
        base=repr(folder if what == "merged" else base),
        messages=repr(messages_of(prompt)),
        prompt=repr(prompt.text),
        given=_given(prompt),
        variables="".join(f", {name}={value!r}" for name, value in recipe.decoding.chat_template_kwargs.items()),
        variables_of=repr(recipe.decoding.chat_template_kwargs),
        peft="from peft import PeftModel\n" if what == "lora" else "",
        adapter=f"model = PeftModel.from_pretrained(model, {folder!r})\n" if what == "lora" else "",
    )
    return Usage(library, "text-classification", [*tags, "reward-model"], {f"With {library}": code})


def _given(prompt: Prompt) -> str:
    """A prompt's media and system message as further arguments in Python source, with example paths."""
    names = {"image": "picture.jpg", "video": "clip.mp4"}
    media = "".join(f'Media("{m.kind}", path="{names[m.kind]}"), ' for m in prompt.media)
    system = f", system={prompt.system!r}" if prompt.system else ""
    turns = f", turns={tuple(tuple(turn) for turn in prompt.turns)!r}" if prompt.turns else ""
    return (f", media=({media.rstrip()})" if media else "") + system + turns


_READING = """\
import torch
{peft}from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained({base}, num_labels=1)
{adapter}tokenizer = AutoTokenizer.from_pretrained({folder})
messages = {messages}
messages.append({{"role": "assistant", "content": "An answer."}})
text = tokenizer.apply_chat_template(messages, tokenize=False{variables})
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
with torch.no_grad():
    score = model(**inputs).logits[0, 0].item()
"""
_SEEING = """\
import mmrl
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt

scorer = mmrl.load("pipelines", "vlm/score").scorer({folder}, {variables_of})
prompt = Prompt("1", {prompt}{given})
score = scorer.score([prompt], ["An answer."], batch_size=1)[0]
"""
_SEEING_LORA = """\
import torch
from peft import PeftModel

from mmrl.families.text.scoring import load_scorer

model = load_scorer({base}, pad_token=0, dtype=torch.float32, seed=0)
model = PeftModel.from_pretrained(model, {folder})  # an export of the whole model is easier to use
"""
