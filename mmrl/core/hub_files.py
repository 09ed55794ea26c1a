"""Find a checkpoint's files in a directory or on the hub: only the small ones if no weights are needed, or all."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject, as_object
from mmrl.core.packages.places import lacking
from mmrl.core.untrusted import open_file, read_json

_LARGEST = 256 << 20
"""Bytes of a file beside the weights; tokenizers have up to some 40 MB."""
_VALUES = 5_000_000
"""Values of a configuration or an index; the index of a large mixture of experts has some 200,000."""
_MANY = 10_000
"""The most of what a library makes one by one: layers, heads, experts, extra tokens. Real models have hundreds."""
_COUNTED = re.compile(r"(num|n)_(.*_)?(layer|block|head|expert)s?|.*_layers|layers_per_block|depths?|extra_ids")
_CONFIGURATION = re.compile(r"(.*_)?config\.json|.*index\.json|.*\.index\..*json|special_tokens_map\.json")
_WORDS = re.compile(r"(tokenizer|vocab|added_tokens|chat_template)\.json|.*\.(jinja|model)|(merges|vocab)\.txt")


def json_of(path: str, name: str) -> JsonObject:
    """The mapping in the JSON file ``name`` of the checkpoint ``path``. Raises ``OSError`` for the file and
    ``ValueError`` for its content; both name it."""
    file = file_of(path, name)
    return _mapping(file, Path(path) if Path(path).exists() else None)


def check_files(path: str) -> None:
    """Look at the configurations and tokenizers in the folder ``path`` before a library reads them, and at its
    components' in the folders of a pipeline; of a hub name at those in the hub's cache. What is not there yet is
    downloaded and read by the library, and looked at from the next time on.

    Raises ``UserError`` for a file that is no regular one, leads out of the folder or is too large, and for a
    configuration that is no mapping, or too deep.
    """
    folder = Path(path) if Path(path).is_dir() else cached_folder(path)
    if folder is None:
        return
    root = folder if folder == Path(path) else folder.parents[1]  # links of a snapshot lead to the blobs beside it
    for file in sorted((*folder.glob("*"), *folder.glob("*/*"))):
        try:
            if _CONFIGURATION.fullmatch(file.name):
                _mapping(file, root)
            elif _WORDS.fullmatch(file.name):
                open_file(file, most=_LARGEST, root=root).close()
            elif file.suffix == ".safetensors":
                open_file(file).close()
        except OSError as error:
            raise UserError(
                f"{file} cannot be read: {error.strerror or error}; download the checkpoint or save it anew"
            ) from error
        except ValueError as error:
            raise UserError(f"{error}; download the checkpoint or save it anew") from error


def check_weights(path: str) -> None:
    """Raises ``UserError`` where the folder ``path`` of a transformers model has no weights that its library would
    read: none at all, those of a variant alone (``model.fp16.safetensors``), or not all parts that its index lists."""
    folder = Path(path)
    try:
        named = _mapping(folder / "config.json", folder).get("transformers_weights")
    except (OSError, ValueError):  # a name of the hub, or whoever reads it says so
        return
    names = [named] if isinstance(named, str) else _WEIGHTS
    found = next((name for name in names if (folder / name).is_file()), None)
    variants = sorted({m["variant"] for file in folder.iterdir() if (m := _VARIANT.fullmatch(file.name))})
    if found is None and variants:
        raise UserError(
            f"{path} has weights of the variant {variants[0]} alone, and no model.safetensors; make one beside them "
            f"with transformers: from_pretrained({path!r}, variant={variants[0]!r}).save_pretrained({path!r})"
        )
    if found is None:
        raise UserError(f"{path} has no weights (model.safetensors, or its parts and their index); download it whole")
    try:
        parts = _listed(folder / found, folder) if found.endswith(".index.json") else set[str]()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: {found} is no list of files; download it whole") from error
    if absent := [name for name in sorted(parts) if not (folder / name).is_file()]:
        raise UserError(f"{path} lacks {absent[0]}, which {found} lists; download it whole")


_WEIGHTS = [f"{name}{more}" for name in ("model.safetensors", "pytorch_model.bin") for more in ("", ".index.json")]
"""As transformers looks for them."""
_VARIANT = re.compile(
    r"(?:model|pytorch_model)\.(?P<variant>(?!safetensors|bin|index)[\w-]+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)


def _listed(index: Path, folder: Path) -> set[str]:
    """The files with weights that an index lists. Raises ``OSError``, ``ValueError``, ``KeyError`` or ``TypeError``."""
    return {str(name) for name in as_object(_mapping(index, folder)["weight_map"]).values()}


def cached_folder(path: str) -> Path | None:
    """The snapshot of a hub name in the hub's cache; None where there is none."""
    from huggingface_hub import try_to_load_from_cache

    for name in ("config.json", "model_index.json"):
        with suppress(ValueError):  # no name of the hub
            if isinstance(found := try_to_load_from_cache(path, name), str):
                return Path(found).parent
    return None


def _mapping(file: Path, root: Path | None) -> JsonObject:
    try:
        found = read_json(file, most=_LARGEST, root=root, values=_VALUES)
    except ValueError as error:
        raise ValueError(f"{file} {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no mapping")
    left: list[JsonObject] = [found] if not file.name.endswith("index.json") else []
    while left:
        for key, value in left.pop().items():
            counts = value if isinstance(value, list) else [value]
            left += [one for one in counts if isinstance(one, dict)]
            if _COUNTED.fullmatch(key) and any(isinstance(n, int | float) and abs(n) > _MANY for n in counts):
                raise ValueError(f"{file} says {key}: {str(value)[:40]}, and a library would make so many one by one")
    return found


def file_of(path: str, name: str) -> Path:
    """The file ``name`` of the checkpoint ``path``, a directory or a hub name. Raises ``OSError``, within seconds where
    there is no net."""
    if Path(path).exists():
        return Path(path) / name
    if wrong := lacking(path):
        raise FileNotFoundError(wrong)
    return Path(_from_hub(path, name))


def folder_of(path: str) -> Path:
    """The folder that the checkpoint ``path`` lies in with its weights: itself, or of a hub name the one in the hub's
    cache, where it is downloaded to if need be. Raises ``OSError``."""
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(path, local_files_only=True))
        lacking = _lacks(folder)
        if not lacking:
            return folder
        why = OSError(f"{lacking} is missing in the hub's cache")
    except HFValidationError as error:
        raise OSError(str(error)) from error
    except OSError:
        why = OSError("it is not in the hub's cache")
    try:
        _reach()
    except OSError as error:
        raise OSError(f"{why}, and {error}") from error
    return Path(snapshot_download(path, allow_patterns=list(_FILES), etag_timeout=3))


def numbers_on_hub(path: str) -> dict[str, int]:
    """How many numbers of each dtype, by safetensors' names, the weights of the hub name ``path`` have: from the
    headers of the files, which are not downloaded. Raises ``OSError``, within seconds where there is no net."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        _reach()
        found = HfApi().get_safetensors_metadata(path)
    except NotASafetensorsRepoError as error:
        raise OSError("it is not in the hub's cache, and the hub has no model.safetensors of it") from error
    except Exception as error:  # its client raises those of several libraries
        why = str(error).strip().split("\n")[0]
        raise OSError(f"it is not in the hub's cache, and {why}") from error
    return {str(dtype): count for dtype, count in found.parameter_count.items()}


_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def _lacks(folder: Path) -> str:
    """A file that a whole checkpoint has and ``folder`` has not; empty where it is whole. Raises ``OSError``."""
    index = folder / "model.safetensors.index.json"
    try:
        shards = _listed(index, folder) if index.is_file() else set[str]()
    except (ValueError, KeyError, TypeError):
        return index.name
    needed = ["config.json", *sorted(shards or {"model.safetensors"})]
    return next((name for name in needed if not (folder / name).is_file()), "")


def place_of(path: str) -> str:
    """A directory, or what may be a name on the hub, as messages call it."""
    return f"the directory {path}" if Path(path).exists() else f"{path!r} (no such directory here)"


def unreadable(path: str, name: str, what: str, error: Exception) -> UserError:
    """The error for a checkpoint whose file ``name`` cannot be read, and whose ``what`` nobody recorded."""
    if wrong := lacking(path):
        return UserError(f"model.path: {wrong}")
    reason = str(error).strip().split("\n")[0]
    fault = f"is no directory with {name}" if Path(path).exists() else "cannot be read here"
    return UserError(
        f"model.path: {path} {fault} ({reason})\n  Correct the path, go online for a hub name, or record the "
        f"checkpoint's {what} in a JSON file and name it in the recipe (architecture: FILE)"
    )


def _from_hub(path: str, name: str) -> str:
    """From the cache first."""
    from huggingface_hub import constants, hf_hub_download

    try:
        return hf_hub_download(path, name, local_files_only=True)
    except OSError:
        if constants.HF_HUB_OFFLINE:
            raise
    _reach()
    return hf_hub_download(path, name, etag_timeout=3)


def _reach() -> None:
    """Raise ``OSError`` where the hub cannot be reached: its own client would try for half a minute."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE forbids to download it")
    try:
        httpx.head(constants.ENDPOINT, timeout=3)
    except httpx.HTTPError as error:
        raise OSError(f"{constants.ENDPOINT} cannot be reached: {error}") from error
